"""The training loop against loops written out here: optimizers, schedules, clipping, batches and changed images."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import TrainingError
from osfl.core.types import Dataset, Task
from osfl.ingredients.training.local import Training, augment, batches, decay, draw_noise, fit, step, training_problems
from osfl.models.inputs import to_input

PLAIN = Training(epochs=4, batch_size=4, lr=0.2, momentum=0.5, weight_decay=0.1, schedule="steps")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def data(n: int = 10) -> Dataset:
    images = torch.randint(0, 256, (n, 1, 4, 4), generator=rng(1), dtype=torch.uint8)
    return Dataset(images, torch.arange(n) % 3)


def linear() -> nn.Sequential:
    head = nn.Linear(16, 3)
    nn.init.normal_(head.weight, 0.0, 0.5, generator=rng(2))
    nn.init.zeros_(head.bias)
    return nn.Sequential(nn.Flatten(), head)


# --- the loop ---


@pytest.mark.parametrize("clip", [0.0, 0.3])
def test_sgd_with_momentum_decay_schedule_and_clipping_by_hand(clip: float) -> None:
    """v <- 0.5 v + g + 0.1 p, p <- p - rate v; the rate falls to a tenth at half and again at three quarters."""
    model, mine, order, cut = linear(), linear(), rng(3), 0
    velocity = [torch.zeros_like(p) for p in mine.parameters()]
    for rate in (0.2, 0.2, 0.02, 0.002):
        for index in torch.randperm(10, generator=order).split(4):
            loss = functional.cross_entropy(mine(to_input(data().images[index])), data().labels[index])
            slopes = torch.autograd.grad(loss, list(mine.parameters()))
            size = float(torch.stack([slope.norm() for slope in slopes]).norm())
            cut += size > clip > 0
            with torch.no_grad():
                for p, v, slope in zip(mine.parameters(), velocity, slopes, strict=True):
                    v.mul_(0.5).add_(slope * (min(1.0, clip / (size + 1e-6)) if clip else 1.0) + 0.1 * p)
                    p.sub_(rate * v)
    assert fit(model, data(), replace(PLAIN, clip=clip), rng(3)) == 12 and not model.training
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), mine.parameters(), strict=True))
    assert (cut > 0) == (clip > 0)


def test_adam_is_torchs_with_the_plans_rate_and_decay() -> None:
    model, mine, order = linear(), linear(), rng(3)
    optimizer = torch.optim.Adam(mine.parameters(), 0.05, weight_decay=0.1)
    for _ in range(2):
        for index in torch.randperm(10, generator=order).split(4):
            optimizer.zero_grad()
            functional.cross_entropy(mine(to_input(data().images[index])), data().labels[index]).backward()
            optimizer.step()
    fit(model, data(), replace(PLAIN, optimizer="adam", epochs=2, lr=0.05, schedule="constant"), rng(3))
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(model.parameters(), mine.parameters(), strict=True))


def test_what_is_adjusted_or_done_afterwards_is_done_at_every_step() -> None:
    model, reported = linear(), list[tuple[str, float]]()

    def adjust(network: nn.Module) -> None:
        slopes = [parameter.grad for parameter in network.parameters() if parameter.grad is not None]
        reported.append(("gradient", float(slopes[0].abs().sum())))
        assert [slope.zero_().shape for slope in slopes] == [(3, 16), (3,)]

    settings = replace(PLAIN, epochs=1, weight_decay=0.0, schedule="cosine")
    before = copy.deepcopy(model)
    fit(model, data(), settings, rng(), adjust=adjust, after=lambda _, lr: reported.append(("rate", lr)))
    assert [what for what, _ in reported] == ["gradient", "rate"] * 3
    assert all(value == pytest.approx(0.2) for what, value in reported if what == "rate")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))


def test_a_gradient_is_adjusted_before_it_is_clipped() -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    before = copy.deepcopy(model)

    def tenfold(network: nn.Module) -> None:
        for parameter in network.parameters():
            assert parameter.grad is not None
            parameter.grad.fill_(10.0)

    step(model, optimizer, model(torch.ones(2, 1, 4, 4)).sum(), clip=0.5, adjust=tenfold)
    moved = [(a - b).detach() for a, b in zip(before.parameters(), model.parameters(), strict=True)]
    assert float(torch.stack([part.norm() for part in moved]).norm()) == pytest.approx(0.5, rel=1e-4)
    assert all(bool((part > 0).all()) for part in moved)


def test_a_loss_that_is_not_finite_names_the_rate() -> None:
    with pytest.raises(TrainingError, match="not finite") as caught:
        fit(linear(), data(), replace(PLAIN, lr=1e30), rng())
    assert caught.value.field == "lr"


# --- schedules and batches ---


def test_schedules_by_hand() -> None:
    assert [decay("cosine", t, 4) for t in range(4)] == pytest.approx(
        [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]
    )
    assert [decay("steps", t, 8) for t in range(8)] == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])
    assert [decay("constant", t, 3) for t in range(3)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    ("count", "size", "lengths"), [(10, 4, [4, 4, 2]), (9, 4, [4, 5]), (8, 4, [4, 4]), (3, 4, [3]), (1, 4, [2]), (2, 1, [2])]
)
def test_batches_hold_every_image_once_and_never_one_alone(count: int, size: int, lengths: list[int]) -> None:
    parts = batches(count, size, rng())
    assert [len(part) for part in parts] == lengths
    assert sorted(torch.cat(list(parts)).tolist()) == (list(range(count)) if count > 1 else [0, 0])


def test_batches_come_in_a_new_order_each_time() -> None:
    order = rng()
    first, second = (torch.cat(list(batches(50, 10, order))) for _ in range(2))
    assert first.tolist() != list(range(50)) and not torch.equal(first, second)


# --- changed images ---


def picture(n: int, side: int = 8) -> torch.Tensor:
    """The same image many times; all its pixels differ."""
    return torch.arange(side * side, dtype=torch.uint8).view(1, 1, side, side).expand(n, 2, -1, -1).contiguous()


@pytest.mark.parametrize(("how", "copies"), [("none", 1), ("flip", 2), ("flip+turn", 8)])
def test_images_are_mirrored_and_turned_equally_often(how: str, copies: int) -> None:
    one = picture(1)[0]
    every = [torch.rot90(way, turns, (-2, -1)) for way in (one, one.flip(-1)) for turns in range(4)]
    expected = {"none": [one], "flip": [one, one.flip(-1)], "flip+turn": every}[how]
    changed = augment(picture(800), how, rng())
    found = [int((changed == way).flatten(1).all(1).sum()) for way in expected]
    assert len(found) == copies and sum(found) == 800
    assert all(abs(count - 800 / copies) < 60 for count in found)


def test_shifts_reach_an_eighth_either_way_and_repeat_the_border() -> None:
    one = picture(1, 16)
    padded = functional.pad(one.float(), (2, 2, 2, 2), mode="replicate").to(torch.uint8)
    windows = {(i, j): padded[:, :, i : i + 16, j : j + 16] for i in range(5) for j in range(5)}
    ways = {(m, *place): window.flip(-1) if m else window for m in (0, 1) for place, window in windows.items()}
    # a mirror comes first, so a mirrored image is shifted as it is seen
    padded = functional.pad(one.flip(-1).float(), (2, 2, 2, 2), mode="replicate").to(torch.uint8)
    ways |= {(1, i, j): padded[:, :, i : i + 16, j : j + 16] for i in range(5) for j in range(5)}
    found = set()
    for image in augment(picture(600, 16), "flip+crop", rng()):
        matches = [name for name, way in ways.items() if torch.equal(image, way[0])]
        assert len(matches) == 1
        found.add(matches[0])
    assert found == set(ways)


def test_noise_has_a_deviation_of_its_own_for_each_image() -> None:
    spreads = draw_noise((300, 1, 20, 20), 0.6, rng()).flatten(1).std(1)
    assert float(spreads.max()) < 0.7 and float(spreads.min()) < 0.05
    assert float(spreads.mean()) == pytest.approx(0.3, abs=0.03)


def test_only_squares_can_be_turned() -> None:
    settings: Any = replace(PLAIN, architecture="cnn-w4", augment="flip+turn")
    assert training_problems(settings, Task("t", ("a", "b"), (1, 8, 8))) == []
    (problem,) = training_problems(settings, Task("t", ("a", "b"), (1, 8, 16)))
    assert "'augment'" in problem and "8 x 16" in problem
