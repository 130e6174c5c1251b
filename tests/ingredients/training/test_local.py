"""What a client starts from: drawn from the seed, or a file that all methods share."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from osfl.core.errors import UsageError
from osfl.core.plan import check_plan, read_plan, write_plan
from osfl.core.registry import load, names
from osfl.core.seeds import torch_generator
from osfl.core.types import Plan, Task
from osfl.ingredients.training.local import Training, first_model, local_model
from osfl.methods import dense, fedprox
from osfl.methods.fedavg import Settings
from osfl.models.build import build_model
from osfl.models.pretrained import read_weights
from osfl.models.weights_table import KNOWN, weights_folder
from osfl.rounds.finished import load_model
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation
from tests.methods.conftest import TASK, context, shard

VIT = "vit-p4-w8-d1-h2"


@pytest.fixture
def published(tmp_path: Path) -> dict[str, Any]:
    """Weights of a network for other classes, as settings."""
    model = build_model(VIT, Task("other", ("x", "y"), (1, 8, 8)), torch_generator(5, "published"))
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    sha256 = hashlib.sha256((tmp_path / "w.safetensors").read_bytes()).hexdigest()
    return {"architecture": VIT, "pretrained": str(tmp_path / "w.safetensors"), "pretrained_sha256": sha256}


def test_plans_that_never_received_of_weights_keep_their_digest(published: dict[str, Any]) -> None:
    cells = Task("cells", ("round", "long"), (3, 28, 28))
    digests = {
        "dense": (dense.Settings(epochs=3), "1c585ffc4c25150dfba131699f96bf54fee8306226fe1e995ac560ddc06219b7"),
        "fedprox": (fedprox.Settings(epochs=3), "650bbb60184e0b4bb5c972c5f17dc8cb9b1e8427f0860b6a8d9231e4c0822402"),
    }
    for method, (settings, digest) in digests.items():
        assert Plan(cells, method, settings, ("north", "south"), seed=7).digest == digest
    assert Plan(TASK, "fedavg", Settings(**published), ("a",)).as_json()["settings"]["pretrained"] == published["pretrained"]


def test_a_plan_with_weights_reads_back(published: dict[str, Any], tmp_path: Path) -> None:
    plan = Plan(TASK, "fedavg", Settings(**published), ("a", "b"))
    (tmp_path / "plan.toml").write_text(write_plan(plan))
    assert read_plan(tmp_path / "plan.toml").digest == plan.digest


def test_the_backbone_is_the_files_and_the_head_the_seeds(published: dict[str, Any]) -> None:
    drawn = first_model(Training(VIT), VIT, TASK, torch_generator(0, "init")).state_dict()
    started = first_model(Training(**published), VIT, TASK, torch_generator(0, "init")).state_dict()
    assert torch.equal(drawn["head.weight"], started["head.weight"])
    assert not torch.equal(drawn["blocks.0.attn.qkv.weight"], started["blocks.0.attn.qkv.weight"])


def test_a_client_trains_from_the_file(published: dict[str, Any]) -> None:
    still = {**published, "epochs": 1, "lr": 1e-12, "weight_decay": 0.0}
    sent = local_model(shard("a"), TASK, Training(**still), context(Training(**still), ["a"])).tensors
    file = build_model(VIT, Task("other", ("x", "y"), (1, 8, 8)), torch_generator(5, "published")).state_dict()
    torch.testing.assert_close(sent["model/blocks.0.mlp.fc1.weight"], file["blocks.0.mlp.fc1.weight"])


def test_one_file_fits_one_architecture(published: dict[str, Any]) -> None:
    for wrong in ({"architecture": f"a:cnn,*:{VIT}"}, {"pretrained_sha256": "short"}, {"pretrained": ""}):
        with pytest.raises(UsageError, match=r"pretrained_sha256|one architecture"):
            check_plan(Plan(TASK, "ensemble", load("ensemble").Settings(**{**published, **wrong}), ("a", "b")))


def test_a_student_needs_weights_to_start_from() -> None:
    with pytest.raises(UsageError, match="'pretrained' needs weights"):
        check_plan(Plan(TASK, "dense", dense.Settings(architecture="cnn-w4", init="pretrained"), ("a", "b")))


TRAINED = [name for name in names() if issubclass(load(name).Settings, Training)]


@pytest.mark.parametrize("method", TRAINED)
def test_every_method_that_trains_reads_the_file(method: str, published: dict[str, Any], tmp_path: Path) -> None:
    """With another file behind the same name nothing runs: the pin is looked at, so the file is used."""
    changes: dict[str, object] = {**published, "pretrained_sha256": "0" * 64, "epochs": 1}
    if method == "onesum":  # a site trains a network only beside its own prior
        changes["prior"] = "site"
    images = 400 if method == "federated_factory" else 40  # a generator needs ten images of a class
    with pytest.raises(Exception, match="not the ones that were pinned"):
        run(Simulation(method, clients=2, samples=images, image_size=8, preset="smoke", changes=changes), tmp_path / "run")


@pytest.mark.data
def test_a_real_checkpoint_goes_through_a_round(tmp_path: Path) -> None:
    """22 M published parameters, known by name: read, given a head, trained, sent, averaged, asked."""
    name = "vit_small_patch14_dinov2_saliency"
    file = weights_folder() / KNOWN[name].file
    if not file.is_file():
        pytest.skip(f"{file} is not there; set OSFL_DATA to the folder that holds weights/")
    changes = {"architecture": "vit_small_dinov2", "pretrained": name, "lr": 1e-12, "weight_decay": 0.0, "epochs": 1}
    one = Simulation("fedavg", clients=1, samples=10, image_size=28, channels=3, preset="smoke", changes=changes)
    run(one, tmp_path / "run")
    released = load_model(tmp_path / "run")[0].state_dict()
    published = read_weights(file, KNOWN[name].sha256)
    for key in ("blocks.11.mlp.fc2.weight", "blocks.0.attn.qkv.weight", "norm.weight"):
        torch.testing.assert_close(released[key], published[key], rtol=1e-5, atol=1e-6)
    assert released["head.weight"].shape == (10, 384) and released["pos_embed"].shape == (1, 5, 384)
