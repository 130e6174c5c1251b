"""`osfl audit` on finished rounds: what it writes, what it leaves alone, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from osfl.core.errors import RoundError
from osfl.core.result import read_result
from osfl.evaluation.privacy.reconstruction import Effort
from osfl.simulate.audit import Attempt, audit
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation, prepare
from tests.several import several_npz

QUICK = Effort(steps=5, most=20)
FEW = Attempt(shadows=0, images=10)


def small(method: str, **changes: object) -> Simulation:
    return Simulation(method, "digits", 2, "iid", "smoke", samples=120, image_size=8, changes=changes)


def test_an_audit_adds_to_the_round_and_changes_nothing_else(tmp_path: Path) -> None:
    before = run(small("falcon"), tmp_path)
    release = (tmp_path / "release.safetensors").read_bytes()
    result = audit(tmp_path, prepare(small("falcon")), effort=QUICK, attempt=FEW)
    assert set(result) - set(before) == {"reconstruction", "audit"} and read_result(tmp_path) == result
    assert {k: v for k, v in result.items() if k in before} == before
    assert (tmp_path / "release.safetensors").read_bytes() == release and not (tmp_path / "scratch").exists()
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "Reconstruction attack" in page and "from synthetic features" in page
    card = (tmp_path / "model_card.md").read_text(encoding="utf-8")
    assert "Reconstruction by an attacker who has similar images" in card and "No privacy audit" not in card
    assert run(small("falcon"), tmp_path) == result  # the round is finished, with what was found
    assert audit(tmp_path, prepare(small("falcon")), effort=QUICK, attempt=FEW) == result
    of_an_earlier_decoder = result | {"reconstruction": {"side": 8, "steps": 5, "attackers": {}, "figures": {}}}
    (tmp_path / "results.json").write_text(json.dumps(of_an_earlier_decoder), encoding="utf-8")
    assert audit(tmp_path, prepare(small("falcon")), effort=QUICK, attempt=FEW) == result  # attacked again
    assert result["reconstruction"]["side"] == 8  # no larger than the images
    assert audit(tmp_path, prepare(small("falcon")), effort=replace(QUICK, side=4), attempt=FEW)["reconstruction"]["side"] == 4


def test_rounds_of_an_earlier_version_get_their_discrepancy(tmp_path: Path) -> None:
    expected = run(small("fedpft"), tmp_path)["tokens"]
    old = {key: value for key, value in read_result(tmp_path).items() if key != "tokens"}
    (tmp_path / "results.json").write_text(json.dumps(old), encoding="utf-8")
    assert audit(tmp_path, prepare(small("fedpft")), effort=QUICK, attempt=FEW)["tokens"] == expected


def test_a_round_of_classifiers_alone_has_no_features_to_decode(tmp_path: Path) -> None:
    simulation = small("falcon", server="average")
    run(simulation, tmp_path)
    result = audit(tmp_path, prepare(simulation), effort=QUICK, attempt=FEW)
    assert "reconstruction" not in result and {row["signal"] for row in result["audit"]["membership"]} >= {"loss"}


def test_a_round_of_several_labels_is_refused_in_a_sentence(tmp_path: Path) -> None:
    data = several_npz(tmp_path / "chest.npz")
    simulation = Simulation("fedavg", str(data), 2, "dirichlet:1", "smoke", changes={"architecture": "cnn-w8"})
    run(simulation, tmp_path / "run")
    with pytest.raises(RoundError, match="here an image may have several"):
        audit(tmp_path / "run", prepare(simulation), attempt=FEW)
