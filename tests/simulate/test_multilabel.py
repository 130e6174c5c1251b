"""Multi-label rounds from end to end: every method that can learn several labels, the others refused, and what users see."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from osfl.cli.main import answer
from osfl.core.errors import UsageError
from osfl.core.plan import check_plan, read_plan, write_plan
from osfl.core.registry import load, names
from osfl.core.result import Result
from osfl.core.settings import resolve_settings
from osfl.core.types import Plan, Task
from osfl.evaluation.comparison import summarize
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation, prepare
from tests.several import several, several_npz

TASK = Task("chest", ("row", "column", "square"), (1, 8, 8), "multilabel")
ABLE = sorted(name for name in names() if "multilabel" in load(name).TASKS)
SMALL: dict[str, dict[str, Any]] = {
    "onesum": {"filters": 4, "scales": 1, "thumbnail": 4},
    "fedcgs": {"encoder": "random", "window": 8, "resolution": 8, "stride": 8, "tokens": "global"},
}
BRIEF: dict[str, Any] = {"architecture": "cnn-w8", "epochs": 6, "batch_size": 32, "lr": 0.1}


def _plan(method: str, **changes: Any) -> Plan:
    settings = resolve_settings(load(method), "smoke", changes)
    return Plan(TASK, method, settings, ("client-01", "client-02"))


def _run(method: str, folder: Path, **changes: Any) -> Result:
    own = SMALL.get(method, {**BRIEF, "rounds": 2} if load(method).provides("simulate") and "rounds" in method else BRIEF)
    known = load(method).Settings.__dataclass_fields__
    chosen = {key: value for key, value in {**own, **changes}.items() if key in known}
    data = several_npz(folder / "chest.npz")
    return run(Simulation(method, str(data), 2, "dirichlet:1", preset="smoke", changes=chosen), folder / "run")


def test_who_can_learn_several_labels() -> None:
    needed = {"local_only", "fedavg", "ensemble", "fedcgs", "onesum", "centralized", "fedavg_rounds"}
    assert needed <= set(ABLE) and {"fedmitr", "falcon", "federated_factory"}.isdisjoint(ABLE)


@pytest.mark.parametrize("method", ABLE)
def test_a_round_learns_several_labels(method: str, tmp_path: Path) -> None:
    result = _run(method, tmp_path)
    scores = result["scores"]
    assert result["task"]["kind"] == "multilabel" and set(scores["labels"]) == {"0", "1", "2"}
    assert (scores["global"]["auroc"] or 0) > 0.8, scores["global"]  # by chance 0.5
    assert (scores["global"]["ap"] or 0) > 0.45 and scores["global"]["f1"] > 0.4  # of classes that 15 to 40 % have


@pytest.mark.parametrize("rule", ["logits", "probabilities", "size", "class_count"])
def test_every_rule_of_an_ensemble(rule: str, tmp_path: Path) -> None:
    assert (_run("ensemble", tmp_path, ensemble=rule)["scores"]["global"]["auroc"] or 0) > 0.8


@pytest.mark.parametrize("method", sorted(set(names()) - set(ABLE)))
def test_the_others_refuse_in_a_sentence(method: str) -> None:
    with pytest.raises(UsageError, match=f"{method} learns one class an image.*multi-label") as caught:
        check_plan(_plan(method))
    assert "Choose a method that can: " in str(caught.value.fix) and "onesum" in str(caught.value.fix)


@pytest.mark.parametrize(
    "method, changes",
    [
        ("fedavg", {"personalize": "prior"}),
        ("ensemble", {"ensemble": "odds"}),
        ("onesum", {"head": "qda", "by_class": True}),
        ("onesum", {"prior": "site"}),
        ("fedcgs", {"personal": True}),
    ],
)
def test_settings_of_one_class_an_image_are_refused(method: str, changes: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=f"setting '{next(iter(changes))}'"):
        check_plan(_plan(method, **changes))


def test_the_kind_is_a_part_of_the_plan(tmp_path: Path) -> None:
    plan = _plan("fedavg")
    (tmp_path / "plan.toml").write_text(write_plan(plan))
    assert read_plan(tmp_path / "plan.toml") == plan and 'kind = "multilabel"' in write_plan(plan)
    single = replace(plan, task=replace(TASK, kind="multiclass"))
    assert single.digest != plan.digest and "kind" not in single.as_json()["task"]  # older plans keep their digests
    wrong = write_plan(plan).replace('"multilabel"', '"several"')
    (tmp_path / "wrong.toml").write_text(wrong)
    with pytest.raises(UsageError, match=r"'task.kind': expected 'multiclass'.*or 'multilabel'"):
        read_plan(tmp_path / "wrong.toml")


def test_one_sum_does_not_depend_on_who_holds_what(tmp_path: Path) -> None:
    data = several_npz(tmp_path / "chest.npz")
    simulation = Simulation("onesum", str(data), 3, "iid", preset="smoke", changes=SMALL["onesum"])
    digests = []
    for secure in (False, True):  # the sum of masked uploads is the sum
        result = run(replace(simulation, secure_sum=secure), tmp_path / str(secure))
        digests.append(result["scores"])
    assert digests[0] == digests[1]


def test_a_site_without_any_finding_takes_part(tmp_path: Path) -> None:
    """Its counts are all zero, which says something: nothing is wrong with its upload."""
    import numpy as np

    images, labels = several(120, 1)
    for name, wanted in (("north", labels.any(1)), ("south", ~labels.any(1))):
        (tmp_path / "sites").mkdir(exist_ok=True)
        np.savez(tmp_path / "sites" / f"{name}.npz", train_images=images[wanted], train_labels=labels[wanted])
    for method in ("onesum", "fedcgs", "fedavg"):
        plan = replace(_plan(method, **SMALL.get(method, {})), clients=("north", "south"))
        path, out = tmp_path / f"{method}.toml", tmp_path / f"run-{method}"
        path.write_text(write_plan(plan))
        assert answer(["run", "--plan", str(path), "--sites", str(tmp_path / "sites"), "--out", str(out)]) == 0
        rows = json.loads((out / "results.json").read_text())["clients"]
        assert rows[1]["class_counts"] == [0, 0, 0] and rows[1]["train"] > 10


def test_a_rehearsal_of_sites_has_their_labels(tmp_path: Path) -> None:
    data = several_npz(tmp_path / "chest.npz")
    plan, sites = tmp_path / "plan.toml", tmp_path / "sites"
    command = ["new", "--method", "onesum", "--dataset", str(data), "--clients", "north,south", "--smoke"]
    assert answer([*command, "--sites", str(sites), "--out", str(plan)]) == 0
    assert sorted(path.name for path in sites.iterdir()) == ["north.npz", "south.npz"]
    assert answer(["check", str(plan), "--data", str(sites / "north.npz"), "--client", "north"]) == 0


def test_check_counts_images_and_not_labels(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = several_npz(tmp_path / "chest.npz")
    federation = prepare(Simulation("onesum", str(data), 2, "iid", preset="smoke"))
    assert answer(["check", "--dataset", str(data), "--clients", "2", "--partition", "iid", "--format", "json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["train_images"] == 240 and facts["claims"]["found"]["samples"] == 120
    assert facts["clients"]["client-01"] == list(federation.counts["client-01"])


def test_report_card_and_prediction_show_every_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = _run("onesum", tmp_path)
    page, card = ((tmp_path / "run" / name).read_text() for name in ("report/index.html", "model_card.md"))
    assert page.count('<caption class="banner">') >= 2  # a smoke run says so in this table, too
    assert "Class by class" in page and "Confusion matrix" not in page and "Average precision" in page
    assert "a probability for each of 3 classes" in card and "AUROC, micro" in card and "Threshold" in card
    (images, labels), path = several(1, 7), tmp_path / "x.png"
    Image.fromarray(images[0]).save(path)
    capsys.readouterr()
    assert answer(["predict", "--run", str(tmp_path / "run"), str(path), "--format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["predictions"]
    assert set(row) == {"path", "probabilities"} and len(row["probabilities"]) == 3
    assert [p > 0.5 for p in row["probabilities"].values()] == labels[0].astype(bool).tolist()
    assert answer(["predict", "--run", str(tmp_path / "run"), str(path), "--csv"]) == 0
    head, line = csv.reader(capsys.readouterr().out.splitlines())
    assert head == ["path", "p(0)", "p(1)", "p(2)"] and len(line) == 4
    assert answer(["predict", "--run", str(tmp_path / "run"), str(path)]) == 0
    assert capsys.readouterr().out.count("%") == 3
    compared = summarize([result])
    assert compared["methods"]["onesum"]["scores.global.ap"]["mean"] == result["scores"]["global"]["ap"]
    assert compared["headline"]["metric"] == "auroc" and compared["headline"]["floor"] == 0.5 and not compared["below"]
