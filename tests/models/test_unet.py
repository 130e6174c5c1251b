"""The magnitude-preserving U-Net: sizes of the paper, unit weights, preconditioning."""

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import conv2d

from osfl.core.errors import UsageError
from osfl.models.initial import initialize
from osfl.models.preconditioning import White
from osfl.models.unet import Block, Denoiser, MPConv, UnetShape, mp_cat, mp_silu, mp_sum, normalize, parse_unet


def parameters(name: str, image: tuple[int, int, int]) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Denoiser(image, parse_unet(name)).parameters())


def small(dropout: float = 0.0, seed: int = 0) -> Denoiser:
    net = Denoiser((1, 8, 8), parse_unet("w8-m1.2-b1-a4"), dropout)
    initialize(net, torch.Generator().manual_seed(seed))
    return net


def test_the_paper_s_generators_have_its_sizes() -> None:
    """50.70 M parameters at 32 px and 12.2 M at 128 px."""
    assert round(parameters("w128-m1.2.2.2-b3-a16.8", (3, 32, 32)) / 1e6, 2) == 50.70
    assert round(parameters("w64-m1.2.2.2-b3-a16.8", (3, 128, 128)) / 1e6, 1) == 12.2


def test_names_of_networks() -> None:
    assert parse_unet("w128-m1.2.2.2-b3-a16.8") == UnetShape(128, (1, 2, 2, 2), 3, (16, 8))
    assert parse_unet("w16-m1.2-b1-s2") == UnetShape(16, (1, 2), 1, (), 2)
    assert parse_unet("w16-m1.2-b1-s2").divides == 4
    for wrong in ("", "w16", "w0-m1-b1", "resnet18", "w16-m1.2-b1-s0"):
        with pytest.raises(UsageError, match="U-Net"):
            parse_unet(wrong)


def test_effective_weights_have_length_one_and_stored_ones_are_brought_back() -> None:
    layer = MPConv(5, 7, 3)
    with torch.no_grad():
        layer.weight.normal_(std=30.0, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(layer.eval().effective().flatten(1).norm(dim=1), torch.ones(7), atol=1e-3)
    assert float(layer.weight.detach().std()) > 20  # evaluation leaves them alone
    layer.train()(torch.zeros(1, 5, 4, 4))
    assert torch.allclose(layer.weight.detach().flatten(1).square().mean(1).sqrt(), torch.ones(7), atol=1e-3)
    assert torch.allclose(layer.effective().flatten(1).norm(dim=1), torch.ones(7), atol=1e-3)


def test_every_operation_keeps_the_magnitude() -> None:
    a, b = torch.randn((2, 4000, 6), generator=torch.Generator().manual_seed(0))
    for t in (0.3, 0.5):
        assert abs(float(mp_sum(a, b, t).std()) - 1) < 0.02
    assert abs(float(mp_silu(a).square().mean().sqrt()) - 1) < 0.02
    assert abs(float(normalize(5 * a, (1,)).square().mean()) - 1) < 1e-3
    joined = mp_cat(a, b[:, :2])  # both halves count the same although one has fewer channels
    assert math.isclose(float(joined[:, :6].square().sum()), float(joined[:, 6:].square().sum()), rel_tol=0.05)
    assert abs(float(joined.square().mean()) - 1) < 0.02


def test_preconditioning_identities() -> None:
    sigma, one = torch.tensor([1e-4, 0.002, 0.5, 80.0, 1e4], dtype=torch.float64), torch.ones(5, 1, 1, 1, dtype=torch.float64)
    known = White()
    skip, out, scale = known.linear(one, sigma).flatten(), known.error(sigma).sqrt(), known.scaled(one, sigma).flatten()
    assert torch.allclose(scale**2 * (sigma**2 + 0.25), torch.ones(5, dtype=torch.float64))
    assert skip[0] > 1 - 1e-6 and out[0] < 1e-3 and skip[-1] < 1e-8
    assert math.isclose(float(skip[2]), 0.5)
    assert torch.allclose(out**2, skip * sigma**2)  # of c_skip x, exactly the posterior variance
    assert torch.allclose(known.noised(one, 80.0), 80 * one)


def test_without_training_it_is_the_wiener_filter() -> None:
    """The output begins at zero, so D = c_skip x: optimal for data of N(0, 0.5^2)."""
    net = small().eval()
    rng = torch.Generator().manual_seed(1)
    clean = 0.5 * torch.randn((400, 1, 8, 8), generator=rng)
    for sigma in (0.1, 0.5, 2.0):
        noisy = clean + sigma * torch.randn(clean.shape, generator=rng)
        answer = net(noisy, torch.full((400,), sigma)).detach()
        best = 0.25 / (0.25 + sigma**2)
        assert torch.allclose(answer, best * noisy, atol=1e-6)
        errors = [float((factor * noisy - clean).square().mean()) for factor in (best * 0.9, best, min(1.0, best * 1.1))]
        assert errors[1] < errors[0] and errors[1] < errors[2]


def test_dropout_draws_from_the_given_generator_only() -> None:
    net, x, sigma = small(0.5).train(), torch.ones(4, 1, 8, 8), torch.ones(4)
    with torch.no_grad():
        net.unet.gain.fill_(1.0)
    plain = net(x, sigma)
    assert torch.allclose(net(x, sigma), plain, atol=1e-2)  # no generator, no dropout
    global_state = torch.get_rng_state()
    net.unet.randomize(torch.Generator().manual_seed(0))
    first, second = net(x, sigma), net(x, sigma)
    net.unet.randomize(torch.Generator().manual_seed(0))
    assert not torch.allclose(first, second, atol=1e-2) and torch.allclose(net(x, sigma), first, atol=1e-2)
    assert torch.equal(torch.get_rng_state(), global_state)


def test_folded_pixels_come_back_in_place() -> None:
    net = Denoiser((3, 8, 8), parse_unet("w8-m1.2-b1-s2"))
    initialize(net, torch.Generator().manual_seed(0))
    with torch.no_grad():
        net.unet.gain.fill_(1.0)
    answer = net(torch.zeros(2, 3, 8, 8), torch.ones(2))
    assert answer.shape == (2, 3, 8, 8) and bool(torch.isfinite(answer).all()) and float(answer.detach().std()) > 0


# --- by hand, from the equations ---


def unit(weight: torch.Tensor) -> torch.Tensor:
    """Weights of length 1 for every output."""
    length: torch.Tensor = weight.detach().flatten(1).norm(dim=1)
    return weight.detach() / length.reshape(-1, *[1] * (weight.ndim - 1))


def level(x: torch.Tensor, dim: int) -> torch.Tensor:
    """Root mean square 1."""
    return x / x.square().mean(dim, keepdim=True).sqrt()


def silu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x) / 0.596


