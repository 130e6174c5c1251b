"""Similarity of images against closed forms, the best match by hand, and attackers who find what there is to find."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch.nn import functional

from osfl.core.method import Context, Method
from osfl.core.seeds import torch_generator
from osfl.core.types import Dataset, Plan, Shard, Task, Upload
from osfl.evaluation.privacy.reconstruction import KNOWN, SIMILAR, Effort, Known, _nearest, attack, best_of_all
from osfl.evaluation.privacy.similarity import MOST, psnr, squared_errors, ssim
from osfl.models.decoders import build_decoder


def test_psnr_by_hand() -> None:
    assert psnr(torch.tensor([0.01])).item() == pytest.approx(20.0)
    assert psnr(torch.tensor([0.0])).item() == MOST


def test_squared_errors_of_all_pairs() -> None:
    a, b = torch.rand(3, 1, 4, 4), torch.rand(5, 1, 4, 4)
    by_hand = (a[:, None] - b[None]).double().square().flatten(2).mean(2)
    assert torch.allclose(squared_errors(a, b), by_hand, atol=1e-7)


def test_ssim_of_flat_images_has_only_the_luminance_term() -> None:
    a, b = torch.full((1, 3, 16, 16), 0.2), torch.full((1, 3, 16, 16), 0.6)
    by_hand = (2 * 0.2 * 0.6 + 1e-4) / (0.2**2 + 0.6**2 + 1e-4)
    assert ssim(a, b).item() == pytest.approx(by_hand, rel=1e-5)


def test_ssim_of_equal_images_is_one_and_falls_with_noise() -> None:
    rng = torch_generator(0, "noise")
    a = torch.rand(4, 1, 20, 20, generator=rng)
    noisy = (a + 0.1 * torch.randn(a.shape, generator=rng)).clamp(0, 1)
    assert torch.allclose(ssim(a, a), torch.ones(4).double())
    assert (ssim(a, noisy) < 0.99).all() and (ssim(a, 1 - a) < 0).all()
    assert ssim(torch.rand(1, 1, 8, 8), torch.rand(1, 1, 8, 8)).shape == (1,)  # smaller than the window


def test_the_best_match_stays_within_the_class() -> None:
    images = torch.tensor([0.0, 0.5, 1.0]).view(3, 1, 1, 1).expand(3, 1, 4, 4)
    private = Known(images, torch.zeros(3, 1), torch.tensor([0, 1, 1]))
    found = _nearest(torch.full((2, 1, 4, 4), 0.1), torch.tensor([0, 1]), private)
    assert found[:, 0, 0, 0].tolist() == [0.0, 0.5]


def test_the_best_of_all_for_each_original_by_hand() -> None:
    """The highest PSNR may be of another reconstruction than the highest SSIM."""
    rng = torch_generator(0, "pattern")
    pattern = 0.2 * torch.rand(1, 1, 12, 12, generator=rng)
    originals = torch.cat([pattern + 0.4, torch.full((1, 1, 12, 12), 0.9)])
    found = torch.cat([pattern + 0.1, torch.full((1, 1, 12, 12), 0.5)])  # the right structure; nearly the right level
    best = best_of_all(originals, found)
    error = torch.stack([((originals[0] - 0.5) ** 2).mean(), torch.tensor(0.16)])
    likeness = torch.stack([ssim(originals[:1], found[:1])[0], ssim(originals[1:], found[1:])[0]])
    assert best["psnr"] == pytest.approx(float(psnr(error).mean()), rel=1e-4)
    assert best["ssim"] == pytest.approx(float(likeness.mean()), rel=1e-6) and best["count"] == 2
    assert float(likeness[0]) > float(ssim(originals[:1], found[1:])[0]) + 0.1


class Pixels(Method):
    """A method whose features are the pixels, and whose synthetic features are noise or the training features themselves."""

    def __init__(self, synthetic: torch.Tensor, labels: torch.Tensor) -> None:
        super().__init__(Task("blobs", ("x", "y"), (1, 8, 8)), {})
        self.made = synthetic, labels

    def tokens(self, uploads: Sequence[Upload], ctx: Context) -> tuple[torch.Tensor, torch.Tensor]:
        return self.made

    def encode(self, images: torch.Tensor, ctx: Context) -> torch.Tensor:
        return images.float().flatten(1).unsqueeze(1) / 255


def _images(count: int, seed: str) -> Dataset:
    """Two classes of blobs at random places."""
    rng = torch_generator(0, seed)
    place = torch.rand(count, 2, 1, 1, generator=rng) * 7
    grid = torch.arange(8.0)
    bump = torch.exp(-((grid.view(1, 8, 1) - place[:, 0]) ** 2 + (grid.view(1, 1, 8) - place[:, 1]) ** 2) / 4)
    return Dataset((255 * bump).to(torch.uint8).unsqueeze(1), torch.arange(count) % 2)


def test_attackers_find_images_in_real_features_and_not_in_noise() -> None:
    shard = Shard("a", _images(150, "train"), _images(150, "val"))
    ctx = Context(Plan(Task("blobs", ("x", "y"), (1, 8, 8)), "pixels", {}, ("a",)), torch.device("cpu"))
    noise = torch.randn(40, 1, 64, generator=torch_generator(0, "noise"))
    found = attack(Pixels(noise, torch.arange(40) % 2), [], [shard], ("x", "y"), ctx, Effort(steps=250))
    assert found is not None and found["side"] == 8 and found["steps"] == 250
    for name in (SIMILAR, KNOWN):
        row = found["attackers"][name]
        assert row["real"]["psnr"] > row["synthetic"]["psnr"] + 3 and row["real"]["ssim"] > row["synthetic"]["ssim"] + 0.1
        assert row["real_best"]["psnr"] >= row["real"]["psnr"] and row["real"]["psnr"] > row["blind"]["psnr"] - 1
        assert row["real_by_original"]["psnr"] > row["synthetic_by_original"]["psnr"] + 1
        assert row["real_by_original"]["ssim"] > row["synthetic_by_original"]["ssim"]
    assert not math.isnan(found["attackers"][KNOWN]["blind"]["ssim"])
    short = [attack(Pixels(noise, torch.arange(40) % 2), [], [shard], ("x", "y"), ctx, Effort(steps=20)) for _ in range(2)]
    assert short[0] == short[1]
    leak = attack(Pixels(ctx_free(shard), shard.train.labels), [], [shard], ("x", "y"), ctx, Effort(steps=60))
    assert leak is not None
    row = leak["attackers"][KNOWN]
    assert row["synthetic"] == pytest.approx(row["real_best"], rel=0.1)


def test_a_decoder_begins_with_the_mean_image_and_moves_a_little() -> None:
    """1,600 numbers and 64 pixels, as in FALCON's cells: one whose answers are large at first ends up saying black for ever."""
    rng = torch_generator(0, "decoder")
    decoder = build_decoder(1600, 4, 1, 64, rng)
    x, y = torch.randn(8, 1600, generator=rng), torch.arange(8) % 4
    assert not decoder(x, y).any()
    optimizer = torch.optim.Adam(decoder.parameters(), Effort().lr)
    functional.mse_loss(decoder(x, y), 0.1 * torch.randn(8, 1, 64, 64, generator=rng)).backward()
    optimizer.step()
    assert 0 < decoder(x, y).detach().abs().max().item() < 0.5


def ctx_free(shard: Shard) -> torch.Tensor:
    """Training features handed out as synthetic ones: a generator that copies."""
    return shard.train.images.float().flatten(1).unsqueeze(1) / 255


def test_nothing_is_attacked_where_no_features_are_made() -> None:
    shard = Shard("a", _images(8, "train"), _images(8, "val"))
    ctx = Context(Plan(Task("blobs", ("x", "y"), (1, 8, 8)), "pixels", {}, ("a",)), torch.device("cpu"))
    assert attack(Pixels(torch.zeros(0, 1, 64), torch.zeros(0, dtype=torch.int64)), [], [shard], ("x", "y"), ctx) is None


def test_without_validation_images_only_the_worst_case_is_tried() -> None:
    shard = Shard("a", _images(12, "train"), _images(0, "val"))
    ctx = Context(Plan(Task("blobs", ("x", "y"), (1, 8, 8)), "pixels", {}, ("a",)), torch.device("cpu"))
    found = attack(Pixels(torch.zeros(4, 1, 64), torch.arange(4) % 2), [], [shard], ("x", "y"), ctx, Effort(steps=2))
    assert found is not None and list(found["attackers"]) == [KNOWN]
