"""Words and TOML become plans; all mistakes come at once, each with the nearest valid name."""

from dataclasses import fields, replace
from pathlib import Path

import pytest

from osfl.core.errors import UsageError
from osfl.core.plan import check_plan, read_plan, write_plan
from osfl.core.registry import load, names
from osfl.core.settings import comments_of, deviations, parse_changes, resolve_settings
from osfl.core.types import Limits, Plan, Task
from osfl.methods.fedavg import FedAvg, Settings
from osfl.methods.fedisca import FedISCA
from osfl.simulate.simulation import Simulation, prepare

TASK = Task("cells", ("round", "long"), (3, 28, 28))


def test_presets_then_changes() -> None:
    settings = resolve_settings(FedAvg, "cpu", {"epochs": "3", "lr": "0.5", "weighting": "uniform"})
    assert (settings.architecture, settings.epochs, settings.lr, settings.weighting) == ("cnn-w16", 3, 0.5, "uniform")


def test_defaults_are_the_papers() -> None:
    paper = resolve_settings(FedAvg, "paper")
    assert (paper.architecture, paper.epochs, paper.batch_size, paper.lr) == ("resnet18", 100, 128, 1e-3)
    assert deviations(FedAvg(TASK, paper), paper) == []
    short = resolve_settings(FedAvg, "paper", {"epochs": 3})
    assert "epochs = 3, paper: 100" in deviations(FedAvg(TASK, short), short)


def test_a_term_that_an_architecture_cannot_have_is_named() -> None:
    """A ViT has no batch norm: the run says so instead of weighing zeros in silence."""
    reported = {}
    for architecture in ("cnn-w8", "vit-p7-w16-d1-h2", "*:cnn-w8,client-02:vit-p7-w16-d1-h2"):
        settings = resolve_settings(FedISCA, "paper", {"architecture": architecture})
        reported[architecture] = [line for line in deviations(FedISCA(TASK, settings), settings) if "no effect" in line]
    assert reported.pop("cnn-w8") == []
    for lines in reported.values():
        assert lines == ["bn = 10.0 has no effect on vit-p7-w16-d1-h2: no batch norm to compare or adapt"]


def test_every_mistake_is_in_one_message() -> None:
    with pytest.raises(UsageError) as caught:
        resolve_settings(FedAvg, "cpu", {"epoch": "3", "lr": "fast", "weighting": "equal", "batch_size": "1.5"})
    text = str(caught.value)
    assert len(caught.value.problems) == 4
    assert "Did you mean 'epochs'" in text and "'fast'" in text and "uniform" in text and "'1.5'" in text


@pytest.mark.parametrize("command", [["epochs"], ["=3"], [" =3"]])
def test_a_setting_needs_key_and_value(command: list[str]) -> None:
    with pytest.raises(UsageError, match="expected key=value"):
        parse_changes(command)


def test_the_prefix_method_may_be_left_out() -> None:
    assert parse_changes(["method.epochs=2", "lr = 0.1"]) == {"epochs": "2", "lr": "0.1"}


def plan() -> Plan:
    return Plan(TASK, "fedavg", Settings(epochs=3), ("north", "south"), seed=7, data={"dataset": "cells"})


