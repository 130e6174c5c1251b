"""Each attack of the audit on a case in which it must succeed, and on a control in which it must find nothing."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from osfl.core.seeds import numpy_generator, torch_generator
from osfl.core.types import Dataset, Exposed
from osfl.evaluation.privacy.attributes import answered_shares, distance, set_area, shares_from_batch_norm
from osfl.evaluation.privacy.memorization import CLEAN, COPIES, verdict
from osfl.evaluation.privacy.signals import _MEASURES, model_signals
from osfl.methods.federated_factory.factories import factory_for
from osfl.rounds.exposure import BOUND, attack, worst
from tests.evaluation.privacy.test_memorization import blobs, noisy
from tests.methods.federated_factory.conftest import TASK, TINY, quiet, rng

CPU, SIDE, CLASSES = torch.device("cpu"), 8, 3
SKEWED, EVEN = (96, 36, 12), (48, 48, 48)


def images(counts: tuple[int, ...], seed: str, apart: float = 30.0) -> Dataset:
    """Classes are told by brightness, not well."""
    draw, labels = torch_generator(0, seed), torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    pixels = 100 + apart * labels[:, None, None, None] + 40 * torch.randn(len(labels), 1, SIDE, SIDE, generator=draw)
    return Dataset(pixels.clamp(0, 255).to(torch.uint8), labels)


def trained(data: Dataset, steps: int) -> nn.Module:
    """A linear classifier; of many steps on few images it knows them by heart."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, CLASSES))
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    optimizer, x = torch.optim.Adam(model.parameters(), 0.02), data.images.float() / 127.5 - 1
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(model(x), data.labels).backward()
        optimizer.step()
    return model.eval()


# --- attributes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("counts", "told"), [(SKEWED, True), (EVEN, False)])
def test_class_shares_from_answers(counts: tuple[int, ...], told: bool) -> None:
    """A site of 96, 36 and 12 images is told from one that has as many of each, and not the other way round."""
    found = answered_shares(trained(images(counts, "site", 5.0), 60), images(EVEN, "probes", 5.0), CLASSES, CPU)
    blind = distance(np.full(CLASSES, 1 / 3), SKEWED)
    assert (distance(found, SKEWED) < 0.5 * blind) is told
    assert distance(found, counts) < 0.12


def striped(counts: tuple[int, ...], seed: str) -> Dataset:
    """Stripes across, stripes down, and a chessboard, with noise: as bright, with other edges."""
    row, column = torch.arange(SIDE)[:, None], torch.arange(SIDE)[None]
    patterns = torch.stack([(row % 2).expand(SIDE, SIDE), (column % 2).expand(SIDE, SIDE), (row + column) % 2])
    labels = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    noise = 20 * torch.randn(len(labels), 1, SIDE, SIDE, generator=torch_generator(0, seed))
    return Dataset((60 + 120 * patterns[labels][:, None] + noise).clamp(0, 255).to(torch.uint8), labels)


@pytest.mark.parametrize(("counts", "told"), [(SKEWED, True), (EVEN, False)])
def test_class_shares_from_batch_norm_statistics(counts: tuple[int, ...], told: bool) -> None:
    """The running means of a site's classifier are those of its mixture of classes."""
    first, second, norm = nn.Conv2d(1, 8, 3), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8, momentum=None)
    draw = torch_generator(0, "filters")
    for layer in (first, second):
        nn.init.normal_(layer.weight, std=0.5, generator=draw)
        layer.bias = None
    model = nn.Sequential(first, nn.ReLU(), second, norm)
    model.train()(striped(counts, "site").images.float() / 127.5 - 1)
    found = shares_from_batch_norm(model, striped(EVEN, "probes"), CLASSES, CPU)
    assert found is not None and (distance(found, SKEWED) < 0.1) is told and distance(found, counts) < 0.1
    without = nn.Sequential(nn.Flatten(), nn.Linear(SIDE * SIDE, CLASSES))
    assert shares_from_batch_norm(without, striped(EVEN, "probes"), CLASSES, CPU) is None


# --- presence ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("present", [True, False])
def test_presence_of_a_site_from_sixteen_of_its_images(present: bool) -> None:
    """The released model learned from the site's images, or from another site's."""
    mine, others = images((20, 20, 20), "mine", 5.0), images((20, 20, 20), "never used", 5.0)
    model = trained(mine if present else images((20, 20, 20), "another site", 5.0), 150)
    inside, outside = (model_signals(model, part, CPU)["loss"] for part in (mine, others))
    found = set_area(inside, outside, 16, numpy_generator(0, "sets"))
    assert found > 0.95 if present else 0.1 < found < 0.9


