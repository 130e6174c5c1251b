"""The score sections of a run's page: against references, by client, by class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from osfl.core.result import Metrics, Result, Scores
from osfl.reports.plots import bars, confusion, heatmap
from osfl.reports.rendering import responsive
from osfl.reports.tables import bars_table, grid_table
from osfl.reports.text import count, decimal, judged_on, percent, size

# --- against references ----------------------------------------------------------------------------------------------


def accuracy_section(result: Result, references: Sequence[Result]) -> dict[str, object]:
    runs = [result, *(other for other in references if other != result)]
    groups = dict(zip(_run_names(runs), map(_bar_pair, runs), strict=True))
    always = (
        "always the more frequent answer of each class" if "labels" in result["scores"] else "always the most frequent class"
    )
    line = (always, result["scores"]["majority"])
    series = (judged_on(result["data"]), "own distribution, mean over clients")
    what = "Accuracy of this run and its references, on all images and on the clients' own distributions"

    def draw(width: float) -> str:
        return bars(groups, series, what=what, width=width, reference=line, strong=next(iter(groups)))

    chart = responsive(draw, "Accuracy", bars_table(groups, series))
    return {"accuracy_chart": chart, "accuracy_hint": _accuracy_hint(runs), **_scores(result)}


def _run_names(runs: Sequence[Result]) -> list[str]:
    """Method names, this run first; references that share one also show their seed, and a position if need be."""
    methods = Counter(run["method"] for run in runs[1:])
    names = [f"{run['method']}, seed {run['seed']}" if methods[run["method"]] > 1 else run["method"] for run in runs]
    names[0] = f"{runs[0]['method']} (this run)"
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


def _scores(result: Result) -> dict[str, object]:
    metrics = result["scores"]["global"]
    whose = "mean over the clients' own models" if result["scores"]["personalized"] else "the released model"
    title = f"All scores on the {judged_on(result['data'])}: {whose}"
    if "labels" in result["scores"]:
        return {"scores": label_metrics(metrics), "scores_title": title}
    auroc = "one class against the rest" if metrics["auroc"] is not None else "needs images of two classes"
    rows = [
        ("Accuracy", percent(metrics["accuracy"]), "share of right answers"),
        ("Balanced accuracy", percent(metrics["balanced_accuracy"]), "every class counts the same"),
        ("AUROC", decimal(metrics["auroc"]), auroc),
        ("F1", decimal(metrics["f1"]), "macro over classes"),
        ("Calibration error", decimal(metrics["ece"]), "15 bins, 0 is best"),
        ("Log-likelihood loss", decimal(metrics["nll"]), "mean, lower is better"),
    ]
    return {"scores": rows, "scores_title": title}


def label_metrics(metrics: Metrics) -> list[tuple[str, str, str]]:
    """Multi-label: (score, value, what it says)."""
    micro = "over all pairs of image and class at once"
    return [
        ("AUROC", decimal(metrics["auroc"]), "macro: mean over classes, each yes or no"),
        ("AUROC, micro", decimal(metrics["auroc_micro"]), micro),
        ("Average precision", decimal(metrics["ap"]), "macro"),
        ("Average precision, micro", decimal(metrics["ap_micro"]), micro),
        ("F1", decimal(metrics["f1"]), "macro, thresholds from validation images"),
        ("F1, micro", decimal(metrics["f1_micro"]), f"{micro}, same thresholds"),
        ("Balanced accuracy", percent(metrics["balanced_accuracy"]), "sensitivity and specificity, mean over classes"),
        ("Accuracy", percent(metrics["accuracy"]), "share of right yes and no; rare classes make it high"),
        ("Calibration error", decimal(metrics["ece"]), "15 bins, 0 is best"),
        ("Log-likelihood loss", decimal(metrics["nll"]), "mean over images and classes, lower is better"),
    ]


LABEL_HEAD = ("Class", "Images", "AUROC", "Average precision", "F1", "Sensitivity", "Specificity", "Threshold")


def label_rows(scores: Scores) -> list[list[str]]:
    """Multi-label: a row a class, under LABEL_HEAD."""
    return [
        [
            name,
            count(row["images"]),
            *(decimal(value) for value in (row["auroc"], row["ap"], row["f1"])),
            *(percent(value) for value in (row["sensitivity"], row["specificity"])),
            decimal(row["threshold"]),
        ]
        for name, row in scores["labels"].items()
    ]


# --- by client and by class ------------------------------------------------------------------------------------------


def clients_section(result: Result) -> dict[str, Any]:
    names, classes = [row["client"] for row in result["clients"]], [str(name) for name in result["task"]["classes"]]
    counts = [row["class_counts"] for row in result["clients"]]
    what = f"Heat map of label counts: {len(names)} clients by {len(classes)} classes"

    def draw(width: float) -> str:
        return heatmap(
            names,
            classes,
            counts,
            what=what,
            width=width,
            root=True,
            unit="images",
            row_title="client",
            column_title="class",
        )

    spread = result["scores"]["clients"]
    whose = "its own model" if result["scores"]["personalized"] else "the released model"
    own = "per-class accuracy weighted by its shares of the classes"
    if "labels" in result["scores"]:
        own = "sensitivity and specificity of each class, weighted by how often it has the class"
    hint = (
        f"Accuracy of {whose} on the client's own distribution ({own}; "
        f"where clients are domains, on images of its domain) and on the {judged_on(result['data'])}."
    )
    return {
        "label_chart": responsive(draw, "Labels over clients", grid_table(names, classes, counts, "client")),
        "clients_hint": hint,
        "judged": judged_on(result["data"]),
        "clients": _client_rows(result),
        "own_spread": f"{percent(spread['own']['mean'])} ± {percent(spread['own']['std'])}",
        "everyone_spread": f"{percent(spread['everyone']['mean'])} ± {percent(spread['everyone']['std'])}",
    }


def _client_rows(result: Result) -> list[dict[str, str]]:
    scores, up = result["scores"]["clients"], result["costs"]["upload_bytes_by_client"]
    own = scores["own"]["values"]
    best, worst = max(own.values(), default=0), min(own.values(), default=0)
    rows = []
    for row in result["clients"]:
        name, value = row["client"], own.get(row["client"])
        mark = "" if best == worst else "best" if value == best else "worst" if value == worst else ""
        rows.append(
            {
                "client": name,
                "train": count(row["train"]),
                "val": count(row["val"]),
                "own": percent(value),
                "mark": mark,
                "everyone": percent(scores["everyone"]["values"].get(name)),
                "up": size(up.get(name, 0)),
                "exact": f"{count(up.get(name, 0))} bytes",
            }
        )
    return rows


def confusion_section(result: Result) -> dict[str, Any]:
    scores, names = result["scores"], [str(name) for name in result["task"]["classes"]]
    if "labels" in scores:
        hint = (
            "Each class is a yes or no of its own. The threshold on its probability is where F1 is highest on validation "
            "images of the clients; 0.5 where none of them shows the class. No test image was used for it."
        )
        return {"label_head": LABEL_HEAD, "label_rows": label_rows(scores), "confusion_hint": hint}
    right = [scores["per_class"].get(name) for name in names]
    what = f"Confusion matrix over {len(names)} classes"

    def draw(width: float) -> str:
        return confusion(names, scores["confusion"], what=what, width=width, right=right)

    hint = "Rows are the truth, columns the answer; color is the share of the row, the diagonal is right."
    if scores["personalized"]:
        hint += " Counts are the mean over the clients' own models."
    chart = responsive(draw, "Confusion matrix", grid_table(names, names, scores["confusion"], "truth"))
    return {"label_rows": [], "confusion_chart": chart, "confusion_hint": hint}
