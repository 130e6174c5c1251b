"""The report of one run: `index.html`, which opens offline, from results.json only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from osfl.core.headline import SMOKE, headline_of, is_smoke
from osfl.core.result import DIGESTS, Result, Scores, finding_line, suspicion_lines
from osfl.reports.audit import audit_section
from osfl.reports.columns import POOLED
from osfl.reports.course import course_figures
from osfl.reports.differential_privacy import privacy_sentences
from osfl.reports.figures import figure_views
from osfl.reports.gains import encounters_section, gains_section
from osfl.reports.generators import generators_section
from osfl.reports.rendering import fact_rows, render, write_text
from osfl.reports.score_sections import accuracy_section, clients_section, confusion_section
from osfl.reports.text import count, decimal, flops, judged_on, many, percent, seconds, size
from osfl.reports.tokens import tokens_section

_PHASES = {
    "client": "Clients, before sending",
    "server": "Server",
    "personalize": "Clients, after the release",
    "evaluate": "Evaluation",
}


def write_report(result: Result, folder: Path, references: Sequence[Result] = ()) -> Path:
    """Write `folder/index.html`; `references` are other runs on the same data to show beside this one."""
    return write_text(folder / "index.html", run_page(result, references))


def run_page(result: Result, references: Sequence[Result] = ()) -> str:
    return render(
        "run.html",
        **_head(result),
        **accuracy_section(result, references),
        **clients_section(result),
        **confusion_section(result),
        **_costs(result),
        **generators_section(result, references),
        **tokens_section(result),
        **audit_section(result),
        **gains_section(result),
        **encounters_section(result),
        **_record(result, references),
        privacy=privacy_sentences(result["privacy"]) if "privacy" in result else [],
    )


# --- the head --------------------------------------------------------------------------------------------------------


def _head(result: Result) -> dict[str, Any]:
    data, classes = result["data"], count(len(result["task"]["classes"]))
    chips = [
        ("partition", data.get("partition", "as given")),
        ("clients", count(len(result["clients"]))),
        ("classes", classes),
        ("preset", result["preset"]),
        ("seed", str(result["seed"])),
    ]
    if data.get("samples") is not None:
        chips.append(("samples", str(data["samples"])))
    chips += [(key, str(value)) for key, value in result.get("topology", {}).items()]
    heading = f"{result['method']} on {data.get('dataset', result['task'].get('name', 'unnamed data'))}"
    banner = SMOKE if is_smoke(result) else ""
    return {
        "banner": banner,
        "heading": heading,
        "lede": _summary_sentence(result),
        "chips": chips,
        "tiles": _tiles(result),
        "cautions": _cautions(result),
    }


def _cautions(result: Result) -> list[str]:
    """What a reader should know before any number."""
    noticed = [f"Data: {finding_line(finding)}" for finding in result["data"].get("findings", ())]
    return [*suspicion_lines(result), *(result["inputs"]["cautions"] if "inputs" in result else ()), *noticed]


def _summary_sentence(result: Result) -> str:
    clients, messages = many(len(result["clients"]), "client"), result["costs"]["messages_per_client"]
    if result["method"] == POOLED:
        return f"A reference, not a federation: the images of {clients} were pooled and trained on in one place."
    if "encounters" in result:
        times = many(len(result["encounters"]), "time")
        return f"{clients} exchanged with their neighbors {times}, with exactly one upload each in every encounter."
    if messages == 1:
        return f"{clients} trained together, and each of them uploaded exactly once."
    if messages == 0:
        return f"A reference for {clients}: no message was sent."
    return f"A multi-round reference, not a one-shot method: each of {clients} uploaded {count(messages)} times."


def _tiles(result: Result) -> list[dict[str, str]]:
    scores, costs = result["scores"], result["costs"]
    own, sent = scores["clients"]["own"], costs["messages_per_client"]
    whose = "mean over the clients' own models" if scores["personalized"] else "the released model"
    return [
        _first_tile(result, f"{whose}, on the {judged_on(result['data'])}"),
        _tile(
            "Own-distribution accuracy", percent(own["mean"]), f"mean over clients, each on its own classes{_weighed(scores)}"
        ),
        _tile("Worst client", percent(own["worst"]), f"{own['worst_client']}, on its own distribution"),
        _tile("Uploaded", size(costs["upload_bytes"]), f"by all clients together, {many(sent, 'message')} each"),
    ]


def _weighed(scores: Scores) -> str:
    """The mean own-distribution accuracy where each site replaces the release's class shares by its own (prior correction)."""
    if "weighed" not in scores["clients"]:
        return ""
    return f"; {percent(scores['clients']['weighed']['mean'])} where each weighs classes as it has them (prior=site)"


