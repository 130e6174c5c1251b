"""Multi-label sums: images of no class are in the second moments and in the sum of all images; the egress check tries both."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from osfl.core.errors import UploadBlocked
from osfl.core.method import Context, Method
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import Dataset, Plan, Shard, Task
from osfl.rounds.egress import check_exposure
from osfl.rounds.exposure import Ratio, compared, would_stop

TASK = Task("chest", ("row", "column", "square"), (1, 8, 8), "multilabel")
SMALL: dict[str, dict[str, Any]] = {
    "onesum": {"filters": 4, "scales": 1, "thumbnail": 4},
    "fedcgs": {"encoder": "random", "window": 8, "resolution": 8, "stride": 8, "tokens": "global", "precision": "float64"},
}
ALL_IMAGES = len(TASK.classes)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


def shard(labels: torch.Tensor, contrast: int = 256) -> Shard:
    rng = torch.Generator().manual_seed(0)
    images = torch.randint(0, contrast, (len(labels) + 20, 1, 8, 8), generator=rng, dtype=torch.uint8)
    return Shard("north", Dataset(images[20:], labels), Dataset(images[:20], one_class_each(20)))


def one_class_each(count: int) -> torch.Tensor:
    return functional.one_hot(torch.arange(count) % 3, 3)


def tried(name: str, data: Shard, *, real: bool = True, secure_sum: bool = False, **changes: str) -> list[Ratio]:
    settings = resolve_settings(load(name), "smoke", {**SMALL[name], **changes})
    plan = replace(Plan(TASK, name, settings, ("north", "south", "west")), secure_sum=secure_sum)
    one: Method = load(name)(TASK, settings)
    ctx = Context(plan, torch.device("cpu"))
    return check_exposure(one, one.client_phase(data, ctx), data, TASK, ctx, real=real)


@pytest.mark.parametrize("name", SMALL)
def test_the_only_image_of_no_class_is_what_all_images_have_more_than_the_classes(name: str) -> None:
    labels = one_class_each(60)
    labels[7] = 0
    with pytest.raises(
        UploadBlocked, match="all images: a sum of all images less the classes in the upload is much nearer"
    ) as no:
        tried(name, shard(labels))
    assert no.value.field == "readable" and "secure_sum" in str(no.value.fix)
    found = tried(name, shard(labels), real=False)  # a simulation goes on and says so
    assert would_stop(found) and min(r.ratio for r in found if r.label == ALL_IMAGES) < 0.01
    assert "of all images, has a distance ratio of 0.00" in compared(found, TASK.classes)
    assert not would_stop(tried(name, shard(labels), secure_sum=True))


def test_with_mirrored_images_it_is_the_mean_of_the_image_and_its_mirrors() -> None:
    labels = one_class_each(60)
    labels[7] = 0
    with pytest.raises(UploadBlocked, match="all images: a sum of all images less the classes"):
        tried("onesum", shard(labels), symmetry="flip")


@pytest.mark.parametrize("name", SMALL)
def test_the_only_image_of_two_classes_is_found_as_well(name: str) -> None:
    labels = one_class_each(60)
    labels[7] = torch.tensor([1, 1, 0])
    with pytest.raises(UploadBlocked, match="all images: a sum of all images less the classes"):
        tried(name, shard(labels))


@pytest.mark.parametrize("name", SMALL)
def test_several_images_of_no_class_are_no_reason_to_stop(name: str) -> None:
    labels = one_class_each(60)
    labels[:12] = 0
    found = tried(name, shard(labels))
    mine = {ratio.what: ratio.ratio for ratio in found if ratio.label == ALL_IMAGES}
    assert mine["sum of all images less the classes"] > 0.2


def test_a_row_of_second_moments_that_shows_an_image_of_no_class_stops_a_real_site() -> None:
    """Twelve images of no class, so their sum shows none; one of them has features that no other image has."""
    labels = one_class_each(60)
    labels[:12] = 0
    data = shard(labels, contrast=8)
    data.train.images[3] = torch.randint(0, 256, (1, 8, 8), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    found = tried("onesum", data, real=False)
    mine = {ratio.what: ratio.ratio for ratio in found if ratio.label == ALL_IMAGES}
    assert mine["row of second moments"] < 0.01 < 0.2 < mine["sum of all images less the classes"] and would_stop(found)
