"""One run as one page: `index.html` that opens offline, drawn from results.json alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from osfl.reports.figures import figure_views
from osfl.reports.plots import bars, confusion, heatmap
from osfl.reports.rendering import both, fact_rows, render, write_text
from osfl.reports.words import count, decimal, flops, many, percent, seconds, size
from osfl.result import Result

_PHASES = {
    "client": "Clients, summed", "server": "Server", "personalize": "Clients, after the release", "evaluate": "Evaluation",
}  # fmt: skip


def write_report(result: Result, folder: Path, references: Sequence[Result] = ()) -> Path:
    """Write `folder/index.html`; `references` are other runs on the same data to show beside this one."""
    page = render(
        "run.html", **_head(result), **_accuracy(result, references), **_clients(result), **_confusion(result),
        **_costs(result), **_record(result),
    )  # fmt: skip
    return write_text(folder / "index.html", page)


# --- the head --------------------------------------------------------------------------------------------------------


def _head(result: Result) -> dict[str, Any]:
    data = result["data"]
    chips = [
        ("method", result["method"]), ("dataset", data.get("dataset", result["task"].get("name", ""))),
        ("partition", data.get("partition", "given")), ("clients", count(len(result["clients"]))),
        ("classes", count(len(result["task"]["classes"]))), ("preset", result["preset"]), ("seed", str(result["seed"])),
    ]  # fmt: skip
    return {
        "heading": f"{chips[0][1]} on {chips[1][1]}",
        "lede": _lede(result),
        "chips": chips,
        "tiles": _tiles(result),
    }


def _lede(result: Result) -> str:
    clients, messages = many(len(result["clients"]), "client"), result["costs"]["messages_per_client"]
    if messages == 1:
        return f"{clients} trained together, and each of them spoke exactly once."
    if messages == 0:
        return f"A reference for {clients}: no message was sent."
    return f"A multi-round reference, not a one-shot method: each of {clients} spoke {count(messages)} times."


def _tiles(result: Result) -> list[dict[str, str]]:
    scores, costs = result["scores"], result["costs"]
    own, personal = scores["clients"]["own"], scores["personalized"]
    whose = "mean over the clients' own models" if personal else "the released model"
    sent = costs["messages_per_client"]
    return [
        _tile("Global accuracy", percent(scores["global"]["accuracy"]), f"{whose}, on the test set of all classes"),
        _tile("Own-distribution accuracy", percent(own["mean"]), "mean over clients, each on the classes it holds"),
        _tile("Worst client", percent(own["worst"]), f"{own['worst_client']}, on its own distribution"),
        _tile("Uploaded", size(costs["upload_bytes"]), f"all clients together, {many(sent, 'message')} each"),
    ]


def _tile(name: str, figure: str, why: str) -> dict[str, str]:
    return {"name": name, "figure": figure, "why": why}


# --- accuracy --------------------------------------------------------------------------------------------------------


def _accuracy(result: Result, references: Sequence[Result]) -> dict[str, Any]:
    runs = [result, *(other for other in references if other != result)]
    groups = dict(zip(_run_names(runs), map(_bar_pair, runs), strict=True))
    strong = next(iter(groups))
    line = ("always the most frequent class", result["scores"]["majority"])
    what = "Accuracy of this run and its references, on the global test set and on the clients' own distributions"
    series = ("global test set", "own distribution, mean over clients")

    def draw(width: float) -> str:
        return bars(groups, series, what=what, width=width, reference=line, strong=strong)

    return {"accuracy_chart": both(draw, "Accuracy"), "accuracy_hint": _accuracy_hint(runs), **_scores(result)}


def _run_names(runs: Sequence[Result]) -> list[str]:
    """Method names; runs that share one also show their seed, and a position if that is shared too."""
    methods = Counter(run["method"] for run in runs)
    names = [run["method"] if methods[run["method"]] == 1 else f"{run['method']}, seed {run['seed']}" for run in runs]
    return [name if names.count(name) == 1 else f"{name} ({names[:i].count(name) + 1})" for i, name in enumerate(names)]


def _bar_pair(run: Result) -> list[tuple[float | None, float | None]]:
    own = run["scores"]["clients"]["own"]
    return [(run["scores"]["global"]["accuracy"], None), (own["mean"], own["std"])]


def _accuracy_hint(runs: Sequence[Result]) -> str:
    text = "Whiskers are the standard deviation over clients. The dashed line is what a constant answer reaches."
    personal = [name for name, run in zip(_run_names(runs), runs, strict=True) if run["scores"]["personalized"]]
    if personal:
        text += f" For {', '.join(personal)}, global accuracy is the mean over the clients' own models."
    return text if len(runs) > 1 else text + " No reference run was given."


def _scores(result: Result) -> dict[str, Any]:
    metrics = result["scores"]["global"]
    rows = [
        ("Accuracy", percent(metrics["accuracy"]), "share of right answers"),
        ("Balanced accuracy", percent(metrics["balanced_accuracy"]), "mean of the per-class accuracies"),
        ("AUROC", decimal(metrics["auroc"]), "macro, one class against the rest"),
        ("F1", decimal(metrics["f1"]), "macro"),
        ("Calibration error", decimal(metrics["ece"]), "expected calibration error, 15 bins; 0 is best"),
        ("NLL", decimal(metrics["nll"]), "mean negative log-likelihood; lower is better"),
    ]
    hint = "Mean over the clients' own models." if result["scores"]["personalized"] else "Of the one released model."
    if metrics["auroc"] is None:
        hint += " AUROC does not exist here: the test set holds fewer than two classes."
    return {"scores": rows, "scores_hint": hint}


# --- clients ---------------------------------------------------------------------------------------------------------


def _clients(result: Result) -> dict[str, Any]:
    names, classes = [row["client"] for row in result["clients"]], [str(name) for name in result["task"]["classes"]]
    counts = [row["class_counts"] for row in result["clients"]]
    what = f"Heat map of label counts: {len(names)} clients by {len(classes)} classes"

    def draw(width: float) -> str:
        return heatmap(
            names, classes, counts, what=what, width=width, row_title="client", column_title="class", unit="images"
        )

    spread = result["scores"]["clients"]
    whose = "its own model" if result["scores"]["personalized"] else "the released model"
    hint = (
        f"Accuracy of {whose} on the client's own distribution (each class weighted by the client's share of it, or its own "
        "domain's test images) and on the global test set."
    )
    return {
        "label_chart": both(draw, "Labels over clients"), "clients_hint": hint, "clients": _client_rows(result),
        "own_spread": f"{percent(spread['own']['mean'])} ± {percent(spread['own']['std'])}",
        "everyone_spread": f"{percent(spread['everyone']['mean'])} ± {percent(spread['everyone']['std'])}",
    }  # fmt: skip


def _client_rows(result: Result) -> list[dict[str, str]]:
    scores, up = result["scores"]["clients"], result["costs"]["upload_bytes_by_client"]
    own = scores["own"]["values"]
    best, worst = max(own.values(), default=0), min(own.values(), default=0)
    rows = []
    for row in result["clients"]:
        name, value = row["client"], own.get(row["client"])
        mark = "" if best == worst else "best" if value == best else "worst" if value == worst else ""
        rows.append({
            "client": name, "train": count(row["train"]), "val": count(row["val"]), "own": percent(value), "mark": mark,
            "everyone": percent(scores["everyone"]["values"].get(name)),
            "up": size(up.get(name, 0)), "exact": f"{count(up.get(name, 0))} bytes",
        })  # fmt: skip
    return rows


def _confusion(result: Result) -> dict[str, Any]:
    scores, names = result["scores"], [str(name) for name in result["task"]["classes"]]
    right = [scores["per_class"].get(name) for name in names]
    what = f"Confusion matrix over {len(names)} classes"

    def draw(width: float) -> str:
        return confusion(names, scores["confusion"], what=what, width=width, right=right)

    hint = "Rows are the truth, columns the answer; colour is the share of the row, the diagonal is right."
    if scores["personalized"]:
        hint += " Counts are the mean over the clients' own models."
    return {"confusion_chart": both(draw, "Confusion matrix"), "confusion_hint": hint}


# --- costs and record ------------------------------------------------------------------------------------------------


def _costs(result: Result) -> dict[str, Any]:
    costs = result["costs"]
    up, down = costs["upload_bytes_by_client"], costs["download_bytes_by_client"]
    names = [row["client"] for row in result["clients"]]
    traffic = [
        {"client": name, "up": size(up.get(name, 0)), "down": size(down.get(name, 0)),
         "exact_up": f"{count(up.get(name, 0))} bytes", "exact_down": f"{count(down.get(name, 0))} bytes"}
        for name in names
    ]  # fmt: skip
    phases = [
        {"name": _PHASES.get(name, name), "seconds": seconds(phase["seconds"]), "flops": flops(phase["flops"]),
         "peak": size(phase["peak_bytes"])}
        for name, phase in costs["phases"].items()
    ]  # fmt: skip
    hint = (
        "Bytes are measured on the bundles as sent. Seconds of client phases are summed, as if one worker did everything; "
        "operations are counted by torch (a multiply-add is 2); memory is the whole process's high-water mark."
    )
    return {
        "costs_hint": hint, "traffic": traffic, "messages": count(costs["messages_per_client"]), "phases": phases,
        "total_up": size(costs["upload_bytes"]), "total_down": size(costs["download_bytes"]),
        "wall": seconds(costs["wall_seconds"]),
    }  # fmt: skip


def _record(result: Result) -> dict[str, Any]:
    task = {f"task {key}": value for key, value in result["task"].items()}
    digests = [(key, result[key]) for key in ("plan_digest", "release_digest", "models_digest")]
    return {
        "figures": figure_views(result.get("figures", {})), "deviations": result["deviations"],
        "settings": fact_rows(result["settings"]), "data": fact_rows({**task, **result["data"]}),
        "environment": fact_rows(result["environment"]), "digests": digests, "command": result["command"],
    }  # fmt: skip
