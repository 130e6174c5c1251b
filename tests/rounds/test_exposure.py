"""The attack that the egress check tries: planted images are found, honest statistics pass, an upload with one is not sent."""

from dataclasses import replace

import pytest
import torch

from osfl.core.errors import UploadBlocked
from osfl.core.method import Context
from osfl.core.registry import load
from osfl.core.seeds import torch_generator
from osfl.core.types import Dataset, Exposed, Payload, Shard
from osfl.methods.federated_factory import FederatedFactory
from osfl.methods.federated_factory.factories import factory_for
from osfl.rounds.egress import check_exposure
from osfl.rounds.exposure import BOUND, attack, compared, nearest_ratios, spanned, worst
from osfl.rounds.folder import contracts_of, simulated_key
from osfl.rounds.phases import run_client_phase
from osfl.simulate.checks import small_federation


def images(n: int, seed: int = 0) -> torch.Tensor:
    """Rows of 64 pixels with a common pattern."""
    draws = torch.randn((n, 64), generator=torch_generator(seed, "images"))
    return torch.linspace(-0.5, 0.5, 64) + 0.2 * draws


def ratios(one: Exposed) -> dict[str, float]:
    return {found.what: found.ratio for found in attack([one])}


def test_ratios_by_hand() -> None:
    """Distances 1 and 4 to training images, 2 to a held-out one; the nearest training image's third neighbor is 30 away."""
    train, held_out, row = torch.tensor([[1.0], [-4.0], [21.0], [31.0], [90.0]]), torch.tensor([[2.0]]), torch.zeros(1, 1)
    assert float(nearest_ratios(row, train, held_out, null=0)) == pytest.approx(1 / 4)
    assert float(nearest_ratios(row, train, held_out, null=4.0)) == pytest.approx(1 / (2 * 4))
    assert float(nearest_ratios(row, train, held_out, null=0.5)) == pytest.approx(1 / 4)
    assert float(nearest_ratios(row, train, held_out, null=100.0)) == pytest.approx(1 / 30)


def test_samples_of_a_rare_kind_that_nobody_held_out_are_no_copies() -> None:
    """Eight bright images, of which none is held out: what lies between them is near to them and far from held-out images."""
    train = torch.cat([images(100), images(8, 2) + 20])
    sample = train[-8:].mean(0, keepdim=True)
    assert ratios(Exposed(0, {"sample": sample}, train, images(20, 1)))["sample"] > 0.5
    assert ratios(Exposed(0, {"sample": train[-1:] + 0.01}, train, images(20, 1)))["sample"] < BOUND


@pytest.mark.parametrize("held_out", [0, 20])
def test_a_planted_image_is_found_and_averages_are_not(held_out: int) -> None:
    train = images(60)
    averages = torch.stack([train[:30].mean(0), train[30:].mean(0)])
    honest = Exposed(0, {"component": averages}, train, images(held_out, 1))
    assert ratios(honest)["component"] > 0.5
    for planted in range(10):
        copied = replace(honest, candidates={"component": torch.cat([averages, train[planted : planted + 1] + 0.005])})
        assert ratios(copied)["component"] < BOUND


def copies(image: torch.Tensor, n: int, noise: float) -> torch.Tensor:
    return image + noise * torch.randn((n, 64), generator=torch_generator(9, "noise"))


@pytest.mark.parametrize("held_out", [0, 3, 20])
def test_copies_with_noise_do_not_hide_each_other(held_out: int) -> None:
    """Thirty noisy copies of an image in training, and some held out: their mean is the image, though none of them is near."""
    rest, victim = images(60), images(1, 2)
    near = copies(victim, 33, 0.04)
    train, others = torch.cat([rest, near[:30]]), torch.cat([near[30:], images(held_out, 1)])
    averages = torch.stack([rest[:30].mean(0), rest[30:].mean(0)])
    assert ratios(Exposed(0, {"component": averages}, train, others))["component"] > 0.5
    assert ratios(Exposed(0, {"component": victim}, train, others))["component"] < BOUND
    mean = train.mean(0, keepdim=True)
    span = torch.linalg.svd(torch.cat([rest[:10], victim]) - mean, full_matrices=False).Vh
    assert ratios(Exposed(0, {}, train, others, mean, span))["combination of directions"] < BOUND


def test_moments_of_few_images_give_their_span_and_stop_nothing() -> None:
    """Twelve images in 64 features: what is left of them off the span is rounding, of held-out ones much."""
    train, held_out = images(12), images(20, 1)
    gram = train.double().T @ train.double()
    one = Exposed(0, {}, train, held_out, moments=lambda: gram, summed=12)
    (found,) = attack([one])
    assert found.what == "second moments" and found.stops == "none" and found.tried == 12
    assert found.residuals is not None and found.residuals[0] < 1e-6 and found.residuals[1] > 0.1 and found.ratio < 1e-4
    assert worst([found]) is None and "membership test" in spanned([found]) and "20 held-out" in spanned([found])
    other = replace(one, train=images(12, 5))  # images that are in no sum have as much left as the held-out ones
    assert attack([other])[0].ratio > 0.8
    assert attack([replace(one, moments=lambda: images(64).T @ images(64), summed=64)]) == []
    assert "no image was held out" in spanned(attack([replace(one, held_out=held_out[:0])]))


