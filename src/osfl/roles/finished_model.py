"""Open any finished model: of a round folder, of a site, of a fusion, or a plain checkpoint; measure it on labeled images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from osfl.core.errors import UsageError
from osfl.core.evaluated import SCHEMA, Evaluation
from osfl.core.method import quiet
from osfl.core.plan import plan_from
from osfl.core.registry import load
from osfl.core.result import read_result, write_json
from osfl.core.types import ClientId, Payload, Plan, Progress, Task
from osfl.data import grouped
from osfl.data.labeled import LabeledImages, held_out_of_site
from osfl.data.reading import Reading, reading_of
from osfl.data.source import Part, content_digest
from osfl.evaluation.intervals import RESAMPLES
from osfl.evaluation.multilabel import HALF, thresholds
from osfl.evaluation.scores_with_intervals import probabilities_of, score_probabilities
from osfl.models.architectures import parse
from osfl.models.plain_checkpoints import fitted, image_of, pixels_of, read_checkpoint
from osfl.reports.evaluation import write_evaluation_card, write_evaluation_report
from osfl.rounds.finished import load_model
from osfl.rounds.state import read_json
from osfl.runtime.environment import describe_environment, device_named
from osfl.runtime.machine import Machine
from osfl.runtime.payloads import payload_digest

THRESHOLDS = "thresholds.json"  # beside a site's multi-label model
_CHOSEN = "Thresholds were chosen on validation images, where F1 is highest; none of these images had a say."
_NOT_CHOSEN = (
    "No thresholds are known for this model, so the answer is yes from 0.5 on: F1, recall, precision and specificity may be "
    "far below what other thresholds give. AUROC and average precision need none."
)


@dataclass(frozen=True)
class PlainModel:
    """What a plain checkpoint does not say of itself."""

    architecture: str = ""
    classes: Sequence[str] = ()
    image_size: int | None = None
    channels: int | None = None
    pixels: str | None = None


@dataclass(frozen=True)
class FinishedModel:
    """A classifier, the images that it takes, and what it is."""

    module: nn.Module
    task: Task
    about: dict[str, Any]
    reading: Reading = field(default_factory=Reading)
    thresholds: Mapping[str, float] = field(default_factory=dict)  # multi-label: by class, found on validation images


def open_model(path: Path, client: ClientId | None = None, plain: PlainModel = PlainModel()) -> FinishedModel:
    """The folder of a round, a fusion or a site's model; or a file, which needs its architecture and classes named."""
    if path.is_file():
        return _checkpoint(path, plain)
    if plain.architecture:
        raise UsageError(f"--architecture is for a plain checkpoint, and {path} is no file", field="architecture")
    module, task = load_model(path, client)
    plan = plan_from(read_json(path / "plan.json"), str(path / "plan.json"))
    about = {"path": str(path), "method": plan.method, "round": plan.digest, "weights": _weights(module)}
    about |= {"client": client} if client else {}
    about |= {"preset": "smoke"} if _made_in_a_trial(path, plan) else {}
    return FinishedModel(module, task, about, reading_of(plan.data), _thresholds(path) if task.several else {})


def _made_in_a_trial(folder: Path, plan: Plan) -> bool:
    """Whether the model is of a smoke run: its folder says so, or its plan has the settings of one."""
    for name in ("results.json", "fusion.json"):
        if (folder / name).exists() and (preset := read_json(folder / name).get("preset")):
            return bool(preset == "smoke")
    trial = load(plan.method).PRESETS.get("smoke", {})
    return bool(trial) and all(getattr(plan.settings, name, None) == value for name, value in trial.items())


def _thresholds(folder: Path) -> dict[str, float]:
    """Those of a site's model, or of a simulated run (the mean over its clients); none where nobody chose any."""
    if (folder / THRESHOLDS).exists():
        return {name: float(cut) for name, cut in read_json(folder / THRESHOLDS).items()}
    labels = read_result(folder)["scores"].get("labels", {}) if (folder / "results.json").exists() else {}
    return {name: row["threshold"] for name, row in labels.items()}


def _checkpoint(path: Path, plain: PlainModel) -> FinishedModel:
    if path.suffix.lower() in (".onnx", ".pt2"):
        raise UsageError(
            f"{path} is an exported model, for other programs",
            field="model",
            fix="It answers as the model that it was exported from: give the folder of that.",
        )
    if not plain.architecture or not plain.classes:
        raise UsageError(
            f"{path} is a plain checkpoint, which names neither its architecture nor its classes",
            field="architecture",
            fix="Add --architecture NAME and --classes classes.txt; or give the folder of a run or of a site's model.",
        )
    checkpoint = read_checkpoint(path)
    declared = image_of(checkpoint, plain.architecture)
    side = plain.image_size or (declared[1] if declared else 0)
    if not side:
        raise UsageError(
            f"{path} does not show which images {plain.architecture} was trained for",
            field="image_size",
            fix="Add --image-size PX (and --channels 1 for gray images).",
        )
    channels = plain.channels or (declared[0] if declared else 3)
    task = Task(path.stem, tuple(plain.classes), (channels, side, side))
    parse(plain.architecture)
    module = fitted(checkpoint, plain.architecture, task, pixels_of(checkpoint, plain.pixels)[0])
    about = {"path": str(path), "architecture": plain.architecture, "sha256": checkpoint.sha256, "weights": _weights(module)}
    return FinishedModel(module, task, about)


