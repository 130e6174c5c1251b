"""Points on a student's way, of finished runs: those that other runs released by their settings."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.vit_shares import _points, on_its_way
from osfl.models.naming import named
from osfl.rounds.finished import load_model
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation, prepare


def test_both_points_of_one_run_are_what_runs_release_that_are_reported_to(tmp_path: Path) -> None:
    released, ways = {}, []
    for share in (0.6, 1.0):
        changes = {"student_share": share, "init": "average", "student_lr": 0.05}
        simulation = Simulation("fedmitr", "digits", 3, "iid", "smoke", changes=changes)
        run(simulation, tmp_path / str(share))
        released[share] = named(load_model(tmp_path / str(share))[0], "model")
        ways.append(on_its_way(tmp_path / str(share)))
    name = "model/blocks.0.mlp.fc1.weight"
    assert not torch.allclose(released[0.6][name], released[1.0][name], atol=1e-4)
    for way in ways:
        for share, weights in way.items():
            torch.testing.assert_close(weights, released[share], rtol=1e-4, atol=1e-6)
    test = prepare(simulation).test
    assert len(_points(tmp_path / "1.0", test)) == 2
    reported = json.loads((tmp_path / "1.0" / "results.json").read_text())
    reported["scores"]["global"]["accuracy"] = 1.0
    (tmp_path / "1.0" / "results.json").write_text(json.dumps(reported))
    with pytest.raises(SystemExit, match=r"the run's results 1\.0"):
        _points(tmp_path / "1.0", test)
