"""`osfl audit` on finished rounds: what it writes, what it leaves alone, what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from osfl.core.errors import RoundError
from osfl.core.result import read_result
from osfl.evaluation.privacy.reconstruction import Effort
from osfl.simulate.audit import audit
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation, prepare

QUICK = Effort(steps=5, most=20)


def small(method: str, **changes: object) -> Simulation:
    return Simulation(method, "digits", 2, "iid", "smoke", samples=120, image_size=8, changes=changes)


def test_an_audit_adds_to_the_round_and_changes_nothing_else(tmp_path: Path) -> None:
    before = run(small("falcon"), tmp_path)
    release = (tmp_path / "release.safetensors").read_bytes()
    result = audit(tmp_path, prepare(small("falcon")), effort=QUICK)
    assert set(result) - set(before) == {"reconstruction"} and read_result(tmp_path) == result
    assert {k: v for k, v in result.items() if k in before} == before
    assert (tmp_path / "release.safetensors").read_bytes() == release and not (tmp_path / "scratch").exists()
    page = (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    assert "Reconstruction attack" in page and "from synthetic features" in page
    card = (tmp_path / "model_card.md").read_text(encoding="utf-8")
    assert "Reconstruction by an attacker who has similar images" in card and "No privacy audit" not in card
    assert run(small("falcon"), tmp_path) == result  # the round is finished, with what was found
    assert audit(tmp_path, prepare(small("falcon")), effort=QUICK) == result
    of_an_earlier_decoder = result | {"reconstruction": {"side": 8, "steps": 5, "attackers": {}, "figures": {}}}
    (tmp_path / "results.json").write_text(json.dumps(of_an_earlier_decoder), encoding="utf-8")
    assert audit(tmp_path, prepare(small("falcon")), effort=QUICK) == result  # attacked again
    assert result["reconstruction"]["side"] == 8  # no larger than the images
    assert audit(tmp_path, prepare(small("falcon")), effort=replace(QUICK, side=4))["reconstruction"]["side"] == 4


def test_rounds_of_an_earlier_version_get_their_discrepancy(tmp_path: Path) -> None:
    expected = run(small("fedpft"), tmp_path)["tokens"]
    old = {key: value for key, value in read_result(tmp_path).items() if key != "tokens"}
    (tmp_path / "results.json").write_text(json.dumps(old), encoding="utf-8")
    assert audit(tmp_path, prepare(small("fedpft")), effort=QUICK)["tokens"] == expected


@pytest.mark.parametrize(
    ("simulation", "words"),
    [
        (small("fedavg"), "sends no features"),
        (small("falcon", server="average"), "only classifiers travel"),
    ],
)
def test_rounds_without_features_are_refused(tmp_path: Path, simulation: Simulation, words: str) -> None:
    before = run(simulation, tmp_path)
    with pytest.raises(RoundError, match=words):
        audit(tmp_path, prepare(simulation), effort=QUICK)
    assert read_result(tmp_path) == before
