"""Test images and synthetic images as the finished model sees them."""

from __future__ import annotations

import torch

from osfl.core.seeds import torch_generator
from osfl.core.types import Dataset, Task
from osfl.evaluation.planes import BY_MODEL, each_of, model_plane
from osfl.ingredients.ensembles.ensemble import Ensemble
from osfl.models.build import build_model

TASK = Task("t", ("cat", "dog"), (1, 8, 8))
HOW = {
    "device": torch.device("cpu"),
    "run_map": lambda work, items: [work(item) for item in items],
    "draw": lambda *labels: torch_generator(0, *labels),
}


def images(count: int, seed: int, labels: int = 2) -> Dataset:
    rng = torch_generator(seed, "images")
    return Dataset(torch.randint(0, 256, (count, 1, 8, 8), generator=rng, dtype=torch.uint8), torch.arange(count) % labels)


def test_both_kinds_of_every_class_and_the_same_places_again() -> None:
    model = build_model("vit-p4-w8-d1-h2", TASK, torch_generator(0, "model")).eval()
    found = [model_plane(model, images(30, 1), images(24, 2), TASK.classes, **HOW) for _ in range(2)]  # type: ignore[arg-type]
    assert found[0] == found[1]
    series = found[0][BY_MODEL]["series"]
    assert {name: {kind: len(points) for kind, points in kinds.items()} for name, kinds in series.items()} == {
        name: {"real test": 12, "synthetic": 15} for name in TASK.classes
    }


def test_a_class_without_synthetic_images_still_has_its_test_images() -> None:
    model = build_model("cnn-w4", TASK, torch_generator(0, "model")).eval()
    series = model_plane(model, images(10, 1, labels=1), images(24, 2), TASK.classes, **HOW)[BY_MODEL]["series"]  # type: ignore[arg-type]
    assert set(series["cat"]) == {"real test", "synthetic"} and set(series["dog"]) == {"real test"}


def test_nothing_is_drawn_of_an_ensemble_or_of_next_to_nothing() -> None:
    model = build_model("cnn-w4", TASK, torch_generator(0, "model")).eval()
    assert model_plane(Ensemble([model]), images(30, 1), images(24, 2), TASK.classes, **HOW) == {}  # type: ignore[arg-type]
    assert model_plane(model, images(2, 1), images(2, 2), TASK.classes, **HOW) == {}  # type: ignore[arg-type]


def test_points_are_few_enough_to_be_seen() -> None:
    assert each_of(2) == 60 and each_of(10) == 24 and each_of(1000) == 5
