"""The page and the model card of a finished model that was measured on labeled images, from evaluation.json only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from markupsafe import Markup

from osfl.core.evaluated import Estimate, Evaluation
from osfl.core.headline import NAMES, SMOKE, constant_answer, constant_labels
from osfl.core.result import finding_line
from osfl.reports.markdown import code, safe, table
from osfl.reports.plots import confusion
from osfl.reports.reliability import reliability
from osfl.reports.rendering import fact_rows, render, responsive, write_text
from osfl.reports.tables import grid_table, rows_table
from osfl.reports.text import NOTHING, PERCENT, count, decimal, many, percent

LABELS = {
    "accuracy": ("Accuracy", "share of right answers"),
    "balanced_accuracy": ("Balanced accuracy", "every class counts the same"),
    "auroc": ("AUROC", "one class against the rest, macro"),
    "f1": ("F1", "macro over classes"),
    "ece": ("Calibration error", "15 bins, 0 is best"),
    "nll": ("Log-likelihood loss", "mean, lower is better"),
}
LABELS_EACH = {  # where an image may have several classes
    "auroc": ("AUROC", "macro over classes"),
    "auroc_micro": ("AUROC, micro", "all pairs of image and class at once"),
    "ap": ("Average precision", "macro over classes"),
    "ap_micro": ("Average precision, micro", "all pairs of image and class at once"),
    "f1": ("F1", "macro over classes, at the thresholds"),
    "f1_micro": ("F1, micro", "all pairs of image and class at once"),
    "balanced_accuracy": ("Balanced accuracy", "mean of sensitivity and specificity"),
    "accuracy": ("Accuracy", "share of right yes and no; high for rare classes"),
    "ece": ("Calibration error", "15 bins, 0 is best"),
    "nll": ("Log-likelihood loss", "mean, lower is better"),
}
_CLASS = ("recall", "precision", "specificity", "f1", "auroc")
_SHARES = ("accuracy", "balanced_accuracy", "recall", "precision", "specificity")


def write_evaluation_report(evaluation: Evaluation, folder: Path) -> Path:
    """Write `folder/index.html`."""
    data, metrics = evaluation["data"], evaluation["metrics"]
    names = [str(name) for name in evaluation["task"]["classes"]]
    page = render(
        "evaluation.html",
        banner=banner(evaluation["model"]),
        heading=heading(evaluation),
        lede=lede(evaluation),
        chips=_chips(evaluation),
        cautions=[*evaluation["cautions"], *(f"Data: {finding_line(one)}" for one in data.get("findings", ()))],
        below=below_constant(evaluation),
        scores=[
            (*label, *shown(name, metrics[name]), name == evaluation["headline"])
            for name, label in labels_of(evaluation).items()
        ],
        multilabel=is_multilabel(evaluation),
        thresholds=evaluation.get("thresholds", ""),
        interval=interval_sentence(evaluation),
        classes=[_class_row(name, evaluation) for name in names],
        groups=[_group_row(name, evaluation) for name in evaluation["groups"]],
        column=str(data.get("column", "")),
        headline=NAMES[evaluation["headline"]],
        calibration_chart=_reliability(evaluation),
        confusion_chart=_confusion(names, evaluation) if evaluation["confusion"] else "",
        model=fact_rows(evaluation["model"]),
        data=fact_rows({key: value for key, value in data.items() if value is not None and key != "findings"}),
        environment=fact_rows(evaluation["environment"]),
        command=evaluation["command"],
    )
    return write_text(folder / "index.html", page)


def banner(about: dict[str, object]) -> str:
    """What stands above the figures of a smoke run's model; else nothing."""
    return SMOKE if about.get("preset") == "smoke" else ""


def is_multilabel(evaluation: Evaluation) -> bool:
    return evaluation["task"].get("kind") == "multilabel"


def labels_of(evaluation: Evaluation) -> dict[str, tuple[str, str]]:
    """The scores in the order in which they are read, with name and explanation."""
    return LABELS_EACH if is_multilabel(evaluation) else LABELS


def heading(evaluation: Evaluation) -> str:
    model = evaluation["model"]
    what = model.get("method") or model.get("architecture") or "model"
    whose = f" of {model['client']}" if model.get("client") else ""
    return f"{what}{whose} on {evaluation['data']['name']}"


