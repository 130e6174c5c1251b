"""A Gaussian mixture in the principal components of one class' images: the lightest generator, fitted in a second.

Images are projected on the class' own principal directions; there a mixture with full covariances is fitted by expectation
maximization. What is left out (the directions of small variance) makes samples smooth, which a classifier would notice:
train it with noise on its inputs.

Nothing in it may rest on few images, because it travels: a component of one image is that image, and n images lie exactly in
their n - 1 principal directions. So a class of n different images has at most 2n / `least` directions, each carried by at
least `least` images; every component rests on at least `least` images; and covariances are shrunk to the one within components.

Under differential privacy all of that is replaced: directions are public ones, and a class has one Gaussian, of noisy sums.
What images have besides is missing in samples, so the classifier that learns from them sees real images in these directions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from osfl.core.method import Context
from osfl.core.types import ADDED, Contract, Dataset, Field
from osfl.ingredients.statistics.kmeans import kmeans
from osfl.ingredients.statistics.private_gaussians import SiteGaussians, site_gaussians
from osfl.ingredients.statistics.public_map import LEVELS, Projected, color_basis, cosine_basis
from osfl.ingredients.statistics.support import Readable, Support, effective_images, supported_directions
from osfl.methods.federated_factory.symmetries import orbit
from osfl.models.inputs import to_images, to_input
from osfl.runtime.devices import exact
from osfl.runtime.meter import spend

if TYPE_CHECKING:
    from osfl.core.types import Tensors

_TOLERANCE = 1e-4  # EM stops when the mean log-likelihood (nats an image) improves by less


@dataclass(frozen=True)
class MixtureSettings(Support):
    """How a mixture is fitted. None of this is in the paper, whose generators are diffusion models."""

    mixture_dims: int = 80  # principal components that are kept
    mixture_components: int = 15  # Gaussians; fewer where one would rest on fewer than `least` images
    mixture_prior: float = 10.0  # images' worth of belief that a component is as wide as all components are on average
    mixture_iterations: int = 60  # of expectation maximization, at most
    mixture_norm: float = field(default=1.0, metadata=ADDED)  # with [privacy]: images further off are drawn in; public ones: 1


class Mixture:
    """The generator `factory=mixture`. Small classes get fewer directions and components."""

    def __init__(self, settings: MixtureSettings, image: tuple[int, int, int], symmetry: str, device: torch.device) -> None:
        self.settings, self.image, self.symmetry, self.device = settings, image, symmetry, device

    def contract(self) -> Contract:
        """Unused directions and components are zeros, so that the size of an upload reveals nothing about a class."""
        pixels, dims, parts = math.prod(self.image), self._dims(), self.settings.mixture_components
        return {
            "mean": Field("F32", (1, pixels)),  # a row, so that the client's own check would find an image in it
            "basis": Field("F32", (dims, pixels)),
            "weights": Field("F32", (parts,), low=0.0, positive_sum=True),
            "centers": Field("F32", (parts, dims)),
            "scales": Field("F32", (parts, dims, dims)),  # lower Cholesky factors of the covariances
        }

    def _dims(self) -> int:
        return min(self.settings.mixture_dims, math.prod(self.image))

    def fit(
        self, images: torch.Tensor, rng: torch.Generator, progress: Callable[[int, int], None], kept: Path | None = None
    ) -> dict[str, torch.Tensor]:
        """uint8 images (n, channels, height, width) of one class -> named tensors."""
        images = torch.unique(images, dim=0)  # copies of one image are one image
        x = to_input(orbit(images, self.symmetry), exact(self.device)).reshape(-1, math.prod(self.image)).double()
        mean = x.mean(0, keepdim=True)
        basis = supported_directions(x - mean, self._dims(), self.settings.least, len(images))
        points = (x - mean) @ basis.T
        weights, centers, scales = supported_mixture(points, self.settings, len(images), rng)
        progress(1, 1)
        found = {"mean": mean, "basis": basis, "weights": weights, "centers": centers, "scales": scales}
        return {name: _padded(found[name].float().cpu(), line.shape) for name, line in self.contract().items()}

    def private(self, data: Dataset, classes: tuple[str, ...], ctx: Context) -> tuple[SiteGaussians, dict[int, Tensors]]:
        """Of all images of a site, with the noise of the plan: the Gaussians, and generators of the classes that have one."""
        norm, basis = self.settings.mixture_norm, public_directions(self._dims(), self.image)
        public = Projected(torch.zeros(len(basis), dtype=torch.float64), basis, norm)
        whole = (public(to_input(data.images).flatten(1)) * (LEVELS / norm)).round()
        found = site_gaussians(whole, data.labels, classes, ctx.plan)
        back = {"mean": torch.zeros(1, len(basis)), "basis": torch.linalg.pinv(basis), "weights": torch.ones(1)}
        scale = torch.linalg.cholesky(found.covariance) * norm
        cells = {c: {**back, "centers": found.means[c][None] * norm, "scales": scale[None]} for c in found.held}
        lines = self.contract()
        return found, {
            c: {name: _padded(cell[name].float(), line.shape) for name, line in lines.items()} for c, cell in cells.items()
        }

    def readable(self, tensors: Tensors) -> Readable:
        used = tensors["weights"] > 0
        centers = tensors["mean"] + tensors["centers"][used] @ tensors["basis"]
        return Readable({"component": centers}, tensors["mean"], tensors["basis"])

    def sample(self, tensors: Tensors, count: int, rng: torch.Generator) -> torch.Tensor:
        """`count` images as uint8."""
        weights, dims = tensors["weights"], self._dims()
        which = torch.multinomial(weights, max(count, 1), replacement=True, generator=rng)[:count]  # it refuses 0
        z = torch.randn((count, dims), generator=rng).to(self.device)
        mean, basis, centers, scales = (tensors[name].to(self.device) for name in ("mean", "basis", "centers", "scales"))
        points = torch.empty_like(z)
        sizes = torch.bincount(which, minlength=len(weights)).tolist()  # known here, so that no device is asked
        for part, mine in enumerate(torch.split(which.argsort(stable=True).to(self.device), sizes)):
            points[mine] = centers[part] + z[mine] @ scales[part].T
        spend(2.0 * count * dims * (dims + math.prod(self.image)), makes=count)
        return to_images((mean + points @ basis).reshape(-1, *self.image)).cpu()


_BRIGHTNESS, _TINT, _CONTRAST, _CHROMA = 0.3, 0.15, 0.35, 0.35  # of photographs, about: deviations of pixels in [-1, 1]


def public_directions(dims: int, image: tuple[int, int, int]) -> torch.Tensor:
    """B (pixels, dims): cosines of the lowest frequencies in brightness and color, each divided by the deviation that
    photographs have there, whose amplitude falls with the frequency. Ordinary images x in [-1, 1] have |x B| of about 1."""
    channels, height, width = image
    planes = torch.einsum("kc,uh,vw->kuvchw", color_basis(channels), cosine_basis(height), cosine_basis(width))
    u, v = torch.arange(height, dtype=torch.float64)[:, None], torch.arange(width, dtype=torch.float64)
    fall = 1 / (u.square() + v.square()).sqrt().clamp_min(1.0)
    fall[0, 0] = 0.0
    color = torch.full((channels, 1, 1), _CHROMA, dtype=torch.float64)
    color[0] = 1.0
    deviation = color * fall
    deviation = deviation * _CONTRAST * math.sqrt(math.prod(image)) / deviation.square().sum().sqrt()
    deviation[:, 0, 0] = _TINT * math.sqrt(height * width)
    deviation[0, 0, 0] = _BRIGHTNESS * math.sqrt(math.prod(image))
    order = deviation.flatten().argsort(descending=True, stable=True)[:dims]
    basis = planes.reshape(-1, math.prod(image))[order].T / deviation.flatten()[order]
    return torch.div(basis, len(order) ** 0.5)


class InPublicDirections(nn.Module):
    """Images as generators of a private round make them: in public directions, and no further out than `norm`."""

    def __init__(self, dims: int, image: tuple[int, int, int], norm: float) -> None:
        super().__init__()
        basis = public_directions(dims, image)
        self.norm = norm
        self.register_buffer("basis", basis.float(), persistent=False)
        self.register_buffer("back", torch.linalg.pinv(basis).float(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = x.flatten(1) @ self.get_buffer("basis")
        z = z * (self.norm / z.norm(dim=1, keepdim=True).clamp_min(self.norm))
        y: torch.Tensor = (z @ self.get_buffer("back")).view(x.shape).clamp(-1, 1)
        return y


def _padded(value: torch.Tensor, shape: tuple[int | str, ...]) -> torch.Tensor:
    whole = torch.zeros([int(side) for side in shape])
    whole[tuple(slice(0, side) for side in value.shape)] = value
    return whole


def supported_mixture(
    points: torch.Tensor, settings: MixtureSettings, images: int, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A mixture in which every component rests on at least `least` images, fitted anew with fewer until that holds."""
    if not points.shape[1]:  # no direction is left: every sample is the mean
        return points.new_ones(1), points.new_zeros(1, 0), points.new_zeros(1, 0, 0)
    k = max(1, min(settings.mixture_components, images // settings.least))
    while True:
        weights, centers, scales, owned = _mixture(points, k, settings, rng)
        rests_on = torch.minimum(effective_images(owned, images), weights * images)
        enough = int((rests_on >= settings.least).sum())
        if k == 1 or enough == k:
            return weights, centers, scales
        k = max(1, min(enough, k - 1))


def _mixture(
    points: torch.Tensor, k: int, settings: MixtureSettings, rng: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights (k,), centers (k, d), Cholesky factors (k, d, d) by EM from a k-means start, and the shares (n, k) behind them.

    Each covariance is (scatter + prior * W) / (n_k + prior) with W the covariance within components: the most probable one
    under an inverse Wishart belief, and positive definite for a component of any size.
    """
    n, dims = points.shape
    floor = 1e-6 * torch.eye(dims, dtype=points.dtype, device=points.device)
    start = torch.nn.functional.one_hot(torch.tensor(kmeans(points.cpu(), k, rng, starts=1)), k).double()
    owned = start.to(points.device)  # (n, k)
    before = -math.inf
    for _ in range(settings.mixture_iterations):
        mass, used = owned.sum(0).clamp_min(1e-9), owned
        centers = owned.T @ points / mass[:, None]
        off = points[None] - centers[:, None]  # (k, n, d)
        scatter = (off * owned.T[:, :, None]).transpose(1, 2) @ off
        belief = scatter.sum(0) / n + floor
        wide = (scatter + settings.mixture_prior * belief) / (mass + settings.mixture_prior)[:, None, None]
        scales = torch.linalg.cholesky(wide + floor)
        spend(4.0 * k * n * dims * dims + k * dims**3)
        logs = (mass / n).log() + _log_densities(off, scales).T
        owned = logs.softmax(1)
        likelihood = float(logs.logsumexp(1).mean())
        if likelihood - before < _TOLERANCE:
            break
        before = likelihood
    return mass / mass.sum(), centers, scales, used


def _log_densities(off: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """log N(x; center, L L^T) for differences (k, n, d) and factors (k, d, d)."""
    white = torch.linalg.solve_triangular(scales, off.transpose(1, 2), upper=False)  # (k, d, n)
    logdet = scales.diagonal(dim1=1, dim2=2).log().sum(1)
    found: torch.Tensor = -0.5 * (white.square().sum(1) + off.shape[2] * math.log(2 * math.pi)) - logdet[:, None]
    return found
