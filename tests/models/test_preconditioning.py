"""The best linear denoiser of a class, and EDM's scalar one as its special case."""

import math

import torch

from osfl.models.initial import initialize
from osfl.models.preconditioning import Gaussian, White
from osfl.models.unet import Denoiser, parse_unet

IMAGE = (1, 4, 4)
SIGMA = torch.tensor([0.01, 0.3, 1.0, 20.0])


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def known(directions: int = 3, used: int = 3) -> tuple[Gaussian, torch.Tensor]:
    """A Gaussian of a mean, a few directions and a rest, and its covariance written out."""
    known = Gaussian(IMAGE, directions)
    known.initialize(None)
    basis = torch.linalg.qr(torch.randn((16, 16), generator=rng(), dtype=torch.float64))[0][:used]
    variances = torch.tensor([9.0, 4.0, 1.0], dtype=torch.float64)[:used]
    known.know(torch.linspace(-1, 1, 16)[None], basis, variances, 0.04)
    whole = 0.04 * torch.eye(16, dtype=torch.float64) + basis.T @ torch.diag(variances - 0.04) @ basis
    return known, whole


def test_it_is_the_wiener_filter_of_its_covariance() -> None:
    """mean + C (C + s^2)^-1 (x - mean), and the trace of what is left a pixel."""
    gaussian, covariance = known()
    x = 3 * torch.randn((4, *IMAGE), generator=rng(1))
    for index, sigma in enumerate(SIGMA.tolist()):
        total = covariance + sigma**2 * torch.eye(16, dtype=torch.float64)
        kernel_filter = covariance @ torch.linalg.inv(total)
        off = x[index].flatten().double() - gaussian.mean[0]
        assert torch.allclose(
            gaussian.linear(x, SIGMA)[index].flatten().double(), gaussian.mean[0] + kernel_filter @ off, atol=1e-5
        )
        left = torch.trace(covariance - kernel_filter @ covariance) / 16
        assert math.isclose(float(gaussian.error(SIGMA)[index]), float(left), rel_tol=1e-4)
        scale = math.sqrt(float(torch.trace(total)) / 16)
        assert torch.allclose(gaussian.scaled(x, SIGMA)[index].flatten(), (off / scale).float(), atol=1e-5)


def test_with_one_variance_for_all_it_is_edm_s() -> None:
    gaussian, white, x = Gaussian(IMAGE, 3), White(), torch.randn((4, *IMAGE), generator=rng())
    gaussian.initialize(None)
    basis = torch.linalg.qr(torch.randn((16, 16), generator=rng()))[0][:3]
    gaussian.know(torch.zeros(1, 16), basis, torch.full((3,), 0.25), 0.25)
    assert torch.allclose(gaussian.linear(x, SIGMA), white.linear(x, SIGMA), atol=1e-6)
    assert torch.allclose(gaussian.error(SIGMA), white.error(SIGMA)) and torch.allclose(
        gaussian.scaled(x, SIGMA), white.scaled(x, SIGMA), atol=1e-6
    )


def test_unused_directions_change_nothing() -> None:
    """A class of few images knows few directions; the tensors have the same shapes."""
    few, _ = known(directions=2, used=2)
    roomy, _ = known(directions=7, used=2)
    x = torch.randn((4, *IMAGE), generator=rng(1))
    assert roomy.basis.shape == (7, 16)
    for one in ("linear", "scaled"):
        assert torch.allclose(getattr(few, one)(x, SIGMA), getattr(roomy, one)(x, SIGMA), atol=1e-6)
    assert torch.allclose(few.error(SIGMA), roomy.error(SIGMA)) and torch.allclose(few.noised(x, 2.0), roomy.noised(x, 2.0))


def test_noise_begins_with_the_covariance_of_noised_images() -> None:
    gaussian, covariance = known()
    made = gaussian.noised(torch.randn((40_000, *IMAGE), generator=rng(2)), 0.5).flatten(1).double()
    expected = covariance + 0.25 * torch.eye(16, dtype=torch.float64)
    assert torch.allclose(made.mean(0), gaussian.mean[0].double(), atol=0.06)
    assert torch.allclose(torch.cov(made.T), expected, atol=0.2)


def test_a_denoiser_begins_as_what_it_knows_and_learns_a_target_of_unit_variance() -> None:
    net = Denoiser(IMAGE, parse_unet("w8-m1.2-b1"), directions=3)
    initialize(net, rng())
    assert isinstance(net.knows, Gaussian)
    known_well, covariance = known()
    net.knows.load_state_dict(known_well.state_dict())
    root = torch.linalg.cholesky(covariance)
    clean = (known_well.mean + torch.randn((4000, 16), generator=rng(3)) @ root.T.float()).reshape(-1, *IMAGE)
    for level in SIGMA.tolist():
        sigma = torch.full((len(clean),), level)
        noisy = clean + level * torch.randn(clean.shape, generator=rng(4))
        with torch.no_grad():
            assert torch.equal(net(noisy, sigma), net.knows.linear(noisy, sigma))
        target = (clean - net.knows.linear(noisy, sigma)) / net.knows.error(sigma).sqrt()[:, None, None, None]
        assert abs(float(target.square().mean()) - 1) < 0.05
        assert abs(float(net.knows.scaled(noisy, sigma).square().mean()) - 1) < 0.05
