"""Private training: gradients of single images by hand, noise of the right size from no seed, and what a round states."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import RoundError
from osfl.core.registry import load
from osfl.core.seeds import torch_generator
from osfl.core.types import Dataset, Payload, Privacy, Task, Upload
from osfl.ingredients.training import dp_sgd
from osfl.ingredients.training.dp_sgd import Mechanism, check_mechanism, clipped_sum, mechanism_for, private_fit
from osfl.ingredients.training.local import Training, _optimizer, decay
from osfl.models.build import build_model
from osfl.models.norms import norms
from osfl.runtime.machine import Machine
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation, prepare

TASK = Task("noise", ("a", "b", "c"), (1, 8, 8))
SMALL = Simulation(
    "fedavg",
    "digits",
    2,
    "iid",
    "smoke",
    samples=120,
    image_size=8,
    changes={"architecture": "cnn-w8-g2", "batch_size": 32},
    privacy=Privacy(8.0, 1e-3),
)


def some(count: int) -> Dataset:
    rng = torch_generator(0, "images")
    images = torch.randint(0, 256, (count, 1, 8, 8), generator=rng, dtype=torch.uint8)
    return Dataset(images, torch.randint(0, 3, (count,), generator=rng))


@pytest.mark.parametrize("architecture", ["cnn-w4-g2", "vit-p4-w16-d1-h2", "resnet18-w4-g2"])
def test_the_sum_of_clipped_gradients_is_that_of_single_images(architecture: str) -> None:
    model, data, clip = build_model(architecture, TASK, torch_generator(0, "model")), some(5), 0.5
    parameters = dict(model.named_parameters())
    found = clipped_sum(model, parameters, data.images, data.labels, clip)
    by_hand = {name: torch.zeros_like(value) for name, value in parameters.items()}
    for i in range(len(data)):
        model.zero_grad()
        functional.cross_entropy(model(data.images[i : i + 1].float() / 127.5 - 1), data.labels[i : i + 1]).backward()
        gradients = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
        length = torch.cat([one.flatten() for one in gradients.values()]).norm()
        for name, one in gradients.items():
            by_hand[name] += one * min(1.0, clip / float(length))
    for name, value in by_hand.items():
        assert torch.allclose(found[name], value, atol=1e-5), name
    assert float(torch.cat([v.flatten() for v in found.values()]).norm()) <= len(data) * clip + 1e-4
    nothing = clipped_sum(model, parameters, data.images[:0], data.labels[:0], clip)
    assert not any(bool(value.any()) for value in nothing.values())


def one_step(mechanism: Mechanism, data: Dataset) -> torch.Tensor:
    """What one step of plain gradient descent with rate 1 changes."""
    settings = Training(
        "cnn-w8-g2", epochs=1, batch_size=50, lr=1.0, momentum=0.0, weight_decay=0.0, schedule="constant", clip=2.0
    )
    model = build_model("cnn-w8-g2", TASK, torch_generator(0, "model"))
    before = torch.cat([value.detach().flatten().clone() for value in model.parameters()])
    optimizer = _optimizer(model, settings)
    private_fit(model, data, settings, mechanism, optimizer, lambda lr: None, decay, device=torch.device("cpu"))
    return torch.cat([value.detach().flatten() for value in model.parameters()]) - before


def test_noise_has_the_deviation_that_is_accounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(model: nn.Module, parameters: dict[str, torch.Tensor], *rest: object) -> dict[str, torch.Tensor]:
        return {name: torch.zeros_like(value) for name, value in parameters.items()}

    monkeypatch.setattr(dp_sgd, "clipped_sum", nothing)
    change = one_step(Mechanism(0.5, 3.0, 1), some(100))
    assert float(change.std()) == pytest.approx(3.0 * 2.0 / (0.5 * 100), rel=0.05)
    assert not torch.equal(change, one_step(Mechanism(0.5, 3.0, 1), some(100)))  # no seed repeats it


def test_each_image_is_in_a_step_with_the_rate_that_is_accounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []

    def count(
        model: nn.Module, parameters: dict[str, torch.Tensor], images: torch.Tensor, *rest: object
    ) -> dict[str, torch.Tensor]:
        taken.append(len(images))
        return {name: torch.zeros_like(value) for name, value in parameters.items()}

    monkeypatch.setattr(dp_sgd, "clipped_sum", count)
    one_step(Mechanism(0.3, 1.0, 40), some(100))
    assert len(taken) == 40 and len(set(taken)) > 5  # batches of one size would be another mechanism
    assert abs(sum(taken) / 40 - 30) < 5 * math.sqrt(100 * 0.3 * 0.7 / 40)


def test_group_norm_takes_the_place_of_batch_norm() -> None:
    model = build_model("resnet18-w8-g4", TASK, torch_generator(0, "model")).train()
    assert not norms(model) and any(isinstance(module, nn.GroupNorm) for module in model.modules())
    x = torch.rand(3, 1, 8, 8)
    assert torch.allclose(model(x)[:1], model(x[:1]), atol=1e-5)  # an image does not depend on its batch
    assert norms(build_model("resnet18-w8", TASK, None))


def test_a_private_round_states_what_ran(tmp_path: Path) -> None:
    result = run(SMALL, tmp_path, machine=Machine(workers=1))
    stated = result["privacy"]
    assert 7.9 < (stated["epsilon"] or 0.0) <= 8.0 and stated["sites"] == 2 and not stated["repeatable"]
    assert stated["noised"] == ["the gradients of every step of local training (DP-SGD)"]
    for path in (tmp_path / "report" / "index.html", tmp_path / "model_card.md"):
        assert "one image of one site, there or blank" in path.read_text(encoding="utf-8")


def test_an_upload_that_was_made_with_less_noise_is_named() -> None:
    plan = prepare(SMALL).plan
    assert plan.privacy is not None
    honest = mechanism_for(plan.privacy, 50, plan.settings.batch_size, plan.settings.epochs)
    for facts, good in (
        ({"samples": 50, "mechanism": honest.as_json()}, True),
        ({"samples": 50, "mechanism": replace(honest, multiplier=honest.multiplier / 2).as_json()}, False),
        ({"samples": 50}, False),
    ):
        upload = Upload("north", plan.digest, Payload({}, facts))
        if good:
            check_mechanism(upload, plan)
        else:
            with pytest.raises(RoundError, match="not trained with the noise") as caught:
                check_mechanism(upload, plan)
            assert caught.value.client == "north"


def test_every_method_that_uploads_a_model_can_begin_a_private_round() -> None:
    for name in ("fedavg", "ensemble", "dense", "fedisca", "fedmitr", "fol", "deepinversion"):
        plan = prepare(replace(SMALL, method=name, changes={})).plan
        assert plan.privacy is not None and not load(name)(plan.task, plan.settings).privacy_problems(plan)