def lede(evaluation: Evaluation) -> str:
    first = evaluation["headline"]
    name = NAMES[first][0].upper() + NAMES[first][1:]
    value, interval = shown(first, evaluation["metrics"][first])
    which = {"test": "test images", "validation": "validation images", "all": "images"}[evaluation["data"]["part"]]
    bracket = f" ({interval})" if interval else ""
    where = f"{count(evaluation['data']['images'])} {which}"
    return f"{name} {value}{bracket} on {where}. It is read first because {evaluation['rule']}."


def below_constant(evaluation: Evaluation) -> str:
    """A sentence where the model is no better than always answering the same; else nothing."""
    metric = evaluation["headline"]
    value = evaluation["metrics"][metric]["value"]
    floor = constant_of(evaluation)
    if value is None or value > floor:
        return ""
    constant = f"{NAMES[metric]} {_text(metric, floor)}"
    if is_multilabel(evaluation):
        return f"This model is no better than answering each class with yes, or with no, whatever the image: {constant}."
    return f"This model is no better than always answering the most frequent class, which has {constant}."


def constant_of(evaluation: Evaluation) -> float:
    """What an answer that never looks at the image reaches at the headline metric."""
    metric, counts = evaluation["headline"], [scored["images"] for scored in evaluation["per_class"].values()]
    if is_multilabel(evaluation):
        return constant_labels(metric, evaluation["majority"], counts, evaluation["data"]["images"])
    return constant_answer(metric, counts)


def interval_sentence(evaluation: Evaluation) -> str:
    interval = evaluation["interval"]
    level, resamples = percent(interval["level"], 0), count(interval["resamples"])
    certain = any(one["recall"]["value"] in (0.0, 1.0) for one in evaluation["per_class"].values())
    narrow = " Where all or none are right, draws do not differ, and the true interval is wider." if certain else ""
    return f"Beside each score the {level} interval of {resamples} bootstrap draws of {interval['of']} (percentiles).{narrow}"


def _chips(evaluation: Evaluation) -> list[tuple[str, str]]:
    data = evaluation["data"]
    chips = [
        ("images", count(data["images"])),
        ("part", str(data["part"])),
        ("classes", str(len(evaluation["task"]["classes"]))),
    ]
    chips += [("people", count(data["people"]))] if data.get("people") is not None else []
    if not is_multilabel(evaluation):
        return [*chips, ("most frequent class", percent(evaluation["majority"]))]
    chips.append(("accuracy, always the same yes and no", percent(evaluation["majority"])))
    if evaluation["headline"] == "f1":
        chips.append(("macro F1, always yes", _text("f1", constant_of(evaluation))))
    return chips


def _text(name: str, value: float | None) -> str:
    return percent(value) if name in _SHARES else decimal(value)


def shown(name: str, estimate: Estimate) -> tuple[str, str]:
    """The value and its interval: 81.2 % and 79.0 – 83.1 %."""
    if estimate["value"] is None or estimate["low"] is None:
        return _text(name, estimate["value"]), ""
    low, high = _text(name, estimate["low"]).removesuffix(PERCENT), _text(name, estimate["high"])
    return _text(name, estimate["value"]), f"{low} – {high}"


def cell(name: str, estimate: Estimate) -> dict[str, str]:
    value, interval = shown(name, estimate)
    return {"value": value, "interval": interval}


def _class_row(name: str, evaluation: Evaluation) -> dict[str, object]:
    scored = evaluation["per_class"][name]
    columns = (*_CLASS, "ap") if "ap" in scored else _CLASS
    cells = [cell(key, scored[key]) for key in columns]  # type: ignore[literal-required]
    threshold = {"threshold": decimal(scored["threshold"])} if "threshold" in scored else {}
    return {"name": name, "images": count(scored["images"]), "cells": cells, **threshold}


