"""A server phase repeated from the uploads: the same bits here, numbers elsewhere, and a forged release is found."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from osfl.cli.main import answer
from osfl.core.plan import write_plan
from osfl.core.types import Payload, Release
from osfl.roles.coordinator import read_round_plan
from osfl.roles.replay import _judged, largest_difference, replay
from osfl.rounds.folder import existing_round, simulated_key
from osfl.rounds.state import read_policy
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


def test_other_last_bits_are_no_lie_and_a_large_difference_is_named(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    check, difference = replay(changed(finished, tmp_path / "bits", 1e-6))
    assert check.answer == "within tolerance" and difference is not None and 0 < difference < 1e-5
    assert "other last bits" in check.why and "same build and instruction set" in check.why
    forged = changed(finished, tmp_path / "forged", 0.1)
    check, difference = replay(forged)
    assert check.answer == "different" and difference == pytest.approx(0.1, rel=0.01) and "no proof of fraud" in check.why
    assert replay(forged, tolerance=0.2)[0].answer == "within tolerance"
    assert answer(["verify", "--round", str(forged), "--replay"]) == 3
    assert "server's kind of machine" in " ".join(capsys.readouterr().out.split())
    assert answer(["verify", "--round", str(tmp_path / "bits"), "--replay"]) == 0


def test_a_tensor_of_another_shape_is_no_rounding() -> None:
    check, difference = _judged(iter([("", {"a": torch.zeros(2)}, {"a": torch.zeros(3)})]), 1.0, {})
    assert check.answer == "no" and difference is None


def test_an_honest_server_without_vector_instructions_is_believed(tmp_path: Path) -> None:
    """Its last bits are other ones, and its signed head says why; the repetition is within the tolerance."""
    folder = tmp_path / "round"
    code = (
        "import sys; from pathlib import Path; from osfl.simulate.run import run; "
        "from osfl.simulate.simulation import Simulation; "
        "run(Simulation('dense', 'digits', 2, 'iid', 'smoke', samples=60, image_size=8), Path(sys.argv[1]))"
    )
    env = {**os.environ, "ATEN_CPU_CAPABILITY": "default"}
    subprocess.run([sys.executable, "-c", code, str(folder)], check=True, env=env)
    signed = json.loads((folder / "head.json").read_text())["head"]["numerics"]
    assert signed == {**numerics(), "cpu": "DEFAULT"}
    check, difference = replay(folder)
    assert difference is not None and difference < 1e-3
    if numerics()["cpu"] == "DEFAULT":  # a processor without any
        assert check.answer == "yes"
        return
    assert check.answer == "within tolerance" and difference > 0
    assert f"cpu DEFAULT, here {numerics()['cpu']}" in check.why


def test_who_has_the_release_alone_sees_what_it_was_computed_with(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, server = tmp_path / "plan.toml", tmp_path / "server.pub"
    plan.write_text(write_plan(read_round_plan(finished)))
    server.write_text(read_policy(finished).server)
    shutil.copy(finished / "release.safetensors", tmp_path)
    ask = ["verify", str(tmp_path / "release.safetensors"), "--plan", str(plan)]
    assert answer([*ask, "--server", str(server)]) == 0 and "computed with" not in capsys.readouterr().out
    copy = str(finished / "head.json")
    assert answer([*ask, "--server", str(server), "--head", copy]) == 0
    assert f"cpu {numerics()['cpu']}" in " ".join(capsys.readouterr().out.split())
    assert answer([*ask, "--head", copy]) == 2 and "server's key" in capsys.readouterr().err
    shutil.copy(changed(finished, tmp_path / "later", 0.1) / "head.json", tmp_path)
    assert answer([*ask, "--server", str(server)]) == 0
    assert "of another release" in " ".join(capsys.readouterr().out.split())


def test_an_upload_that_is_missing_is_reported(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "less")
    (tmp_path / "less" / "inbox" / "client-01.safetensors").unlink()
    check, difference = replay(tmp_path / "less")
    assert check.answer == "not checked" and "client-01" in check.why and difference is None


def test_the_difference_is_a_share_of_the_largest_number() -> None:
    one = {"a": torch.tensor([1.0, -4.0]), "b": torch.zeros(0)}
    found = largest_difference(one, {"a": torch.tensor([1.0, -3.0]), "b": torch.zeros(0)})
    assert found.tensor == "a" and found.share == 0.25