def test_moments_that_classes_share_are_looked_at_once() -> None:
    calls = []

    def moments() -> torch.Tensor:
        calls.append(1)
        return images(12).T @ images(12)

    attack([Exposed(c, {}, images(12)[6 * c : 6 * c + 6], images(5, 1), moments=moments, summed=12) for c in (0, 1)])
    assert len(calls) == 1


def test_what_was_computed_from_one_image_is_that_image() -> None:
    assert ratios(Exposed(0, {"mean": images(1)}, images(1).repeat(3, 1), images(20, 1)))["mean"] == 0


@pytest.mark.parametrize(("n", "held_out"), [(3, 0), (4, 0), (20, 2), (60, 20)])
def test_directions_that_span_the_images_are_found(n: int, held_out: int) -> None:
    """n images lie in n - 1 directions: a combination of them is each image."""
    train = images(n)
    mean = train.mean(0, keepdim=True)
    whole = torch.linalg.svd(train - mean, full_matrices=False).Vh[: n - 1]
    span = Exposed(0, {}, train, images(held_out, 1), mean, whole)
    assert ratios(span)["combination of directions"] < 0.01
    assert ratios(replace(span, directions=whole[: n // 5]))["combination of directions"] > BOUND


def test_a_direction_that_is_one_image_is_found() -> None:
    train = torch.cat([images(60), torch.full((1, 64), 3.0)])
    mean = train.mean(0, keepdim=True)
    odd = (train[-1:] - mean) / (train[-1:] - mean).norm()
    assert ratios(Exposed(0, {}, train, images(20, 1), mean, odd))["direction"] < BOUND


def test_an_upload_with_an_image_in_a_component_does_not_leave() -> None:
    """It names the site, the class, the figure and the setting; the same upload without it leaves."""
    federation = small_federation("federated_factory")
    plan = federation.plan
    method, ctx = FederatedFactory(plan.task, plan.settings), Context(plan, torch.device("cpu"))
    pixels = ((images(50).clamp(-1, 1) + 1) * 127.5).to(torch.uint8).reshape(50, 1, 8, 8)
    data = Dataset(pixels[:40], torch.zeros(40, dtype=torch.int64))
    shard = Shard("st-mary", data, Dataset(pixels[40:], torch.zeros(10, dtype=torch.int64)), "x")
    payload = method.client_phase(shard, ctx)
    found = check_exposure(method, payload, shard, plan.task, ctx)
    assert f"{min(one.ratio for one in found):.2f}" in compared(found, plan.task.classes) and compared([], ()) == ""
    assert factory_for(plan.settings, plan.task).contract().keys() == {n.split("/")[1] for n in payload.tensors}
    centers, basis = payload.tensors["class-0/centers"].clone(), payload.tensors["class-0/basis"].clone()
    off = pixels[3].flatten() / 127.5 - 1 - payload.tensors["class-0/mean"][0]
    centers[0], basis[-1] = 0, off / off.norm()
    centers[0, -1] = off.norm()
    leaking = Payload({**payload.tensors, "class-0/centers": centers, "class-0/basis": basis}, payload.facts)
    with pytest.raises(UploadBlocked) as caught:
        check_exposure(method, leaking, shard, plan.task, ctx)
    command = str(caught.value)
    assert caught.value.client == "st-mary" and caught.value.field == "least" and repr(plan.task.classes[0]) in command
    assert "0.2" in str(caught.value.expected) and "least" in str(caught.value.fix)


def test_a_real_site_is_stopped_and_warned_where_a_simulation_goes_on() -> None:
    """Sums of some forty images: the simulation's results say what a real site would be stopped for."""
    federation = small_federation("onesum")
    lines: list[str] = []
    plan, shard = federation.plan, federation.shards[0]
    method, ctx = load("onesum")(plan.task, plan.settings), Context(plan, torch.device("cpu"))
    arguments = (method, shard, plan, contracts_of(method, plan), simulated_key(plan.seed, shard.client), ctx)
    _, meter = run_client_phase(*arguments, real=False)
    assert len(meter.remarks) == 1 and meter.remarks[0].startswith("a real site would not send this")
    with pytest.raises(UploadBlocked) as caught:
        run_client_phase(*arguments)
    assert caught.value.field == "readable" and caught.value.client == shard.client
    accepting = replace(plan, settings=replace(plan.settings, readable="send"))
    method, ctx = load("onesum")(plan.task, accepting.settings), Context(accepting, torch.device("cpu"))
    _, meter = run_client_phase(method, shard, accepting, *arguments[3:5], ctx, notice=lines.append)
    assert not meter.remarks and "distance ratio of" in lines[0] and "membership test" in lines[-1]
