"""A server phase repeated from the uploads: the same bits here, numbers elsewhere, and a forged release is found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from osfl.cli.main import answer
from osfl.core.types import Payload, Release
from osfl.roles.replay import largest_difference, replay
from osfl.rounds.folder import existing_round, simulated_key
from osfl.runtime.environment import numerics
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("replay") / "round"
    run(Simulation("fedavg", "digits", 2, "iid", "smoke", samples=60, image_size=8), folder)
    return folder


def changed(finished: Path, folder: Path, share: float) -> Path:
    """The same round with a release in which one number differs, signed by the server."""
    shutil.copytree(finished, folder)
    from osfl.roles.coordinator import read_round_plan

    plan = read_round_plan(folder)
    with existing_round(folder, plan, simulated_key(plan.seed, "server")) as fl_round:
        published = fl_round.release()
        assert published is not None
        tensors = {name: value.clone() for name, value in published[0].shared.tensors.items()}
        name = next(name for name, value in tensors.items() if value.is_floating_point() and float(value.abs().max()) > 0)
        tensors[name].view(-1)[0] += share * float(tensors[name].abs().max())
        _, made_from = fl_round.uploads()
        fl_round.publish(Release(Payload(tensors, published[0].shared.facts)), made_from)
    return folder


def test_the_same_machine_gets_the_same_bits(finished: Path) -> None:
    check, difference = replay(finished)
    assert (check.answer, difference) == ("yes", 0.0) and "same bits" in check.why
    assert json.loads((finished / "head.json").read_text())["head"]["numerics"] == numerics()


def test_other_last_bits_are_no_lie_and_a_forgery_is_found(finished: Path, tmp_path: Path) -> None:
    check, difference = replay(changed(finished, tmp_path / "bits", 1e-6))
    assert check.answer == "yes" and difference is not None and 0 < difference < 1e-5 and "other last bits" in check.why
    forged = changed(finished, tmp_path / "forged", 0.1)
    check, difference = replay(forged)
    assert check.answer == "no" and difference == pytest.approx(0.1, rel=0.01)
    assert replay(forged, tolerance=0.2)[0].answer == "yes"
    assert answer(["verify", "--round", str(forged), "--replay"]) == 1
    assert answer(["verify", "--round", str(tmp_path / "bits"), "--replay"]) == 0


def test_an_upload_that_is_missing_is_said(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "less")
    (tmp_path / "less" / "inbox" / "client-01.safetensors").unlink()
    check, difference = replay(tmp_path / "less")
    assert check.answer == "not checked" and "client-01" in check.why and difference is None


def test_the_difference_is_a_share_of_the_largest_number() -> None:
    one = {"a": torch.tensor([1.0, -4.0]), "b": torch.zeros(0)}
    found = largest_difference(one, {"a": torch.tensor([1.0, -3.0]), "b": torch.zeros(0)})
    assert found.tensor == "a" and found.share == 0.25