def _group_row(name: str, evaluation: Evaluation) -> dict[str, object]:
    group = evaluation["groups"][name]
    first = evaluation["headline"]
    columns = dict.fromkeys([first, "accuracy", "balanced_accuracy", "auroc"])
    people = NOTHING if group["people"] is None else count(group["people"])
    cells = {key: cell(key, group["metrics"][key]) for key in columns}
    return {"name": name, "images": count(group["images"]), "people": people, "cells": cells}


_BINS = ("low", "high", "images", "confidence", "accuracy")


def _reliability(evaluation: Evaluation) -> Markup:
    bins = evaluation["calibration"]
    what = "How often answers are right against how sure the model is"
    if is_multilabel(evaluation):
        what = "How often an image has a class against the probability that the model gives it"
    return responsive(lambda width: reliability(bins, what=what, width=width), "Calibration", rows_table(_BINS, bins, _BINS))


def _confusion(names: list[str], evaluation: Evaluation) -> Markup:
    right = [evaluation["per_class"][name]["recall"]["value"] for name in names]
    what = f"Confusion matrix over {many(len(names), 'class', 'classes')}"
    table = grid_table(names, names, evaluation["confusion"], "truth")
    return responsive(
        lambda width: confusion(names, evaluation["confusion"], what=what, width=width, right=right), "Confusion matrix", table
    )


# --- model card -------------------------------------------------------------------------------------------------------


def write_evaluation_card(evaluation: Evaluation | None, about: dict[str, Any], task: dict[str, Any], folder: Path) -> Path:
    """`folder/model_card.md` of a finished model; `None` where no labeled images were at hand. `about` has a `path` where the
    card does not lie beside the model."""
    classes, image = task["classes"], " × ".join(map(str, task["image"]))
    facts = "".join(f"- {safe(key)}: {code(value)}\n" for key, value in fact_rows(about))
    what = about.get("method") or about.get("architecture") or "model"
    whose = f" at {safe(about['client'])}" if about.get("client") else ""
    trial = f"**{banner(about)}**\n\n" if banner(about) else ""
    place = f"`DIR` is {code(about['path'])}." if "path" in about else "`DIR` is the folder that holds this card."
    use = "" if "sha256" in about else f"\n## How to use it\n\n```sh\n{_USE}```\n\n{place}\n"  # a plain file needs more options
    named = ", ".join(safe(name) for name in classes)
    comes_out, gives = f"one of {count(len(classes))} classes comes out", "one of the classes above"
    if task.get("kind") == "multilabel":
        comes_out, gives = (
            f"a probability of each of {count(len(classes))} classes comes out",
            "a probability of each class above",
        )
    parts = [
        f"# Model card: {safe(what)}{whose}\n\n{trial}{facts}"
        f"- An image of {image} (channels × height × width) goes in, {comes_out}: {named}.\n",
        f"## Intended use and limits\n\nFor research on one-shot federated learning. It gives {gives} for "
        "every input, also for images unlike those it was trained on. It has not been validated for clinical or other "
        "consequential decisions; that needs a study of its own on the population where it would be used.\n",
        _card_scores(evaluation) if evaluation else _NOT_MEASURED,
    ]
    return write_text(folder / "model_card.md", "\n".join(parts) + use)


_USE = "osfl predict --run DIR image.png\nosfl evaluate DIR --data LABELED\n"
_NOT_MEASURED = (
    "## Evaluation\n\nNot measured: no labeled images were at hand. `osfl evaluate DIR --data LABELED` measures it.\n"
)


def _card_scores(evaluation: Evaluation) -> str:
    rows = [[label, *shown(name, evaluation["metrics"][name])] for name, (label, _) in labels_of(evaluation).items()]
    classes = [
        [safe(name), count(scored["images"]), *shown("recall", scored["recall"])]
        for name, scored in evaluation["per_class"].items()
    ]
    cautions = "".join(f"\n**Caution.** {safe(caution)}\n" for caution in evaluation["cautions"])
    sentences = [safe(lede(evaluation)), safe(interval_sentence(evaluation)), evaluation.get("thresholds", "")]
    return (
        f"## Evaluation\n\n{' '.join(filter(None, sentences))}\n\n"
        f"{table(['Score', 'Value', 'Interval'], rows)}{cautions}\n"
        f"### By class\n\n{table(['Class', 'Images', 'Right', 'Interval'], classes)}"
    )
