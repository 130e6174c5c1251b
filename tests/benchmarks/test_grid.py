"""The grid of cells: every row can be asked for, before hours are spent on the rows ahead of it."""

from dataclasses import asdict, fields
from typing import Any

import pytest

from benchmarks import grid
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


@pytest.mark.parametrize(("command", "seeds"), [([], (0, 1, 2)), (["--seeds=1,2"], (1, 2))])
def test_single_seeds_can_be_asked_for(monkeypatch: pytest.MonkeyPatch, command: list[str], seeds: tuple[int, ...]) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(grid, "compare", lambda simulation, labels, seeds, *_, **__: asked.append((seeds, list(labels))))
    monkeypatch.setattr(grid, "record", lambda cell, replaces: None)
    main(["skin-meet-n70-a0.5", "--only=local_only", *command])
    assert asked == [(seeds, ["local_only"])]