def _weights(module: nn.Module) -> str:
    """Equal exactly when the numbers of two models are."""
    return payload_digest(Payload({name: value.detach().cpu() for name, value in module.state_dict().items()}))


# --- measured ---------------------------------------------------------------------------------------------------------


def evaluate_model(
    model: FinishedModel,
    images: LabeledImages,
    *,
    metric: str = "",
    resamples: int = RESAMPLES,
    command: str = "",
    column: str = "",
    machine: Machine = Machine(),
    progress: Progress = quiet,
) -> Evaluation:
    """Everything that can be said of this model on these images. Nothing is trained and nothing is chosen by them."""
    progress("evaluate", 0, 1)
    classes, device, more = model.task.classes, device_named(machine.device), dict[str, Any]()
    answers = probabilities_of(model.module, images.part.dataset.images, device, model.task.kind)
    if model.task.several:
        more["cuts"] = np.array([model.thresholds.get(name, HALF) for name in classes])
    scores = score_probabilities(answers, images.part, classes, metric=metric, resamples=resamples, **more)
    if model.task.several:
        scores["thresholds"] = _CHOSEN if model.thresholds else _NOT_CHOSEN
    progress("evaluate", 1, 1)
    people, findings = images.part.groups, grouped(images.problems)
    data = {
        "name": images.name,
        "digest": content_digest(images.part.dataset, read=True),  # it is signed
        "part": images.which,
        "images": len(images.part),
        "people": None if people is None else len(set(people.tolist())),
        "column": column or ("domain" if scores["groups"] else ""),
        **({"findings": findings} if findings else {}),
    }
    task = {"name": model.task.name, "classes": list(classes), "image": list(model.task.image)}
    task |= {"kind": model.task.kind} if model.task.several else {}
    return {
        "schema": SCHEMA,
        "model": dict(model.about),
        "task": task,
        "data": data,
        **scores,  # type: ignore[typeddict-item]
        "cautions": _cautions(images, scores),
        "command": command,
        "environment": describe_environment(machine, 1),
    }


def _cautions(images: LabeledImages, scores: dict[str, Any]) -> list[str]:
    found = []
    if images.which == "all":
        found.append("All images were used, whatever their part: if the model was trained on some, the scores are too good.")
    if images.which == "validation":
        found.append(
            "These are images that the site held out from training; some methods choose their settings by them, and then "
            "the scores are a little too good. A part called test is better."
        )
    absent = [name for name, scored in scores["per_class"].items() if not scored["images"]]
    if absent:
        found.append(
            f"There is no image of {', '.join(absent)}: nothing is known about {'it' if len(absent) == 1 else 'them'}."
        )
    few = [name for name, scored in scores["per_class"].items() if 0 < scored["images"] < 10]
    if few:
        found.append(f"Fewer than 10 images of {', '.join(few)}: the intervals of so few are too narrow.")
    return found


def write_evaluation(evaluation: Evaluation, folder: Path) -> Path:
    """`evaluation.json`, the page and the model card drawn from it; the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "evaluation.json", evaluation)
    write_evaluation_card(evaluation, evaluation["model"], evaluation["task"], folder)
    return write_evaluation_report(evaluation, folder / "report")


def describe_at_site(
    folder: Path, client: ClientId, data: Path | None, command: str, machine: Machine = Machine()
) -> Evaluation | None:
    """What a site keeps beside its model: a model card, and where it has labeled images `evaluation.json` and a page."""
    model, plan = open_model(folder, client), plan_from(read_json(folder / "plan.json"), str(folder / "plan.json"))
    images = held_out_of_site(data, plan.task, client, plan.seed, model.reading) if data else None
    if images and images.held_out and plan.task.several:
        found = _choose_thresholds(model, images.held_out, machine)
        write_json(folder / THRESHOLDS, found)
        # on the images that chose them they would look too good, also where an earlier call kept them
        model = replace(model, thresholds=found if images.which == "test" else {})
    evaluation = evaluate_model(model, images, command=command, machine=machine) if images else None
    if evaluation:
        evaluation["model"].pop("path")  # the card lies beside the model
        write_evaluation(evaluation, folder)
        return evaluation
    task = {"classes": list(plan.task.classes), "image": list(plan.task.image), "kind": plan.task.kind}
    write_evaluation_card(None, {key: value for key, value in model.about.items() if key != "path"}, task, folder)
    return None


def _choose_thresholds(model: FinishedModel, held_out: Part, machine: Machine) -> dict[str, float]:
    """By class, where F1 on the site's validation images is highest; they stay at the site."""
    device = device_named(machine.device)
    answers = probabilities_of(model.module, held_out.dataset.images, device, model.task.kind)
    return dict(zip(model.task.classes, thresholds(answers, held_out.labels).tolist(), strict=True))
