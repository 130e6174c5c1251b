"""Patients and sites from columns, from file names, and the same picture in training and test."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from osfl.cli.main import answer
from osfl.core.errors import DataError, UsageError
from osfl.core.types import Dataset
from osfl.data import open_dataset, parse_partition
from osfl.data.leakage import difference_hash, name_problems, near_duplicates, probable_people
from osfl.data.reading import Reading, Slices, check_reading, parse_slices, parse_window, reading_of
from osfl.data.source import Part, part_of
from osfl.simulate.simulation import Simulation, prepare

SCANNERS = ("Scan A", "Scan A", "Scan B", "Scan B", "Scan B", "Ward 3", "Ward 3", "Ward 3", "Ward 3", "Ward 3")


@pytest.fixture
def ten(tmp_path: Path) -> Path:
    """Ten patients of six images each at three scanners, in a table as Excel writes it: BOM, semicolons, CRLF."""
    rows = ["Path;Label;Fall-Nr;Scanner"]
    for patient, scanner in enumerate(SCANNERS):
        for i in range(6):
            name = f"{patient}-{i}.png"
            pixels = np.random.default_rng(10 * patient + i).integers(0, 256, (8, 8), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name)
            rows.append(f"{name};{'sick' if i % 2 else 'well'};{1000 + patient};{scanner}")
    (tmp_path / "ten.csv").write_bytes("\r\n".join(rows).encode("utf-8-sig"))
    return tmp_path / "ten.csv"


def _people(part: Part) -> set[str]:
    assert part.groups is not None
    return set(part.groups.tolist())


def test_a_column_of_any_name_keeps_patients_together(ten: Path) -> None:
    source = open_dataset(str(ten), size=8, reading=Reading(group="FALL-NR"))
    assert not _people(source.train) & _people(source.test)
    assert _people(source.train) | _people(source.test) == {str(1000 + i) for i in range(10)}
    assert any("'fall-nr' names the patient of an image: 10 in 60 rows" in p.what for p in source.problems)
    without = open_dataset(str(ten), size=8)
    assert without.train.groups is None and any("--group" in p.done for p in without.problems)
    with pytest.raises(DataError, match=r"no column 'fall'.*Did you mean 'fall-nr'"):
        open_dataset(str(ten), size=8, reading=Reading(group="fall"))


def test_sites_are_the_values_of_a_column(ten: Path) -> None:
    federation = prepare(Simulation("local_only", str(ten), None, "by:scanner", image_size=8, reading=Reading(group="Fall-Nr")))
    assert federation.plan.clients == ("scan-a", "scan-b", "ward-3")
    assert federation.plan.data["partition"] == "by:scanner" and federation.plan.data["group"] == "Fall-Nr"
    train = federation.source.train
    assert train.domains is not None and train.groups is not None
    held = {c: sum(counts) for c, counts in federation.counts.items()}
    assert held == {c: int((train.domains == name).sum()) for c, name in zip(held, ("Scan A", "Scan B", "Ward 3"), strict=True)}
    alike = prepare(Simulation("local_only", str(ten), None, "by:scanner", image_size=8))
    assert alike.domains is not None and all(mask.any() for mask in alike.domains.values())  # tested on their own images


def test_a_small_ward_without_test_images_is_a_finding(ten: Path) -> None:
    text = ten.read_text(encoding="utf-8-sig").replace("0-0.png;well;1000;Scan A", "0-0.png;well;1000;") + "\n"
    ten.write_text("".join(line + "\n" for line in text.splitlines()), encoding="utf-8")
    federation = prepare(Simulation("local_only", str(ten), None, "by:Scanner", image_size=8, reading=Reading(group="fall-nr")))
    output = {problem.what: problem for problem in federation.problems}
    assert "1 rows with nothing in 'scanner'" in output
    assert federation.domains is None and output["a site without test images"].done.startswith("all sites' own scores")


def test_someone_at_two_sites_is_put_at_one(ten: Path) -> None:
    ten.write_text(ten.read_text(encoding="utf-8-sig").replace("9-0.png;well;1009;Ward 3", "9-0.png;well;1009;Scan A"))
    federation = prepare(Simulation("local_only", str(ten), None, "by:scanner", image_size=8, reading=Reading(group="fall-nr")))
    assert federation.source.train.groups is not None and federation.source.train.domains is not None
    inside = "1009" in federation.source.train.groups.tolist()
    assert any("1 people (groups) have images at more than one site" in p.what for p in federation.problems) == inside


def test_the_plan_repeats_it(ten: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ten.parent)
    monkeypatch.setenv("OSFL_DATA", str(ten.parent))
    what = ["--dataset", "ten.csv", "--partition", "by:scanner", "--group", "fall-nr", "--image-size", "8"]
    assert answer(["new", "--method", "local_only", *what, "--smoke"]) == 0
    capsys.readouterr()
    assert answer(["check", "plan.toml", "--format", "json"]) == 0
    output = json.loads(capsys.readouterr().out)
    assert answer(["check", "--method", "local_only", *what, "--smoke", "--format", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["plan"] == output["plan"]
    command = Simulation("local_only", "ten.csv", reading=Reading("fall-nr", "", "axial:3", "40:400")).command("out")
    assert "--group fall-nr --slices axial:3 --window 40:400" in command


def test_columns_are_those_of_tables(ten: Path) -> None:
    for reading in (Reading(group="ward"), Reading(by="ward")):
        with pytest.raises(UsageError, match="no table, so it has no columns"):
            open_dataset("digits", reading=reading)
        with pytest.raises(UsageError, match="no table, so it has no columns"):
            open_dataset(str(ten.parent), reading=reading)
    assert str(parse_partition("by:Scanner")) == "by:scanner" and parse_partition("by:a:b").column == "a:b"
    with pytest.raises(UsageError, match="name of a column"):
        parse_partition("by:")


def test_how_files_are_read_is_checked() -> None:
    assert (
        parse_slices("") == Slices(2, 1)
        and parse_slices("Coronal:5") == Slices(1, 5)
        and parse_slices("sagittal:all") == Slices(0, None)
    )
    assert parse_window("40:400") == (40, 400) and parse_window("") is None
    with pytest.raises(UsageError) as both:
        check_reading(Reading(slices="up:3", window="40"))
    assert len(both.value.problems) == 2
    for bad in ("axial:0", "axial:-1", "axial:x", "1"):
        with pytest.raises(UsageError):
            parse_slices(bad)
    for bad in ("40:0", "nan:3", "1:2:3", "1:inf"):
        with pytest.raises(UsageError):
            parse_window(bad)
    assert reading_of({"group": "g", "dataset": "d"}) == Reading(group="g")


# --- file names -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    ["patient{:03}_{}.png", "a/Subj-{}-view{}.png", "P{:04}_{}.jpg", "A{}_{}.png", "x/{}_slice{}.png", "case {} im {}.png"],
)
def test_patients_in_file_names(pattern: str) -> None:
    names = [pattern.format(person, i) for person in range(10, 20) for i in range(4)]
    found = probable_people(names)
    assert found is not None and len(set(found)) == 10
    assert all(len(set(found[4 * i : 4 * i + 4])) == 1 for i in range(10))


@pytest.mark.parametrize("pattern", ["cat_{1:03}.png", "{1}.png", "BA_{1}{0}.png", "img{0}{1}.png", "p{0}{1}.png"])
def test_counters_are_no_patients(pattern: str) -> None:
    assert probable_people([pattern.format(person, i) for person in range(10, 20) for i in range(4)]) is None


def test_people_in_names_are_reported_with_those_in_both_parts() -> None:
    images = np.zeros((40, 1, 8, 8), dtype=np.uint8)
    names = np.array([f"patient{i // 4}_{i % 4}.png" for i in range(40)])
    whole = part_of(images, [0] * 40, names=names)
    (found,) = name_problems(whole.subset(np.arange(30)), whole.subset(np.arange(26, 40)))
    assert (
        found.what
        == "file names that look like patients: about 8 people in 30 training images, 2 of them in the test part, too"
    )
    assert not name_problems(part_of(images, [0] * 40, groups=names, names=names), None)


# --- the same picture -------------------------------------------------------------------------------------------------


def _smooth(number: int, side: int = 32) -> Image.Image:
    rough = np.random.default_rng(number).integers(0, 256, (6, 6), dtype=np.uint8)
    return Image.fromarray(rough).resize((side, side), Image.Resampling.BICUBIC)


def _part(pictures: list[Image.Image], stem: str) -> Part:
    stack = np.stack([np.asarray(picture) for picture in pictures])[:, None]
    return part_of(stack, [0] * len(pictures), names=np.array([f"{stem}{i}.png" for i in range(len(pictures))]))


def test_copies_are_found_however_they_were_saved() -> None:
    jpeg = io.BytesIO()
    _smooth(3).save(jpeg, "JPEG", quality=60)
    brighter = _smooth(5).point(lambda value: min(255, int(value * 0.9) + 20))
    scaled = _smooth(7).resize((24, 24), Image.Resampling.BILINEAR).resize((32, 32), Image.Resampling.BILINEAR)
    others = [_smooth(i) for i in range(100, 140)]
    train = _part([_smooth(i) for i in range(40)], "train")
    found = near_duplicates(train, _part([*others, Image.open(jpeg), brighter, scaled], "test"))
    assert [(p.path, p.detail) for p in found] == [
        ("test40.png", "train3.png"),
        ("test41.png", "train5.png"),
        ("test42.png", "train7.png"),
    ]


def test_plain_images_are_no_copies_of_each_other() -> None:
    plain = part_of(np.full((5, 3, 8, 8), 90, np.uint8), [0] * 5)
    assert near_duplicates(plain, plain) == []
    nothing = part_of(np.empty((0, 1, 8, 8), np.uint8), [])
    assert near_duplicates(nothing, plain) == [] and near_duplicates(plain, nothing) == []


def test_the_hash_has_a_bit_for_each_pair_of_neighbors() -> None:
    ramp = torch.arange(9, dtype=torch.uint8).repeat(8, 1)[None, None] * 20
    both = Dataset(torch.cat([ramp, ramp.flip(3)]), torch.zeros(2, dtype=torch.int64))
    assert difference_hash(both)[0].tolist() == [2**64 - 1, 0]


@pytest.mark.data
def test_real_cells_are_not_confused(real_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_DATA", str(real_folder))
    cells = open_dataset("bloodcells-28")
    assert len(near_duplicates(cells.train.subset(np.arange(3000)), cells.test)) <= 4