# --- a class of three images ---------------------------------------------------------------------------------------------


def statistics_of(rows: torch.Tensor, held_out: torch.Tensor) -> Exposed:
    """What a QR factor R, or the second moments R^T R, say of these rows of features."""
    factor = torch.linalg.qr(rows.double()).R
    gram = factor.T @ factor
    return Exposed(
        0, {"mean": rows.mean(0, keepdim=True)}, rows, held_out, factor.mean(0, keepdim=True), factor, lambda: gram, len(rows)
    )


@pytest.mark.parametrize(("count", "told"), [(3, True), (400, False)])
def test_statistics_of_three_images_tell_them_by_least_squares(count: int, told: bool) -> None:
    """Least squares from the rows of a QR factor of three images leaves nothing of them, and most of all other images; that
    of many more images than features tells nobody apart."""
    draw = torch_generator(0, "features")
    mine, others = (torch.randn(size, 24, generator=draw) for size in (count, 50))
    basis = torch.linalg.qr(mine.double()).R
    for rows, inside in ((mine, True), (others, not told)):
        solution = torch.linalg.lstsq(basis.T, rows.double().T, driver="gelsd").solution
        left = (rows.double() - (basis.T @ solution).T).norm(dim=1) / rows.double().norm(dim=1)
        assert bool((left < 1e-6).all()) is inside
    both = Exposed(0, {}, torch.cat([mine, others]), mine[:0], moments=statistics_of(mine, others).moments, summed=count)
    leverage = _MEASURES["leverage"](both)
    assert leverage is not None and (float(leverage[:count].max()) < float(leverage[count:].min())) is told
    found = [one for one in attack([statistics_of(mine, others)]) if one.residuals is not None]
    assert bool(found and found[0].ratio < 1e-6) is told


@pytest.mark.parametrize(("count", "told"), [(3, True), (300, False)])
def test_a_row_of_second_moments_is_an_image_that_alone_has_a_feature(count: int, told: bool) -> None:
    """Without knowing which feature: whoever has G tries all rows. In the control as many images as there are have it."""
    draw = torch_generator(0, "rows")
    mine, others = (torch.rand(size, 24, generator=draw) for size in (count, 50))
    if told:
        mine[:, :3] = torch.eye(3)  # each has a feature of its own
    gram = mine.double().T @ mine.double()
    nearest = _MEASURES["row"](Exposed(0, {}, torch.cat([mine, others]), mine[:0], moments=lambda: gram, summed=count))
    assert nearest is not None and (float(nearest[:count].max()) < 1e-3 < float(nearest[count:].min())) is told


@pytest.mark.parametrize(("count", "read"), [(3, True), (60, False)])
def test_a_mixture_of_three_images_is_read_and_one_of_many_is_not(count: int, read: bool) -> None:
    """Without the rule of `least` three images span a mixture's mean and directions; with it sixty do not."""
    everything = blobs(count + 60, 1)
    mine, held_out = everything[:count], everything[count:]
    pixels, others = (part.flatten(1).float() / 127.5 - 1 for part in (mine, held_out))
    mean = pixels.mean(0, keepdim=True)
    directions = torch.linalg.svd(pixels - mean, full_matrices=False).Vh[: 2 if read else 4]
    found = worst(attack([Exposed(0, {"component": mean}, pixels, others, mean, directions)]))
    assert found is not None and (found.ratio < BOUND) is read


# --- diffusion -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [True, False])
def test_a_diffusion_model_that_learned_one_image_by_heart_is_caught(copies: bool) -> None:
    """Twelve near-copies of one image, as no site may learn them; and three hundred different images."""
    every, held_out = (functional.interpolate(blobs(n, n).float(), (SIDE, SIDE)).round().to(torch.uint8) for n in (300, 120))
    mine = noisy(every[:1].repeat(12, 1, 1, 1), 2) if copies else every
    tiny = replace(
        TINY, factory="edm", edm_images=1000, edm_lr=0.01, edm_directions=20, edm_start=3.0, edm_steps=8, dropout=0.0, least=2
    )
    factory = factory_for(tiny, TASK)
    found = verdict(factory.sample(factory.fit(mine, rng(), quiet), 60, rng(3)), mine, held_out)
    assert found.verdict == (COPIES if copies else CLEAN)
    assert found.copied is not None and (found.copied > 0.9) is copies
