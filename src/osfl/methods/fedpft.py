"""FedPFT — each client sends Gaussian mixtures of its features, one a class; the server samples them and trains a linear head.

Paper: Beitollahi et al., "Parametric Feature Transfer: One-shot Federated Learning with Foundation Models", 2024. Mixtures
have K components with diagonal (or spherical, or full) covariances and travel as 16-bit floats: (2d + 1) K 2 bytes a class.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from osfl.core.errors import RoundError
from osfl.core.method import Context, Phase
from osfl.core.types import ClientId, Contract, Exposed, Field, Payload, Probed, Release, Shard, Upload
from osfl.ingredients.statistics.claimed_counts import drawn_for
from osfl.ingredients.statistics.class_counts import facts_without, reported_counts
from osfl.ingredients.statistics.gaussians import (
    FLOOR,
    FeatureMixture,
    Shape,
    components_for,
    fit_mixture,
    fit_supported,
    packed,
    unpacked,
)
from osfl.ingredients.statistics.private_gaussians import private_facts
from osfl.ingredients.statistics.site_prior import OneClassifier, SitePrior, corrected, with_class_shares
from osfl.ingredients.tokens.bounded import BoundedTokenMethod, Bounding
from osfl.ingredients.tokens.encoding import Encoding, OnTokens, Pooled, Pooling, pooled, same_encoder, with_enough
from osfl.ingredients.tokens.training import linear_head
from osfl.ingredients.training.local import not_positive, too_low
from osfl.ingredients.training.one_upload import working_on
from osfl.models.naming import load_named, named
from osfl.runtime.devices import exact
from osfl.runtime.near_copies import without_near_copies

LEAST_SPREAD = 5e-8  # the smallest 16-bit float above zero is larger
PIECE_BYTES = 128 << 20  # of one float64 table while features are drawn


@dataclass(frozen=True)
class Settings(SitePrior, Encoding, Bounding):
    resolution: int = 224  # R; the paper takes one vector an image
    tokens: Pooling = "global"  # of several views: the whole image's vector, their mean, or all side by side
    components: int = 20  # K, Gaussians a class; fewer for classes with few images
    least: int = 3  # images that a class and a component rest on; smaller classes are not sent
    shape: Shape = "diag"  # of the covariances
    tolerance: float = 1e-12  # EM stops when the mean log-likelihood changes by less
    iterations: int = 1000  # of EM, at most
    samples: float = 1.0  # synthetic features for each real one
    epochs: int = 50  # of the head
    batch_size: int = 128  # features a step of the head
    optimizer: Literal["sgd", "adamw"] = "sgd"  # of the head
    lr: float = 0.01  # the head's learning rate
    standardize: bool = False  # train the head on standardized features (folded into its weights afterwards)


PROBED = 32  # features of a class that are compared with other sites'


class FedPFT(OneClassifier, BoundedTokenMethod):
    Settings = Settings
    NEEDS = ("samples", "class_counts")
    PRIVATE = {"dimensions": 64}  # noqa: RUF012
    PRESETS = {  # noqa: RUF012
        "paper": {},
        "cpu": {
            "encoder": "efficientnet_lite0_320",
            "window": 112,
            "resolution": 224,
            "stride": 112,
            "tokens": "concat",
            "tolerance": 1e-3,
            "iterations": 200,
            "standardize": True,
        },
        "smoke": {
            "encoder": "random",
            "window": 8,
            "resolution": 8,
            "stride": 8,
            "components": 2,
            "tolerance": 1e-3,
            "iterations": 20,
            "epochs": 3,
            "standardize": True,
        },
    }
    DEVIATIONS = (
        "classes with few images get fewer components; the public code drops them",
        "every component rests on at least `least` images, near-copies count as one, and classes with fewer are not sent",
        "full covariances have principal directions that rest on ten images each, and are drawn to the one within components",
        f"variances are at least {FLOOR}: smaller ones are zero as 16-bit floats",
        "the head's learning rate falls by a cosine",
        "all methods here share FALCON's encoder",
    )

    def problems(self, clients: int) -> list[str]:
        s = self.settings
        found = too_low(s, {"components": 1, "least": 1, "iterations": 1, "epochs": 1, "batch_size": 1, "tolerance": 0})
        return [*super().problems(clients), *found, *not_positive(s, "lr", "samples")]

    def width(self) -> int:
        """d of a feature vector."""
        s = self.settings
        return self.shape()[1] if s.dimensions else int(s.width(s.tokens))

    def contract(self, architecture: str) -> Contract:
        d = self.width()
        sizes: dict[str, tuple[int | str, ...]] = {
            "diag": ("k{}", d),
            "spherical": ("k{}",),
            "full": ("k{}", d * (d + 1) // 2),
        }
        found: dict[str, Field] = {}
        for c in range(len(self.task.classes)):
            spread = tuple(side.format(c) if isinstance(side, str) else side for side in sizes[self.settings.shape])
            together: dict[str, Any] = {"required": False, "group": f"class-{c}"}
            least = None if self.settings.shape == "full" else LEAST_SPREAD  # a full one has its variances among covariances
            found[f"class-{c}/weights"] = Field("F16", (f"k{c}",), low=0.0, positive_sum=True, **together)
            found[f"class-{c}/means"] = Field("F16", (f"k{c}", d), **together)
            found[f"class-{c}/spread"] = Field("F16", spread, low=least, **together)
        return found

    def client_phase(self, shard: Shard, ctx: Context) -> Payload:
        if ctx.plan.privacy is not None:
            return self._private_gaussians(shard, ctx)
        s, shard = self.settings, with_enough(shard, self.settings.least)
        x, y = self._vectors(self.encoded(shard.train, shard, ctx)).to(exact(ctx.device)), shard.train.labels

        parts = [x[y == c] for c in range(len(self.task.classes))]
        different = [part[without_near_copies(part).to(part.device)] for part in parts]  # near-copies count as one image
        shard = with_enough(shard, s.least, torch.tensor([len(part) for part in different]))

        def fitted(c: int) -> dict[str, torch.Tensor]:
            mine = different[c]
            k, rng = components_for(len(mine), s.components), ctx.generator("mixture", shard.client, c)
            em: dict[str, Any] = {"least": s.least, "tolerance": s.tolerance, "iterations": s.iterations}
            found = fit_supported(mine, k, rng, **em) if s.shape == "full" else fit_mixture(mine, k, s.shape, rng, **em)
            spread = packed(found.spread) if s.shape == "full" else found.spread
            return {f"class-{c}/weights": found.weights, f"class-{c}/means": found.means, f"class-{c}/spread": spread}

        tensors = {
            name: value.half().cpu() for c in sorted(set(shard.train.labels.tolist())) for name, value in fitted(c).items()
        }
        return Payload(tensors, self.facts(shard))

    def _private_gaussians(self, shard: Shard, ctx: Context) -> Payload:
        """One Gaussian a class from noisy sums; all classes of the site share its covariance, of the shape that is set."""
        found, tensors = self.site_gaussians(shard, ctx), dict[str, torch.Tensor]()
        variances = found.covariance.diagonal()
        spread = {"full": packed(found.covariance), "diag": variances, "spherical": variances.mean()}[self.settings.shape]
        for c in found.held:
            one = {"weights": torch.ones(1), "means": found.means[c][None], "spread": spread[None]}
            most = torch.finfo(torch.float16).max  # much noise is more than the wire's numbers hold
            tensors |= {f"class-{c}/{name}": value.clamp(-most, most).half().cpu() for name, value in one.items()}
        return Payload(tensors, {"encoder": self.tokenizer().digest, **private_facts(found, ctx.plan)})

    def _vectors(self, tokens: torch.Tensor) -> torch.Tensor:
        """One vector an image."""
        return tokens[:, 0] if self.settings.dimensions else pooled(tokens, self.settings.tokens)

    def exposed(self, payload: Payload, shard: Shard, ctx: Context) -> Iterator[Exposed]:
        """The components of each class, features drawn from them and, of full covariances, as many principal directions as
        the class' images span, beside the features of the site's images."""
        features, counts = self.features_of(shard, ctx), reported_counts(payload.facts, shard.client)
        for c in range(len(self.task.classes)):
            if f"class-{c}/weights" in payload.tensors:
                mixture = self.mixture(payload, c)
                drawn = mixture.sample(64, ctx.generator("egress check", shard.client, c))
                full = self.settings.shape == "full"
                mean, directions = mixture.directions(counts[c] - 1) if full else (None, None)
                yield Exposed(c, {"component": mixture.means, "sample": drawn}, *features(c), mean, directions)

    def work(self, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
        return (1, images, images * self.settings.epochs) if phase == "server" else (1, images)

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        same_encoder(uploads, self.settings)
        x, y = self.tokens(uploads, ctx)
        s = self.settings
        head = linear_head(
            x,
            y,
            len(self.task.classes),
            ctx.generator("head"),
            epochs=s.epochs,
            batch_size=s.batch_size,
            optimizer=s.optimizer,
            lr=s.lr,
            standardize=s.standardize,
            device=ctx.device,
            progress=lambda done, total: ctx.progress("head", done, total),
        )
        release = Release(Payload({**named(head, "head"), **self.map_tensors(ctx)}))
        return with_class_shares(release, uploads, s, ctx.plan.limits.share)

    def tokens(self, uploads: Sequence[Upload], ctx: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """Synthetic features (n, d) of all clients, and their labels."""
        uploads = sorted(uploads, key=lambda upload: upload.client)
        each = 4 * self.width()
        wanted = drawn_for([self._wanted(upload) for upload in uploads], each, ctx.plan.limits)
        drawn = [self._drawn(upload, row, ctx) for upload, row in zip(uploads, wanted, strict=True)]
        if not any(features for features, _ in drawn):
            raise RoundError(
                "no upload holds a mixture of a class that its client has",
                field="class_counts",
                fix="Check the sites' data with `osfl check`; a mixture needs an image.",
            )
        features, labels = (torch.cat([part for pair in drawn for part in pair[which]]) for which in (0, 1))
        return features, labels

    def encode(self, images: torch.Tensor, ctx: Context) -> torch.Tensor:
        return self._vectors(super().encode(images, ctx))

    def _wanted(self, upload: Upload) -> list[int]:
        """So many features of each class its client asks for, by what it claims to have."""
        counts = reported_counts(upload.payload.facts, upload.client)
        return [
            max(1, round(n * self.settings.samples)) if n and f"class-{c}/weights" in upload.payload.tensors else 0
            for c, n in enumerate(counts)
        ]

    def _drawn(self, upload: Upload, wanted: Sequence[int], ctx: Context) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Synthetic features of one client, class by class; each cell has its own seed, so that it can be forgotten."""
        features, labels = [], []
        for c, n in enumerate(wanted):
            if n:
                with working_on(upload.client):
                    mixture = self.mixture(upload.payload, c)
                    features.append(_in_pieces(mixture, n, ctx.generator("sample", upload.client, c)))
                labels.append(torch.full((n,), c))
        return features, labels

    def probed(self, upload: Upload, ctx: Context) -> Probed:
        """A few features of each class, drawn from its mixtures."""
        few = [min(PROBED, n) for n in self._wanted(upload)]
        features, labels = self._drawn(upload, few, ctx)
        counts = tuple(reported_counts(upload.payload.facts, upload.client))
        return Probed(counts, None, torch.cat(features), torch.cat(labels)) if features else Probed(counts)

    def mixture(self, payload: Payload, label: int) -> FeatureMixture:
        weights, means, spread = (payload.tensors[f"class-{label}/{what}"].double() for what in ("weights", "means", "spread"))
        variances = unpacked(spread).diagonal(dim1=1, dim2=2) if self.settings.shape == "full" else spread
        if not (bool((weights >= 0).all()) and float(weights.sum()) > 0 and bool((variances > 0).all())):
            raise RoundError(
                "this is no mixture of Gaussians",
                field=f"class-{label}",
                got="other weights or variances",
                expected="positive ones",
                fix="Ask the site to train again, or leave it out.",
            )
        return FeatureMixture(weights, means, unpacked(spread) if self.settings.shape == "full" else spread)

    def without_class(self, payload: Payload, label: int) -> Payload:
        """The same upload had its client no image of the class."""
        kept = {name: value for name, value in payload.tensors.items() if not name.startswith(f"class-{label}/")}
        return Payload(kept, facts_without(payload.facts, label))

    def build(self, payload: Payload) -> nn.Module:
        head = nn.Linear(self.width(), len(self.task.classes))
        load_named(head, payload.tensors, "head")
        pooling = "global" if self.settings.dimensions else self.settings.tokens  # a bounded vector is the only token
        return corrected(OnTokens(self.tokenizer(), self.seeing(Pooled(head, pooling), payload)).eval(), payload)


def _in_pieces(mixture: FeatureMixture, count: int, rng: torch.Generator) -> torch.Tensor:
    """So many features in float32, (count, d); drawing takes several float64 tables of one piece, never of them all."""
    rows = max(1, PIECE_BYTES // (8 * mixture.means.shape[1]))
    sizes = [min(rows, count - start) for start in range(0, count, rows)]
    return torch.cat([mixture.sample(size, rng).float() for size in sizes])
