"""One release for all is also scored as sites would use it that weigh classes by their own shares."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from osfl.cli.summary import _facts
from osfl.core.topology import parse_topology
from osfl.core.types import Topology
from osfl.ingredients.statistics.site_prior import weighed_by_site
from osfl.runtime.machine import Machine
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation

ONE = Machine(workers=1)
SMALL = Simulation("onesum", "digits", 4, "dirichlet:0.3", "smoke", changes={"filters": 4}, samples=300, image_size=8)


@pytest.mark.parametrize("topology", [None, parse_topology("ring", 1)])
def test_sites_that_weigh_classes_reach_what_prior_site_without_a_network_has(
    tmp_path: Path, topology: Topology | None
) -> None:
    """With one release, and with the models of sites that exchanged with their neighbors."""
    small = replace(SMALL, topology=topology)
    shared = run(small, tmp_path / "shared", machine=ONE)
    own = run(replace(small, changes={"filters": 4, "prior": "site", "blend": "0"}), tmp_path / "own", machine=ONE)
    clients, personal = shared["scores"]["clients"], own["scores"]["clients"]
    assert clients["weighed"]["values"] == personal["own"]["values"] != clients["own"]["values"]
    assert "weighed" not in personal
    assert any("--set prior=site" in why for _, _, why in _facts(shared)) and not any("prior=site" in f[2] for f in _facts(own))
    for name in ("report/index.html", "model_card.md"):
        assert "weighs classes as it has them" in (tmp_path / "shared" / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("changes", [{"head": "ridge"}, {"prior": "site"}])
def test_scores_that_are_no_likelihoods_are_not_weighed(tmp_path: Path, changes: dict[str, str]) -> None:
    found = run(replace(SMALL, changes={"filters": 4, **changes}), tmp_path / "run", machine=ONE)
    assert "weighed" not in found["scores"]["clients"]


def test_the_learned_shares_are_divided_out_and_a_class_that_nobody_has_stays_out() -> None:
    """p(x | c) is 0.2, 0.1, 0.9 times anything; learned shares are 0.9, 0.1 and none."""
    learned = torch.tensor([0.9, 0.1, 0.0], dtype=torch.float64).log().clamp_min(-1e9)
    seen = torch.tensor([[0.2 * 0.9, 0.1 * 0.1, 0.0]], dtype=torch.float64)
    scores = weighed_by_site(seen / seen.sum(), learned, 1.0, torch.tensor([0, 1, 1, 1]))
    expected = torch.tensor([0.2 * (1 + 0.01), 0.1 * (3 + 0.01)], dtype=torch.float64)
    assert torch.allclose(scores[0, :2].softmax(0), expected / expected.sum())
    assert scores[0, 2] == -1e9 and scores.argmax() == 1
