"""FedCGS — each client sends sums of its features; the server adds them up and has a Gaussian classifier, without training.

Paper: Guan et al., "Capture Global Feature Statistics for One-Shot Federated Learning", AAAI 2025. A client sends
A_c = sum of x over class c, B = sum of x x^T and n_c of a frozen encoder's features; the head is w_c = S^-1 mu_c,
b_c = -mu_c^T S^-1 mu_c / 2 + ln(n_c / N) (`linear_classifier`). The sums do not depend on who holds what, so neither does the
classifier. Personalized (`personal`): a client also fits a map of its features, drawn to the global class means.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import RoundError, go_on_without
from osfl.core.method import Context
from osfl.core.types import (
    ADDED,
    ClientId,
    Contract,
    Exposed,
    Facts,
    Field,
    Payload,
    Plan,
    Probed,
    Release,
    Shard,
    Summand,
    Upload,
)
from osfl.ingredients.statistics.claimed_counts import capped, samples_of
from osfl.ingredients.statistics.class_counts import facts_without, reported_counts
from osfl.ingredients.statistics.gaussians import (
    Covariance,
    Statistics,
    linear_classifier,
    packed,
    probed_means,
    statistics,
    summed,
    unpacked,
)
from osfl.ingredients.statistics.one_vs_rest import images_in, log_odds, rows_of, targets
from osfl.ingredients.statistics.shrinkage import gcv_ridge
from osfl.ingredients.statistics.site_prior import OneClassifier, SitePrior, corrected, with_class_shares
from osfl.ingredients.tokens.encoding import (
    Encoding,
    OnTokens,
    Pooled,
    Pooling,
    TokenMethod,
    pooled,
    same_encoders,
    with_enough,
)
from osfl.ingredients.training.local import batches_on, not_positive, step, too_low
from osfl.ingredients.training.one_upload import working_on
from osfl.models.naming import load_named, named
from osfl.runtime.devices import exact


@dataclass(frozen=True)
class Settings(SitePrior, Encoding):
    resolution: int = 224  # R; the paper takes one vector an image
    tokens: Pooling = "global"  # of several views: the whole image's vector, their mean, or all side by side
    covariance: Covariance = "total"  # of all samples (public code), or within classes (linear discriminant analysis)
    ridge: float = 1e-4  # on the covariance's diagonal, times its mean variance; the public code has none and may be singular
    shrinkage: Literal["ridge", "gcv"] = field(default="ridge", metadata=ADDED)  # gcv: chosen by cross-validation, not `ridge`
    least: int = 3  # images that a class needs to be in the sums; the sum over one image is that image's features
    by_class: bool = False  # send B class by class: then a class can be forgotten, and the upload grows with the classes
    precision: Literal["float32", "float64"] = "float32"  # on the wire; sums are taken in float64
    personal: bool = False  # fit a map of the features at each client, after the round
    personal_epochs: int = 30  # passes over the client's features, to fit that map
    personal_lr: float = 1e-4  # learning rate of that map
    bound: float = field(default=64.0, metadata=ADDED)  # with a secure sum: no feature may be further from zero
    alignment: float = 1.0  # weight of the distance between mapped features and the global mean of their class


CHECKED = 512  # features whose second moments are looked at


class FedCGS(OneClassifier, TokenMethod):
    Settings = Settings
    TASKS = ("multiclass", "multilabel")
    NEEDS = ("samples", "class_counts")
    COMMON = ("encoder",)
    PRESETS = {  # noqa: RUF012
        "paper": {},
        "cpu": {
            "encoder": "efficientnet_lite0_320",
            "window": 112,
            "resolution": 224,
            "stride": 112,
            "tokens": "concat",
            "precision": "float64",
            "covariance": "within",
            "shrinkage": "gcv",
        },
        "smoke": {"encoder": "random", "window": 8, "resolution": 8, "stride": 8},
    }
    DEVIATIONS = (
        "a ridge keeps the covariance invertible",
        "classes with fewer than `least` images are in no sum",
        "all methods here share FALCON's encoder",
    )

    def problems(self, clients: int) -> list[str]:
        found = too_low(self.settings, {"ridge": 0, "personal_epochs": 0, "alignment": 0, "least": 1})
        if self.settings.personal and self.settings.personalize == "prior":
            found.append("setting 'personal': a map fitted to a site's images has its prior already; set personalize=none")
        if self.task.several:
            found += [
                f"setting {name!r}: it is for one class an image; multi-label data needs {name}=false"
                for name in ("personal", "by_class")
                if getattr(self.settings, name)
            ]
        return [*super().problems(clients), *found, *not_positive(self.settings, "personal_lr", "bound")]

    def privacy_problems(self, plan: Plan) -> list[str]:
        return ["privacy: fedcgs' sums are floating point, to which no noise is added; use onesum with features=encoder"]

    def width(self) -> int:
        """d of what is summed."""
        return int(self.settings.width(self.settings.tokens))

    def contract(self, architecture: str) -> Contract:
        d, classes = self.width(), len(self.task.classes)
        kind = "F64" if self.settings.precision == "float64" else "F32"
        triangle = (d * (d + 1) // 2,)
        gram = {f"class-{c}/gram": Field(kind, triangle, required=False, choice="gram") for c in range(classes)}
        return {
            "sums": Field(kind, (rows_of(self.task), d)),
            **(gram if self.settings.by_class else {"gram": Field(kind, triangle)}),
        }

    def client_phase(self, shard: Shard, ctx: Context) -> Payload:
        shard = with_enough(shard, self.settings.least)
        x, y = self._features(self.encoded(shard.train, shard, ctx)).to(exact(ctx.device)), targets(shard.train.labels)
        classes = rows_of(self.task)
        kind = torch.float64 if self.settings.precision == "float64" else torch.float32
        if self.settings.by_class:
            found = {c: statistics(x[y == c], y[y == c], classes) for c in sorted(set(y.tolist()))}
            tensors = {f"class-{c}/gram": packed(one.gram).to(kind) for c, one in found.items()}
            total = summed(found.values())
        else:
            total = statistics(x, y, classes)
            tensors = {"gram": packed(total.gram).to(kind)}
        return Payload({"sums": total.sums.to(kind), **tensors}, self.facts(shard))

    def exposed(self, payload: Payload, shard: Shard, ctx: Context) -> Iterator[Exposed]:
        """The mean features of each class and the span of the matrix B, beside the features of the site's images."""
        features, counts = self.features_of(shard, ctx), reported_counts(payload.facts, shard.client)
        moments = {name: partial(unpacked, gram) for name, gram in payload.tensors.items() if name.endswith("gram")}
        for c, count in enumerate(counts):
            if count:
                whole = moments.get("gram")
                yield Exposed(
                    c,
                    {"mean": payload.tensors["sums"][c : c + 1].float() / count},
                    *features(c),
                    moments=whole or moments.get(f"class-{c}/gram"),
                    summed=int(payload.facts["samples"]) if whole else count,
                )

    def cautions(self, payload: Payload, plan: Plan) -> Sequence[str]:
        """Sums over fewer images than features have the span of their features."""
        if plan.secure_sum:
            return ()
        counts = self._counts(Upload("", "", payload))
        summed = counts[: len(self.task.classes)] if self.settings.by_class else images_in(counts, self.task)[None]
        few, of = min(filter(None, summed.tolist()), default=0), " of a class" if self.settings.by_class else ""
        if not 0 < few < self.width():
            return ()
        return (
            f"{few:,.0f} images{of} are fewer than {self.width():,} features: their sums have the span of their features, so "
            "whoever has the features of an image can tell whether it is among them. A plan with secure_sum = true keeps the "
            "sums of a site from the reader; method onesum with features=encoder and [privacy] hides an image in them.",
        )

    def upload_model(self, upload: Upload, ctx: Context) -> nn.Module:
        return self.build(self.server_phase([upload], ctx).shared)

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        """Sums are added one upload at a time, and only the total is unfolded: memory does not grow with the clients."""
        facts: dict[ClientId, Facts] = {}
        claims = [int(images_in(self._counts(upload), self.task)) for upload in uploads]
        believed = capped(torch.tensor(claims, dtype=torch.float64), ctx.plan.limits.share).tolist()

        def each() -> Iterator[Statistics]:
            for upload, factor in zip(uploads, [b / c for b, c in zip(believed, claims, strict=True)], strict=True):
                facts[upload.client] = upload.payload.facts
                yield self._statistics(upload) * factor  # a site's whole term: its means stay

        total = summed(each())
        same_encoders(facts, self.settings)
        total = replace(total, gram=unpacked(total.gram))
        weight, bias = self._classifier(total)
        head = {"head/weight": weight.float(), "head/bias": bias.float()}
        means = total.means().float()
        release = Release(Payload({**head, **({"means": means} if self.settings.personal else {})}))
        return with_class_shares(release, uploads, self.settings, ctx.plan.limits.share)

    def _classifier(self, total: Statistics) -> tuple[torch.Tensor, torch.Tensor]:
        s, chosen = self.settings, self.settings.shrinkage == "gcv"
        if self.task.several:
            return log_odds(total, None if chosen else s.ridge)[:2]
        return linear_classifier(total, s.covariance, gcv_ridge(total, s.covariance) if chosen else s.ridge)

    def _counts(self, upload: Upload) -> torch.Tensor:
        """Images of each row of the sums."""
        counts = reported_counts(upload.payload.facts, upload.client)
        all_images = [samples_of(upload)] if self.task.several else []
        return torch.tensor([*counts, *all_images], dtype=torch.float64)

    def _statistics(self, upload: Upload) -> Statistics:
        """The statistics of an upload; B stays folded, as it was sent."""
        payload = upload.payload
        with working_on(upload.client):
            grams = [value for name, value in payload.tensors.items() if name.endswith("gram")]
            gram = torch.stack([value.double() for value in grams]).sum(0)
            return Statistics(payload.tensors["sums"].double(), gram, self._counts(upload))

    def probed(self, upload: Upload, ctx: Context) -> Probed:
        """The class means."""
        return probed_means(self._statistics(upload))

    def check_upload(self, upload: Upload, ctx: Context) -> None:
        """B - sum_c A_c A_c^T / n_c is positive semidefinite, as sums over images are; up to what the wire rounds."""
        if self.task.kind == "multilabel":  # an image of two classes is in two sums
            return
        term = self._statistics(upload)
        some = torch.randperm(self.width(), generator=ctx.generator("scatter"))[:CHECKED].sort().values  # memory and minutes
        scatter = unpacked(term.gram)[some][:, some] - term.means()[:, some].T @ term.sums[:, some]
        slack = (1e-9 if self.settings.precision == "float64" else 1e-4) * float(term.gram.abs().max())
        if int(torch.linalg.cholesky_ex(scatter + (slack + 1e-12) * torch.eye(len(scatter), dtype=torch.float64)).info):
            raise RoundError(
                "its second moments are not those of any images with its class sums and counts",
                client=upload.client,
                field="gram",
                expected="a positive semidefinite scatter within classes",
                fix=go_on_without(upload.client),
            )

    def summands(self, plan: Plan) -> dict[str, Summand]:
        """The contract's tensors, and the counts that are facts of an open upload."""
        images, most = plan.limits.samples, self.settings.bound
        named = {name: images * (most if name == "sums" else most**2) for name in self.contract("")}
        counts = Summand((rows_of(self.task),), images, whole=True)
        shapes = {name: tuple(map(int, one.shape)) for name, one in self.contract("").items()}
        return {"counts": counts, **{name: Summand(shapes[name], bound) for name, bound in named.items()}}

    def to_sum(self, payload: Payload) -> dict[str, torch.Tensor]:
        counts = [*payload.facts["class_counts"], payload.facts["samples"]][: rows_of(self.task)]
        return {**payload.tensors, "counts": torch.tensor(counts, dtype=torch.int64)}

    def from_sum(self, total: Payload, sites: int) -> Payload:
        tensors = dict(total.tensors)
        counts = tensors.pop("counts")
        by_class, samples = counts[: len(self.task.classes)].tolist(), int(images_in(counts, self.task))
        return Payload(tensors, {**total.facts, "class_counts": by_class, "samples": samples})

    def without_class(self, payload: Payload, label: int) -> Payload:
        """The same upload had its client no image of the class; possible where B was sent class by class."""
        sums = payload.tensors["sums"].clone()
        sums[label] = 0
        kept = {name: value for name, value in payload.tensors.items() if name != f"class-{label}/gram"}
        return Payload({**kept, "sums": sums}, facts_without(payload.facts, label))

    @property
    def inseparable(self) -> str:
        """What has seen a class and stays when it is forgotten."""
        text = "models that clients fit at home go on learning the class from their own images"
        return text if self.settings.personal else ""

    def separable(self) -> bool:
        """Whether one class can be taken out of an upload."""
        return bool(self.settings.by_class)

    def personalize(self, release: Release, shard: Shard, ctx: Context) -> Payload:
        """A residual map of the features that starts as nothing, fitted with CE and drawn to the global class means."""
        if not self.settings.personal:
            return super().personalize(release, shard, ctx)
        head, s = _Mapped(self._linear(release.shared)), self.settings
        x, y, means = self._features(self.encoded(shard.train, shard, ctx)), shard.train.labels, release.shared.tensors["means"]
        head, x, y, means = head.to(ctx.device), x.to(ctx.device), y.to(ctx.device), means.to(ctx.device)
        scale = x.var(0).mean().clamp_min(1e-12)  # so that one alignment weight serves any encoder
        optimizer, rng = torch.optim.Adam(head.parameters(), s.personal_lr), ctx.generator("personal", shard.client)
        for _ in range(s.personal_epochs):
            for index in batches_on(ctx.device, len(x), 64, rng):
                mapped = head.mapped(x[index])
                loss = functional.cross_entropy(head.linear(mapped), y[index])
                loss = loss + s.alignment * (mapped - means[y[index]]).square().mean() / scale
                step(head, optimizer, loss)
        return Payload({**named(head.linear, "head"), **named(head.map, "map")})

    def needs_images_after_round(self) -> bool:
        return bool(self.settings.personal) or super().needs_images_after_round()

    def build(self, payload: Payload) -> nn.Module:
        head: nn.Module = self._linear(payload)
        if "map/weight" in payload.tensors:
            assert isinstance(head, nn.Linear)
            head = _Mapped(head)
            load_named(head.map, payload.tensors, "map")
        return corrected(OnTokens(self.tokenizer(), Pooled(head, self.settings.tokens)).eval(), payload)

    def encode(self, images: torch.Tensor, ctx: Context) -> torch.Tensor:
        return self._features(super().encode(images, ctx))

    def _linear(self, payload: Payload) -> nn.Linear:
        linear = nn.Linear(self.width(), len(self.task.classes))
        load_named(linear, payload.tensors, "head")
        return linear

    def _features(self, tokens: torch.Tensor) -> torch.Tensor:
        return pooled(tokens, self.settings.tokens)


class _Mapped(nn.Module):
    """A linear classifier behind a residual map that starts as nothing."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.map = nn.Linear(linear.in_features, linear.in_features, bias=False)
        self.linear = linear
        nn.init.zeros_(self.map.weight)

    def mapped(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.map(x)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.mapped(x))
        return y
