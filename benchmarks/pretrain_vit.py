"""A small ViT for clients to start from, trained on images of which the task has none.

    python -m benchmarks.pretrain_vit             all files; what is there is not made again
    python -m benchmarks.pretrain_vit cifar       for tasks on cifar10-subset, at 32 px
    python -m benchmarks.pretrain_vit blood       for tasks on bloodcells-28, at 28 px
    python -m benchmarks.pretrain_vit blood-again the same once more, on another processor: other bytes, cells of their own
    python -m benchmarks.pretrain_vit signs       for digits, at 16 px; from drawn signs, and a part of the package

FedMITR's clients start from ImageNet. None of its images are here. For CIFAR's pictures, a network that was trained on them
tells what it sees in pictures of PACS (distilled_start.py). For blood cells this takes the training parts of all other
datasets, as one task of all their classes; small datasets are drawn more often. One thread and a fixed number of steps: the
same machine gives the same bytes. Files go to runs/pretrained, what made them and their sha256 to benchmarks/records. One of
the datasets (skinlesions-28) is for non-commercial use only, and so are the weights for blood cells. Digits need no file on any
machine, and nor should their start: it learns drawn signs (signs.py), and is `vit_signs` of `osfl ls weights`.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from benchmarks.bench import RECORDS
from benchmarks.distilled_start import Distillation, distilled, lessons, teacher_output
from benchmarks.signs import Drawing, drawn_signs
from osfl.core.result import write_json
from osfl.core.seeds import torch_generator
from osfl.core.types import Dataset, Task
from osfl.data import open_dataset
from osfl.ingredients.training.local import Training, fit
from osfl.models.architectures import parse
from osfl.models.build import build_model
from osfl.models.weights_table import KNOWN
from osfl.runtime.environment import describe_environment
from osfl.runtime.machine import Machine
from osfl.runtime.workers import compute_threads

FOLDER = Path("runs/pretrained")
DRAWN = 16_000  # images of one epoch, drawn from the pool once
RECIPE = Training(
    "vit",
    epochs=6,
    batch_size=64,
    optimizer="adam",
    lr=1e-3,
    weight_decay=0.0,
    schedule="cosine",
    augment="flip+crop",
    clip=1.0,
)
TELLING_SIGNS = replace(RECIPE, epochs=12, augment="none")  # mirrored, a sign would be another


@dataclass(frozen=True)
class Start:
    """One file: for images of which side, and from which datasets; from none of them, signs are drawn."""

    side: int
    pool: tuple[str, ...]
    by_teacher: bool = False  # by a network from ImageNet, which is shown crops of the pool; else by the pool's labels


_BUT_BLOOD = ("cifar10-subset", "skinlesions-28", "retinamnist", "pneumoniamnist", "brain-mri-subset", "pacs-subset")
STARTS = {
    "cifar": Start(32, ("pacs-subset",), by_teacher=True),
    "blood": Start(28, _BUT_BLOOD),
    "blood-again": Start(28, _BUT_BLOOD),
    "signs": Start(16, ()),
}
PICTURES = 227  # side of PACS


def pooled(names: Sequence[str], side: int) -> tuple[Dataset, list[str], dict[str, Any]]:
    """The training parts as one dataset of all classes, and what each of them is."""
    images, labels = [], []
    classes: list[str] = []
    details: dict[str, Any] = {}
    for name in names:
        source = open_dataset(name, size=side, channels=3)
        part = source.train.dataset
        images.append(part.images)
        labels.append(part.labels + len(classes))
        classes += [f"{name}/{label}" for label in source.classes]
        details[name] = {"images": len(part), "digest": source.digest, "license": source.sheet.license if source.sheet else ""}
    return Dataset(torch.cat(images), torch.cat(labels)), classes, details


def drawn(pool: Dataset, sizes: Sequence[int], count: int) -> Dataset:
    """So many images with repetition; a dataset counts by the root of its size."""
    weights = torch.cat([torch.full((size,), size**-0.5) for size in sizes])
    return pool.subset(torch.multinomial(weights, count, replacement=True, generator=torch_generator(0, "pretrain", "draw")))


def by_labels(start: Start, recipe: Training = RECIPE, count: int = DRAWN) -> tuple[nn.Module, dict[str, Any]]:
    """Trained on the pool's classes; and what the record says."""
    pool, classes, details = pooled(start.pool, start.side)
    data = drawn(pool, [facts["images"] for facts in details.values()], count)
    task = Task("a pool", tuple(classes), (3, start.side, start.side))
    model = build_model(recipe.architecture, task, torch_generator(0, "pretrain", "init"))
    fit(model, data, recipe, torch_generator(0, "pretrain", "fit"), progress=_line)
    return model, {"pool": details, "classes": len(classes), "drawn": count, "recipe": asdict(recipe)}