def mixed(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Three parts in ten are new."""
    return (0.7 * x + 0.3 * y) / math.sqrt(0.7**2 + 0.3**2)


def a_block(**options: Any) -> Block:
    block = Block(6, 128, 5, **options)
    initialize(block, torch.Generator().manual_seed(0))
    with torch.no_grad():
        block.gain.fill_(0.8)
    return block.eval()


@torch.no_grad()
def test_an_encoder_block_with_attention_by_hand() -> None:
    """Pixel norm, modulation by 1 + gain c, residual and attention of weight 0.3, two heads of 64 channels."""
    block, rng = a_block(encoder=True, attention=True), torch.Generator().manual_seed(1)
    given, embedding = 3 * torch.randn((2, 6, 3, 3), generator=rng), torch.randn((2, 5), generator=rng)
    assert block.skip is not None and block.qkv is not None and block.project is not None
    x = level(conv2d(given, unit(block.skip.weight)), 1)
    y = conv2d(silu(x), unit(block.first.weight), padding=1)
    y = y * (1 + 0.8 * embedding @ unit(block.modulate.weight).T)[:, :, None, None]
    x = mixed(x, conv2d(silu(y), unit(block.second.weight), padding=1))
    q, k, v = level(conv2d(x, unit(block.qkv.weight)).reshape(2, 2, 64, 3, 9), 2).unbind(3)
    seen = torch.zeros(2, 2, 64, 9)
    for place in range(9):  # what each place sees: values weighted by how well their keys answer its query
        score = (q[..., place, None] * k).sum(2) / 8
        seen[..., place] = (score.softmax(-1)[:, :, None] * v).sum(-1)
    x = mixed(x, conv2d(seen.reshape(2, 128, 3, 3), unit(block.project.weight)))
    assert torch.allclose(block(given, embedding), x, atol=2e-3)


@torch.no_grad()
def test_a_decoder_block_by_hand_leaves_its_input_as_it_is_but_for_the_clip() -> None:
    block, rng = a_block(encoder=False), torch.Generator().manual_seed(1)
    given, embedding = 20 * torch.randn((2, 6, 3, 3), generator=rng), torch.randn((2, 5), generator=rng)
    assert block.skip is not None
    y = conv2d(silu(given), unit(block.first.weight), padding=1)
    y = y * (1 + 0.8 * embedding @ unit(block.modulate.weight).T)[:, :, None, None]
    by_hand = mixed(conv2d(given, unit(block.skip.weight)), conv2d(silu(y), unit(block.second.weight), padding=1))
    assert torch.allclose(block(given, embedding), by_hand, rtol=1e-3, atol=1e-2) and float(by_hand.abs().max()) > 20
    assert float(block(1e6 * given, embedding).abs().max()) == 256


def test_dropout_keeps_the_mean() -> None:
    block = a_block(encoder=True, dropout=0.75).train()
    block.rng = torch.Generator().manual_seed(0)
    dropped = block._dropped(torch.ones(50, 128, 3, 3))
    assert set(dropped.unique().tolist()) == {0.0, 4.0} and abs(float(dropped.mean()) - 1) < 0.05


@torch.no_grad()
def test_the_denoiser_is_preconditioned_by_hand() -> None:
    """D = c_skip x + c_out F(c_in x, ln(sigma) / 4), with an F that is not zero any more."""
    net = small().eval()
    net.unet.gain.fill_(1.0)
    x = 3 * torch.randn((4, 1, 8, 8), generator=torch.Generator().manual_seed(1))
    sigma = torch.tensor([0.01, 0.5, 2.0, 40.0])
    total = (sigma**2 + 0.25)[:, None, None, None]
    inside = net.unet(x / total.sqrt(), sigma.log() / 4)
    by_hand = 0.25 / total * x + 0.5 * sigma[:, None, None, None] / total.sqrt() * inside
    assert float(inside.std()) > 0.1 and torch.allclose(net(x, sigma), by_hand, atol=1e-5)


@torch.no_grad()
def test_noise_levels_are_waves_of_their_logarithm() -> None:
    net, sigma = small().eval(), torch.tensor([0.01, 0.5, 40.0])
    angle = 2 * math.pi * (sigma.log()[:, None] / 4 * net.waves.frequencies + net.waves.phases)
    waves = math.sqrt(2) * angle.cos()
    assert torch.allclose(net.waves(sigma.log() / 4), waves, atol=1e-5)
    assert torch.allclose(net.uncertainty(sigma), (waves @ unit(net.uncertain.weight).T)[:, 0], atol=1e-3)
