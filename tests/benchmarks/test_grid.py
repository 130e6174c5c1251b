"""The grid of cells: every row can be asked for, before hours are spent on the rows ahead of it."""

import json
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from benchmarks import grid
from benchmarks.claims import PAPERS
from benchmarks.grid import CELLS, main, methods_of
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import Task
from osfl.ingredients.training.local import Training
from osfl.simulate.simulation import for_methods, prepare


@pytest.mark.parametrize("cell", CELLS)
def test_every_row_of_a_cell_can_be_asked_for(cell: str) -> None:
    side = CELLS[cell].image_size or 32
    task = Task("ten classes", tuple("abcdefghij"), (3, side, side))
    for label, variant in zip(methods_of(cell), for_methods(CELLS[cell], methods_of(cell)), strict=True):
        changes = {name: value for name, value in variant.changes.items() if not name.startswith("pretrained")}
        settings = resolve_settings(load(variant.method), variant.preset, changes)
        problems = list(load(variant.method)(task, settings).problems(variant.clients or len(task.classes)))
        assert not problems, f"{label}: {problems}"


@pytest.mark.parametrize("cell", [cell for cell in CELLS if CELLS[cell].dataset == "digits"])
def test_every_partition_of_the_embedded_images_can_be_made(cell: str) -> None:
    assert len(prepare(CELLS[cell]).shards) == (CELLS[cell].clients or 10)


def test_the_published_server_is_published_in_every_setting() -> None:
    (variant,) = for_methods(CELLS["digits-vit-n5-a0.1"], grid.AS_PUBLISHED)
    ours, paper = (asdict(resolve_settings(load("fedmitr"), *command)) for command in (("cpu", variant.changes), ("paper",)))
    training = {one.name for one in fields(Training)}  # the clients' part
    assert {name for name in ours if ours[name] != paper[name]} - training == {"server_epochs"}


def test_the_published_falcon_is_published_but_for_its_encoder_and_the_sizes_of_its_networks() -> None:
    (variant,) = for_methods(CELLS["brain-a0.1"], [grid.FALCON_PAPER])
    ours, paper = (asdict(resolve_settings(load("falcon"), *command)) for command in (("cpu", variant.changes), ("paper",)))
    encoder, sizes = {"encoder", "resolution", "window", "stride"}, {"generator_width", "depth", "heads", "hidden"}
    assert {name for name in ours if ours[name] != paper[name]} == encoder | sizes


@pytest.mark.parametrize("word", ["--help", "-h", "--skipp=dense"])
def test_options_that_are_not_known_start_no_hours_of_work(word: str) -> None:
    with pytest.raises(SystemExit, match="Cells of the papers' tables"):
        main([word])


def test_theorems_are_recorded_as_printed_and_as_we_read_them() -> None:
    note = "The bound as printed is 40 to 90: it is above 1, so it cannot fail."
    risks = {"series": {"difference of risks": [0.1, 0.3], "bound: mean √(KL/2)": [0.2, 0.2]}, "note": note}
    rates = {"measured": [1.0, 0.6, 0.3], "promised": [1.0, 0.5, 0.4], "printed": [1.0, 0.9, 0.8]}
    found = grid.measured({grid.RISKS: risks, grid.DESCENT: {"series": rates}})
    assert found[grid.RISKS]["held"] == 1 and found[grid.RISKS]["as_printed"] == note
    assert found[grid.DESCENT] == {
        "steps": 2,
        "held": 1,
        "held_as_printed": 2,
        "measured": 0.3,
        "promised": 0.4,
        "printed": 0.8,
    }


@pytest.mark.parametrize("text", ["--only==fedmitr", "--only=fedmitr"])
def test_a_whole_label_can_be_asked_for(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    asked: list[str] = []
    monkeypatch.setattr(grid, "compare", lambda simulation, labels, *_, **__: asked.extend(labels))
    monkeypatch.setattr(grid, "record", lambda cell, replaces: None)
    main(["digits-vit-n5-c3", text])
    assert (asked == ["fedmitr"]) == (text == "--only==fedmitr") and "fedmitr" in asked


@pytest.mark.parametrize(("command", "seeds"), [([], (0, 1, 2)), (["--seeds=1,2"], (1, 2))])
def test_single_seeds_can_be_asked_for(monkeypatch: pytest.MonkeyPatch, command: list[str], seeds: tuple[int, ...]) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(grid, "compare", lambda simulation, labels, seeds, *_, **__: asked.append((seeds, list(labels))))
    monkeypatch.setattr(grid, "record", lambda cell, replaces: None)
    main(["skin-meet-n70-a0.5", "--only=local_only", *command])
    assert asked == [(seeds, ["local_only"])]


def test_what_is_missing_is_listed_of_records_without_runs_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The grid has more rows than when a record was made; nothing else of the record changes."""
    monkeypatch.setattr(grid, "RECORDS", tmp_path)
    monkeypatch.chdir(tmp_path)
    row = {grid.ALWAYS[0]: {"n": 3}}
    made = {"cell": "digits-silos", "methods": {"local_only": row, "fedavg": {grid.ALWAYS[0]: {"n": 2}}}, "missing": []}
    (tmp_path / "digits-silos.json").write_text(json.dumps(made), encoding="utf-8")
    main(["digits-silos", "cifar-silos", "--collect"])
    found = json.loads((tmp_path / "digits-silos.json").read_text(encoding="utf-8"))
    assert found == {**made, "missing": [label for label in methods_of("digits-silos") if label != "local_only"]}
    assert "onesum" in found["missing"] and "fedavg" in found["missing"] and not (tmp_path / "cifar-silos.json").exists()


def test_a_start_that_was_made_again_has_cells_of_its_own() -> None:
    """Other bytes: its rows are beside none of the first start's, and no general claim counts the same images twice."""
    first, again = CELLS["blood-vit-n10-c3"], CELLS["blood-again-vit-n10-c3"]
    same = [name for name, value in first.changes.items() if again.changes[name] == value]
    assert sorted(first.changes.keys() - set(same)) == ["pretrained", "pretrained_sha256"]
    assert (first.dataset, first.partition, first.clients) == (again.dataset, again.partition, again.clients)
    assert grid.NEARER[0] in methods_of("blood-again-vit-n10-c3") and grid.NEARER[0] not in methods_of("blood-vit-n10-c3")
    asked = {claim.text: claim.cells for claim in PAPERS["fedmitr"]}
    assert not asked["above DeepInversion in every cell"]("blood-again-vit-n10-c3")
    assert asked["ours, all as one: above the preset"]("blood-again-vit-n10-c3")