def by_teacher(start: Start, recipe: Distillation = Distillation()) -> tuple[nn.Module, dict[str, Any]]:
    """Weights that were distilled from a network of ImageNet, and what the record holds of it."""
    pool, _, details = pooled(start.pool, PICTURES)
    patch = parse(recipe.architecture)[1]["p"]
    model = distilled(lessons(pool.images, start.side, patch, recipe), recipe, _line)
    return model, {"pool": details, "teacher": teacher_output(), "recipe": asdict(recipe)}


def by_drawings(
    start: Start, recipe: Training = TELLING_SIGNS, drawing: Drawing = Drawing()
) -> tuple[nn.Module, dict[str, Any]]:
    """Trained to tell drawn signs apart; and what the record says."""
    data = drawn_signs(start.side, drawing)
    task = Task("signs", tuple(f"sign {number}" for number in range(drawing.signs)), (1, start.side, start.side))
    model = build_model(recipe.architecture, task, torch_generator(0, "pretrain", "init"))
    fit(model, data, recipe, torch_generator(0, "pretrain", "fit"), progress=_line)
    return model, {"pool": {}, "drawing": asdict(drawing), "recipe": asdict(recipe)}


def pretrain(name: str, path: Path, *recipe: Any) -> dict[str, Any]:
    """Train and save, in half precision if the name says so; returns what the record says."""
    start, began = STARTS[name], time.process_time()
    with compute_threads(1):
        model, details = (by_teacher if start.by_teacher else by_labels if start.pool else by_drawings)(start, *recipe)
    path.parent.mkdir(parents=True, exist_ok=True)
    kind = torch.float16 if path.stem.endswith("-fp16") else torch.float32
    state = {key: value.to(kind).contiguous() for key, value in model.state_dict().items() if not key.startswith("head.")}
    save_file(state, path)
    return {
        "file": _shown(path),
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "side": start.side,
        **details,
        "cpu_seconds": round(time.process_time() - began, 1),
    }


def path_of(name: str) -> Path:
    return KNOWN["vit_signs"].path() if name == "signs" else FOLDER / f"vit-{name}.safetensors"


def _shown(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def earlier(name: str, sha256: str) -> list[dict[str, Any]]:
    """Other bytes that the same command made before: another processor rounds in other places. Records of cells name theirs."""
    path = RECORDS / f"pretrain-{name}.json"
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    details = [{key: before[key] for key in ("sha256", "date", "environment", "cpu_seconds")}] if before else []
    return [one for one in (*before.get("earlier", ()), *details) if one["sha256"] != sha256]


def _line(done: int, total: int) -> None:
    print(f"{time.strftime('%H:%M:%S')} epoch {done} of {total}", flush=True)


def main(names: list[str]) -> None:
    for name in names or list(STARTS):
        if name not in STARTS:
            raise SystemExit(f"there is no start {name!r}; starts: {', '.join(STARTS)}")
        path = path_of(name)
        if not path.exists():
            with compute_threads(1):
                environment = describe_environment(Machine(), 1)
            made = {
                "command": f"python -m benchmarks.pretrain_vit {name}",
                "date": time.strftime("%Y-%m-%d", time.gmtime()),
                "environment": environment,
                **pretrain(name, path),
            }
            write_json(RECORDS / f"pretrain-{name}.json", {**made, "earlier": earlier(name, made["sha256"])})
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        pinned = "vit_signs" if name == "signs" else f"{path} --set pretrained_sha256={sha256}"
        print(f"--set architecture={RECIPE.architecture} --set pretrained={pinned}  # {sha256}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
