"""The real files: that they are the ones the sheets describe. Small sizes keep it quick."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from osfl.data import assign, class_counts, make_shards, open_dataset, sheets
from osfl.data.places import hashes

pytestmark = pytest.mark.data

# name -> images of each class in train, val (None: no such part) and test, as the files' README counts them
COUNTS: dict[str, tuple[list[int], list[int] | None, list[int]]] = {
    "retinamnist": ([486, 128, 206, 194, 66], [54, 12, 28, 20, 6], [174, 46, 92, 68, 20]),
    "pneumoniamnist": ([1214, 3494], [135, 389], [234, 390]),
    "bloodcells-28": (
        [853, 2182, 1086, 2026, 850, 994, 2330, 1644],
        [122, 312, 155, 290, 121, 142, 333, 235],
        [243, 623, 310, 579, 243, 284, 666, 469],
    ),
    "skinlesions-28": (
        [229, 360, 770, 82, 781, 4695, 100],
        [33, 52, 110, 11, 110, 669, 15],
        [65, 102, 219, 22, 222, 1341, 27],
    ),
    "cifar10-subset": ([500] * 10, None, [100] * 10),
    "pacs-subset": ([128] * 7, None, [32] * 7),
    "brain-mri-subset": ([400] * 4, None, [100] * 4),
    "chest-xray-448-subset": ([300] * 2, None, [234, 390]),
    "bloodcells-360-subset": ([48] * 8, None, [12] * 8),
}


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def real_data(real_folder: Path, shared_cache: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_DATA", str(real_folder))
    monkeypatch.setenv("OSFL_CACHE", str(shared_cache))


@pytest.mark.parametrize("name", COUNTS)
def test_the_file_is_the_one_on_the_sheet(name: str, real_folder: Path) -> None:
    (file,) = sheets()[name].files
    assert hashes(real_folder / file.name)["sha256"] == file.sha256


@pytest.mark.parametrize("name", COUNTS)
def test_counts(name: str) -> None:
    sheet = sheets()[name]
    source = open_dataset(name, size=16 if sheet.layout == "zip" else None)
    train, val, test = COUNTS[name]
    n = len(source.classes)
    assert class_counts(source.train.labels, n).tolist() == train
    assert class_counts(source.test.labels, n).tolist() == test
    assert (source.val is None) == (val is None)
    assert source.val is None or class_counts(source.val.labels, n).tolist() == val
    assert source.sheet is sheet and not any("hash" in p.what for p in source.problems)
    assert sum(sheet.counts.values()) == sum(train) + sum(val or []) + sum(test)


def test_pacs_has_four_domains_as_clients() -> None:
    source = open_dataset("pacs-subset", size=16)
    drawn = assign("domains", source.train.labels, 4, 0, source.train.domains)
    assert list(drawn) == ["art-painting", "cartoon", "photo", "sketch"]
    assert {len(part) for part in drawn.values()} == {224} and source.problems == ()


def test_brain_is_gray_and_its_doubles_are_reported() -> None:
    source = open_dataset("brain-mri-subset", size=16)
    assert source.image == (1, 16, 16)
    assert len(source.problems) == 19 and all("another part" in p.what for p in source.problems)


def test_chest_patients_stay_together() -> None:
    source = open_dataset("chest-xray-448-subset", size=16)
    groups = source.train.groups
    assert groups is not None and len(np.unique(groups)) == 274 + 189
    part = assign("iid", source.train.labels, 2, 0)["client-01"]
    (shard,) = make_shards(source, {"client-01": part}, seed=0)
    where = {image.numpy().tobytes(): group for image, group in zip(source.train.dataset.images, groups, strict=True)}
    sides = [{where[image.numpy().tobytes()] for image in side.images} for side in (shard.train, shard.val)]
    assert not sides[0] & sides[1] and len(shard.val) == pytest.approx(30, abs=4)