def test_a_written_plan_reads_back_to_the_same_digest(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(write_plan(plan()))
    assert read_plan(path).digest == plan().digest


def test_a_quorum_nobody_can_reach_is_reported_with_the_other_mistakes(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(
        'method = "fedavg"\nclients = ["a"]\nsede = 1\n[task]\nclasses = ["x", "y"]\nimage = [1, 8, 8]\n[round]\nquorum = 9\n'
    )
    with pytest.raises(UsageError) as caught:
        read_plan(path)
    assert len(caught.value.problems) == 2 and "round.quorum: expected at most 1" in caught.value.problems[1]


@pytest.mark.parametrize("word", ["nan", "inf", "-inf"])
def test_numbers_are_finite(word: str) -> None:
    with pytest.raises(UsageError, match=rf"setting 'lr': expected float, got '{word}' \(not a finite number\)"):
        resolve_settings(load("fedavg"), "paper", {"lr": word})


@pytest.mark.parametrize("word", ["1e39", "-1e300"])
def test_numbers_fit_in_single_precision(word: str) -> None:
    with pytest.raises(UsageError, match=rf"setting 'lr': expected float, got '{word}' \(at most 1e\+30\)"):
        resolve_settings(load("fedavg"), "paper", {"lr": word})


def test_a_plan_explains_its_settings() -> None:
    text = write_plan(plan())
    assert "passes over the client's images" in text
    assert comments_of(Settings)["weighting"].startswith("samples | uniform: Eq. 1")


@pytest.mark.parametrize("name", names())
def test_every_setting_of_every_method_is_explained(name: str) -> None:
    settings = load(name).Settings
    assert {field.name for field in fields(settings)} - comments_of(settings).keys() == set()


def test_the_digest_names_the_round() -> None:
    """Anything agreed changes it, and nothing else does."""
    other = Plan(TASK, "fedavg", Settings(epochs=4), ("north", "south"), seed=7, data={"dataset": "cells"})
    assert plan().digest != other.digest
    again = Plan(TASK, "fedavg", Settings(epochs=3), ("north", "south"), seed=7, data={"dataset": "cells"})
    assert plan().digest == again.digest and len(again.digest) == 64


BROKEN = {
    "no file": (None, "there is no plan"),
    "not toml": ("method = ", "not valid TOML"),
    "nested without end": ("a = " + "[" * 100_000, "not valid TOML"),
    "a number without end": ("seed = " + "1" * 5_000, "not valid TOML"),
    "unknown key": ('methd = "fedavg"', "Did you mean 'method'"),
    "another version": ('version = 9\nmethod = "fedavg"\nclients = []\n[task]\nclasses = []\nimage = []', "expected 1.*got 9"),
    "one class": ('method = "fedavg"\nclients = ["a"]\n[task]\nclasses = ["x"]\nimage = [1, 8, 8]', "at least 2 classes"),
    "a class twice": ('method = "fedavg"\nclients = ["a"]\n[task]\nclasses = ["x", "x"]\nimage = [1, 8, 8]', "named twice"),
    "no clients": ('method = "fedavg"\nclients = []\n[task]\nclasses = ["x", "y"]\nimage = [1, 8, 8]', "one or more"),
    "a path": ('method = "fedavg"\nclients = ["../a"]\n[task]\nclasses = ["x", "y"]\nimage = [1, 8, 8]', "not a client name"),
    "channels": ('method = "fedavg"\nclients = ["a"]\n[task]\nclasses = ["x", "y"]\nimage = [2, 8, 8]', "1 or 3"),
    "shape": ('method = "fedavg"\nclients = ["a"]\n[task]\nclasses = ["x", "y"]\nimage = [8]', "'task.image': expected three"),
    "method": ('method = "fedavgg"\nclients = ["a"]\n[task]\nclasses = ["x", "y"]\nimage = [1, 8, 8]', "Did you mean"),
    "setting": (
        'method = "fedavg"\nclients = ["a"]\n[task]\nclasses = ["x", "y"]\nimage = [1, 8, 8]\n[settings]\nepochs = 0',
        "expected at least 1",
    ),
}


# one line of a good plan, changed: (line, instead, message)
EDITED = {
    "list for a number": ("lr = 0.001", "lr = [1]", r"'lr': expected float, got \[1\]"),
    "text for samples": ("samples = 9", 'samples = "x"', "'data.samples': expected a positive whole number, got 'x'"),
    "number for a dataset": ('dataset = "cells"', "dataset = 5", "'data.dataset': expected text, got 5"),
    "another part": ('evaluated_on = "test"', 'evaluated_on = "train"', "'data.evaluated_on': expected 'test' or 'val'"),
    "text for a seed": ("seed = 7", 'seed = "x"', "'seed': expected a whole number, got 'x'"),
    "truth for a seed": ("seed = 7", "seed = true", "'seed': expected a whole number, got True"),
    "number for clients": ('clients = ["north", "south"]', "clients = 5", "'clients': expected a list of names .* got 5"),
    "text for clients": ('clients = ["north", "south"]', 'clients = "abc"', "'clients': expected a list .* got 'abc'"),
    "text for classes": ('classes = ["round", "long"]', 'classes = "ab"', "'task.classes': expected a list .* got 'ab'"),
    "no classes": ('classes = ["round", "long"]', "", "'task.classes' is missing"),
    "text in an image": ("image = [3, 28, 28]", 'image = [3, "x", 28]', "'task.image': expected three positive"),
    "number for a method": ('method = "fedavg"', "method = 5", "'method': expected text, got 5"),
    "limit of nothing": ("facts_bytes = 65536", "facts_bytes = 0", "'limits.facts_bytes': expected a positive .* got 0"),
    "text for a limit": ("facts_bytes = 65536", 'facts_bytes = "1 MB"', "'limits.facts_bytes': expected .* got '1 MB'"),
    "share above one": ("share = 0.4", "share = 1.5", "'limits.share': expected a share above 0, at most 1, got 1.5"),
    "no share": ("share = 0.4", "share = 0", "'limits.share': expected a share above 0, at most 1, got 0"),
    "negative images": ("class_samples = 1000000", "class_samples = -1", "'limits.class_samples': expected a positive"),
    "unknown limit": ("facts_bytes = ", "fact_bytes = ", "'limits.fact_bytes'.* Did you mean 'limits.facts_bytes'"),
    "unknown part of the task": ("image = ", "images = ", "unknown key 'task.images'"),
}


def edited(folder: Path, *changes: tuple[str, str]) -> Path:
    data = {"dataset": "cells", "samples": 9, "evaluated_on": "test"}
    text = write_plan(Plan(TASK, "fedavg", Settings(), ("north", "south"), seed=7, data=data))
    for line, instead in changes:
        assert text.count(line) == 1
        text = text.replace(line, instead)
    path = folder / "plan.toml"
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", EDITED)
def test_each_key_is_checked_by_itself(name: str, tmp_path: Path) -> None:
    line, instead, expected = EDITED[name]
    with pytest.raises(UsageError, match=expected):
        read_plan(edited(tmp_path, (line, instead)))


def test_all_mistakes_of_a_plan_at_once(tmp_path: Path) -> None:
    apart = ("text for samples", "text for a seed", "number for clients", "text in an image", "list for a number")
    with pytest.raises(UsageError) as caught:
        read_plan(edited(tmp_path, *(EDITED[name][:2] for name in apart)))
    assert len(caught.value.problems) == len(apart)
    assert all(problem.startswith(str(tmp_path)) for problem in caught.value.problems)


def test_limits_are_part_of_the_plan(tmp_path: Path) -> None:
    assert read_plan(edited(tmp_path, ("facts_bytes = 65536", "facts_bytes = 4096"))).limits == Limits(facts_bytes=4096)
    command = Simulation("fedavg", clients=2, partition="iid", preset="smoke", samples=60)
    smaller = replace(command, limits=Limits(facts_bytes=4096))
    assert prepare(command).plan.limits == Limits() and prepare(smaller).plan.limits == Limits(facts_bytes=4096)
    assert prepare(command).plan.digest != prepare(smaller).plan.digest


def test_a_setting_of_the_wrong_shape_is_a_message() -> None:
    with pytest.raises(UsageError, match=r"'lr': expected float, got \[1\]"):
        resolve_settings(FedAvg, "cpu", {"lr": [1]})
    with pytest.raises(UsageError, match="'epochs': expected int, got None"):
        resolve_settings(FedAvg, "cpu", {"epochs": None})


@pytest.mark.parametrize("name", BROKEN)
def test_broken_plans_say_what_is_wrong(name: str, tmp_path: Path) -> None:
    content, expected = BROKEN[name]
    path = tmp_path / "plan.toml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=expected):
        read_plan(path)


def test_an_architecture_for_nobody_is_named() -> None:
    settings = resolve_settings(load("fedavg"), "smoke", {"architecture": "a:cnn-w8,nobody:cnn-w8,*:cnn-w4"})
    with pytest.raises(UsageError, match="'nobody' is no client of this plan; clients: a, b"):
        check_plan(Plan(TASK, "fedavg", settings, ("a", "b")))