def _first_tile(result: Result, where: str) -> dict[str, str]:
    metric, _ = headline_of(result)
    if "labels" in result["scores"]:
        return _tile("AUROC", decimal(result["scores"]["global"]["auroc"]), f"mean over classes, each yes or no; {where}")
    if metric == "accuracy":
        return _tile("Global accuracy", percent(result["scores"]["global"]["accuracy"]), where)
    plain = percent(result["scores"]["global"]["accuracy"])
    why = f"{where}, where classes are unbalanced; accuracy {plain}"
    return _tile("Balanced accuracy", percent(result["scores"]["global"]["balanced_accuracy"]), why)


def _tile(name: str, figure: str, why: str) -> dict[str, str]:
    return {"name": name, "figure": figure, "why": why}


# --- costs and record ------------------------------------------------------------------------------------------------


def _costs(result: Result) -> dict[str, object]:
    costs = result["costs"]
    up, down = costs["upload_bytes_by_client"], costs["download_bytes_by_client"]
    names = [row["client"] for row in result["clients"]]
    traffic = [
        {
            "client": name,
            "up": size(up.get(name, 0)),
            "down": size(down.get(name, 0)),
            "exact_up": f"{count(up.get(name, 0))} bytes",
            "exact_down": f"{count(down.get(name, 0))} bytes",
        }
        for name in names
    ]
    phases = [
        {
            "name": _PHASES.get(name, name),
            "seconds": seconds(phase["seconds"]),
            "flops": flops(phase["flops"]),
            "peak": size(phase["peak_bytes"]),
        }
        for name, phase in costs["phases"].items()
    ]
    hint = (
        "Bytes are measured on the bundles as sent. Time is summed over clients, by the wall clock; "
        "operations are counted by torch (a multiply-add is 2); memory is the high-water mark of the whole process."
    )
    return {
        "costs_hint": hint,
        "traffic": traffic,
        "messages": count(costs["messages_per_client"]),
        "phases": phases,
        "total_up": size(costs["upload_bytes"]),
        "total_down": size(costs["download_bytes"]),
        "wall": seconds(costs["wall_seconds"]),
        "inference": size(costs["inference_bytes"]) if "inference_bytes" in costs else "",
    }


def _record(result: Result, references: Sequence[Result]) -> dict[str, object]:
    facts = {key: value for key, value in result["data"].items() if value is not None and key != "findings"}
    if "inputs" in result:
        facts |= {"inputs": " ".join(result["inputs"]["lines"]) or "images as they are in the files"}
    task = {f"task {key}": value for key, value in result["task"].items()}
    digests = [(key, result[key]) for key in DIGESTS if key in result]  # type: ignore[literal-required]
    figures = {**course_figures(result, references), **result.get("figures", {})}
    return {
        "figures": figure_views(figures, {row["client"]: row["class_counts"] for row in result["clients"]}),
        "deviations": result["deviations"],
        "settings": fact_rows(result["settings"]),
        "data": fact_rows({**task, **facts}),
        "environment": fact_rows(result["environment"]),
        "digests": digests,
        "command": result["command"],
    }
