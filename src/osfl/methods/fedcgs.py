"""FedCGS — each client sends sums of its features; the server adds them up and has a Gaussian classifier, without training.

Paper: Guan et al., "Capture Global Feature Statistics for One-Shot Federated Learning", AAAI 2025. A client sends
A_c = sum of x over class c, B = sum of x x^T and n_c of a frozen encoder's features; the head is w_c = S^-1 mu_c,
b_c = -mu_c^T S^-1 mu_c / 2 + ln(n_c / N) (`linear_classifier`). The sums do not depend on who holds what, so neither does the
classifier. With `dimensions` sums are whole numbers of features of bounded norm, to which noise can be added ([privacy]).
Personalized (`personal`): a client also fits a map of its features, drawn to the global class means.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import RoundError, TrainingError, go_on_without
from osfl.core.method import Context, Phase
from osfl.core.types import (
    ADDED,
    ClientId,
    Contract,
    Exposed,
    Facts,
    Field,
    Json,
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
    NEVER,
    Covariance,
    Statistics,
    folded_statistics,
    linear_classifier,
    packed,
    positive_semidefinite,
    probed_means,
    solved,
    statistics,
    summed,
    unpacked,
)
from osfl.ingredients.statistics.one_vs_rest import images_in, log_odds, rows_of, targets
from osfl.ingredients.statistics.private_sums import (
    Noise,
    check_bounds,
    check_claims,
    check_countable,
    check_noise,
    check_shares,
    every_image,
    in_features,
    largest,
    noise_problems,
    noised,
    noisy_gaussians,
    site_noise,
    sites_in,
    statement,
    with_headroom,
)
from osfl.ingredients.statistics.public_map import LEVELS, Projected, nobodys, public_map
from osfl.ingredients.statistics.robust_sums import geometric_total
from osfl.ingredients.statistics.shrinkage import gcv_ridge
from osfl.ingredients.statistics.site_prior import OneClassifier, SitePrior, corrected, with_class_shares
from osfl.ingredients.statistics.support import (
    exposed_beyond_classes,
    of_no_class,
    rows_that_show,
    shown_by_class,
    stops_for,
    too_few_in_open_sums,
)
from osfl.ingredients.tokens.encoding import (
    Encoding,
    OnTokens,
    Pooled,
    Pooling,
    TokenMethod,
    pooled,
    same_encoders,
    tokens_digest,
    with_enough,
)
from osfl.ingredients.training.local import batches, not_positive, step, too_low
from osfl.ingredients.training.one_upload import working_on
from osfl.models.naming import load_named, named
from osfl.runtime.devices import ahead, exact


@dataclass(frozen=True)
class Settings(SitePrior, Encoding):
    resolution: int = 224  # R; the paper takes one vector an image
    tokens: Pooling = "global"  # of several views: the whole image's vector, their mean, or all side by side
    covariance: Covariance = "total"  # of all samples (public code), or within classes (linear discriminant analysis)
    ridge: float = 1e-4  # on the covariance's diagonal, times its mean variance; the public code has none and may be singular
    shrinkage: Literal["ridge", "gcv"] = field(default="ridge", metadata=ADDED)  # gcv: chosen by cross-validation, not `ridge`
    least: int = 3  # images that a class needs to be in the sums; the sum over one image is that image's features
    # A real upload out of whose sums the features of single images can be read: stop it, or send it all the same
    readable: Literal["stop", "send"] = field(default="stop", metadata=ADDED)
    by_class: bool = False  # send B class by class: then a class can be forgotten, and the upload grows with the classes
    precision: Literal["float32", "float64"] = "float32"  # on the wire; sums are taken in float64
    personal: bool = False  # fit a map of the features at each client, after the round
    personal_epochs: int = 30  # passes over the client's features, to fit that map
    personal_lr: float = 1e-4  # learning rate of that map
    bound: float = field(default=64.0, metadata=ADDED)  # with a secure sum: no feature may be further from zero
    alignment: float = 1.0  # weight of the distance between mapped features and the global mean of their class
    dimensions: int = field(default=0, metadata=ADDED)  # at most so many, whitened by public images; 0: features as they are
    norm: float = field(default=0.125, metadata=ADDED)  # of `dimensions`: longer features are shortened; public images have 1


CHECKED = 512  # features whose second moments are looked at
MOST_IMAGES = 2**53 // LEVELS**2  # of a site, whose sums in whole numbers are exact


class FedCGS(OneClassifier, TokenMethod):
    Settings = Settings
    TASKS = ("multiclass", "multilabel")
    NEEDS = ("samples", "class_counts")
    COMMON = ("encoder", "noise")
    PRIVATE = {"dimensions": 256, "covariance": "within"}  # noqa: RUF012
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
        found = too_low(self.settings, {"ridge": 0, "personal_epochs": 0, "alignment": 0, "least": 1, "dimensions": 0})
        if self.settings.personal and self.settings.personalize == "prior":
            found.append("setting 'personal': a map fitted to a site's images has its prior already; set personalize=none")
        if self.task.several:
            found += [
                f"setting {name!r}: it is for one class an image; multi-label data needs {name}=false"
                for name in ("personal", "by_class")
                if getattr(self.settings, name)
            ]
        if self.settings.dimensions:
            if self.task.several:
                found.append("setting 'dimensions': it is for one class an image; set dimensions=0")
            found += [
                f"setting {name!r}: with dimensions expected {value!r}, got {getattr(self.settings, name)!r}"
                for name, value in (("by_class", False), ("personal", False), ("personalize", "none"))
                if getattr(self.settings, name) != value
            ]
        return [*super().problems(clients), *found, *not_positive(self.settings, "personal_lr", "bound", "norm")]

    def privacy_problems(self, plan: Plan) -> list[str]:
        found = []
        if not self.settings.dimensions:
            found.append("setting 'dimensions': [privacy] needs sums in whole numbers of bounded features; set dimensions=256")
        if self.settings.covariance != "within":
            found.append("setting 'covariance': with [privacy] it is that within classes; set covariance=within")
        return [*found, *noise_problems(plan)]

    def width(self) -> int:
        """d of what is summed."""
        width = int(self.settings.width(self.settings.tokens))
        return min(self.settings.dimensions, width) or width

    def needs(self) -> Sequence[str]:
        return () if self.settings.dimensions else self.NEEDS  # their counts are a tensor, to which noise can be added

    def contract(self, architecture: str) -> Contract:
        d, classes = self.width(), len(self.task.classes)
        kind = "F64" if self.settings.precision == "float64" else "F32"
        triangle = (d * (d + 1) // 2,)
        if self.settings.dimensions:
            return {"counts": Field("I64", (classes,)), "sums": Field("I64", (classes, d)), "gram": Field("I64", triangle)}
        gram = {f"class-{c}/gram": Field(kind, triangle, required=False, choice="gram") for c in range(classes)}
        return {
            "sums": Field(kind, (rows_of(self.task), d)),
            **(gram if self.settings.by_class else {"gram": Field(kind, triangle)}),
        }

    def client_phase(self, shard: Shard, ctx: Context) -> Payload:
        if self.settings.dimensions:
            return self._whole_sums(shard, ctx)
        shard = with_enough(shard, self.settings.least)
        x, y = self._features(self.encoded(shard.train, shard, ctx), ctx).to(exact(ctx.device)), targets(shard.train.labels)
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

    def _whole_sums(self, shard: Shard, ctx: Context) -> Payload:
        """Counts, A_c and B in whole steps; with [privacy] of every image of the site, and with noise."""
        private, facts = ctx.plan.privacy is not None, {"encoder": self.tokenizer().digest}
        data = every_image(shard) if private else with_enough(shard, self.settings.least).train
        check_countable(len(data), min(ctx.plan.limits.samples, MOST_IMAGES), shard.client)

        def make() -> Payload:
            whole = (self._features(self.encoded(data, shard, ctx), ctx) / self._step()).round()
            found = folded_statistics(whole, data.labels, len(self.task.classes))
            sums = {"counts": found.counts * LEVELS, "sums": found.sums, "gram": found.gram}
            return Payload({name: value.round().to(torch.int64) for name, value in sums.items()})

        exact = ctx.get_or_compute(
            ["osfl fedcgs exact sums", 1, self._map_key(ctx), private, self.settings.least, shard.digest], make
        )
        if not private:
            return Payload(exact.tensors, facts)
        noise = site_noise(ctx.plan)
        return Payload(noised(exact.tensors, noise), {**facts, "noise": noise.as_json()})

    def exposed(self, payload: Payload, shard: Shard, ctx: Context) -> Iterator[Exposed]:
        """The mean features of each class, rows of the matrix B and its span, beside the features of the site's images."""
        if ctx.plan.privacy is not None:  # noise protects; to look at the images and stop would say something about them
            return
        term, features = self._statistics(Upload(shard.client, "", payload)), self.features_of(shard, ctx)
        means, step, stops = term.means(), self._step(), stops_for(self.settings.readable, ctx.plan)
        moments = {
            name: partial(unpacked, gram.double() * step**2) for name, gram in payload.tensors.items() if name.endswith("gram")
        }
        counts = term.counts[: len(self.task.classes)].tolist()
        parts = {c: features(c) for c, count in enumerate(counts) if count}
        whole, every, seen = moments.get("gram"), features(None), {c: train for c, (train, _) in parts.items()}
        if self.task.several:
            seen[len(counts)] = every[0][of_no_class(shard.train, parts)]
        shown = {} if whole is None else shown_by_class(whole(), seen)
        for c, (train, held_out) in parts.items():
            gram = whole or moments[f"class-{c}/gram"]
            summed = int(images_in(term.counts, self.task) if whole else counts[c])
            yield Exposed(c, {"mean": means[c : c + 1].float()}, train, held_out, moments=gram, summed=summed)
            rows = shown[c] if whole else rows_that_show(gram(), train.double())[0].float()
            yield Exposed(c, {"row of second moments": rows}, train, held_out, stops=stops)
        if self.task.several:
            yield exposed_beyond_classes(term.sums, term.counts, shown[len(counts)], every[0], every[1], stops)

    def too_few(self, payload: Payload, plan: Plan) -> tuple[int, int] | None:
        """With `dimensions` sums are exact and in whole numbers."""
        if not self.settings.dimensions or plan.privacy is not None:
            return None
        images = int(self._counts(Upload("", "", payload)).sum())
        return too_few_in_open_sums(images, self.settings.readable, plan)

    def cautions(self, payload: Payload, plan: Plan) -> Sequence[str]:
        """Sums over fewer images than features have the span of their features."""
        if plan.secure_sum or plan.privacy is not None:
            return ()
        counts = self._counts(Upload("", "", payload))
        summed = counts[: len(self.task.classes)] if self.settings.by_class else images_in(counts, self.task)[None]
        few, of = min(filter(None, summed.tolist()), default=0), " of a class" if self.settings.by_class else ""
        if not 0 < few < self.width():
            return ()
        return (
            f"{few:,.0f} images{of} are fewer than {self.width():,} features: their sums have the span of their features, so "
            "whoever has the features of an image can tell whether it is among them. A plan with secure_sum = true keeps the "
            "sums of a site from the reader; [privacy] hides an image in them.",
        )

    def upload_model(self, upload: Upload, ctx: Context) -> nn.Module | None:
        """What an upload alone says; with a share of the noise the server phase would wait for others. None: noise hides it."""
        if ctx.plan.privacy is not None:
            with contextlib.suppress(TrainingError):
                return self.build(Payload(self._private_model(upload.payload.tensors, 1, ctx)[0]))
            return None
        return self.build(self.server_phase([upload], ctx).shared)

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        """Sums are added one upload at a time, and only the total is unfolded: memory does not grow with the clients."""
        if ctx.plan.privacy is not None:
            return self._private_release(uploads, ctx)
        facts: dict[ClientId, Facts] = {}
        claims = [int(images_in(self._counts(upload), self.task)) for upload in uploads]
        believed = capped(torch.tensor(claims, dtype=torch.float64), ctx.plan.limits.share).tolist()

        def each() -> Iterator[Statistics]:
            for upload, factor in zip(
                uploads, [b / c if c else 0.0 for b, c in zip(believed, claims, strict=True)], strict=True
            ):
                facts[upload.client] = upload.payload.facts
                if self.settings.dimensions:
                    self.check_upload(upload, ctx)
                yield self._statistics(upload) * factor  # a site's whole term: its means stay

        share = ctx.plan.limits.share
        total = geometric_total(list(each()), share) if ctx.plan.judging.combine == "geometric" else summed(each())
        same_encoders(facts, self.settings)
        if not float(total.counts.sum()):
            raise RoundError(
                "the uploads of all sites are sums of no image",
                field="class_counts",
                expected="images of at least one class",
                got=0,
                fix="Ask the sites for uploads of their images.",
            )
        total = replace(total, gram=unpacked(total.gram))
        weight, bias = self._classifier(total)
        head = {"head/weight": weight.float(), "head/bias": bias.float()}
        means = total.means().float()
        release = Release(Payload({**head, **({"means": means} if self.settings.personal else {}), **self._map_tensors(ctx)}))
        return with_class_shares(release, uploads, self.settings, ctx.plan.limits.share)

    def robust(self) -> Sequence[str]:
        """Of sums in which each image is in one class."""
        return () if self.task.several else ("geometric",)

    def _private_release(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        """The classifier of noisy sums. No site's term is scaled down: its part of the noise would go with it."""
        total, sites = dict[str, torch.Tensor](), 0
        for upload in uploads:
            same_encoders({upload.client: upload.payload.facts}, self.settings)
            self.check_upload(upload, ctx)
            sites += sites_in(upload)
            tensors = upload.payload.tensors
            total = {name: tensors[name] + total[name] if total else tensors[name] for name in ("counts", "sums", "gram")}
        check_shares(ctx.plan, sites)
        tensors, shrinkage = self._private_model(total, sites, ctx)
        return Release(Payload(tensors, {"shrinkage": shrinkage, "privacy": statement(ctx.plan, sites)}))

    def _private_model(
        self, total: Mapping[str, torch.Tensor], sites: int, ctx: Context
    ) -> tuple[dict[str, torch.Tensor], float]:
        """Of the noisy sums of so many sites, and what was added on the covariance's diagonal."""
        found = noisy_gaussians(*in_features(total, ctx.plan, self._step(), sites), self.task.classes)
        within = found.within + found.shrinkage * torch.eye(self.width(), dtype=torch.float64)
        weight = solved(within, found.means.T).T
        bias = -weight @ found.mean - 0.5 * (weight * found.means).sum(1) + found.shares.clamp_min(1e-300).log()
        bias = torch.where(found.shares > 0, bias, NEVER)
        head = {"head/weight": weight.float(), "head/bias": bias.float()}
        return {**head, **self._map_tensors(ctx)}, found.shrinkage

    def _classifier(self, total: Statistics) -> tuple[torch.Tensor, torch.Tensor]:
        s, chosen = self.settings, self.settings.shrinkage == "gcv"
        if self.task.several:
            return log_odds(total, None if chosen else s.ridge)[:2]
        return linear_classifier(total, s.covariance, gcv_ridge(total, s.covariance) if chosen else s.ridge)

    def _counts(self, upload: Upload) -> torch.Tensor:
        """Images of each row of the sums."""
        if self.settings.dimensions:
            return upload.payload.tensors["counts"].double() / LEVELS
        counts = reported_counts(upload.payload.facts, upload.client)
        all_images = [samples_of(upload)] if self.task.several else []
        return torch.tensor([*counts, *all_images], dtype=torch.float64)

    def _statistics(self, upload: Upload) -> Statistics:
        """The statistics of an upload; B stays folded, as it was sent."""
        payload, step = upload.payload, self._step()
        with working_on(upload.client):
            grams = [value for name, value in payload.tensors.items() if name.endswith("gram")]
            gram = torch.stack([value.double() for value in grams]).sum(0)
            return Statistics(payload.tensors["sums"].double() * step, gram * step**2, self._counts(upload))

    def probed(self, upload: Upload, ctx: Context) -> Probed:
        """The class means; with noise, nothing but the counts."""
        if ctx.plan.privacy is not None:
            return Probed(tuple(self._counts(upload).clamp_min(0).round().long().tolist()))
        return probed_means(self._statistics(upload))

    def check_upload(self, upload: Upload, ctx: Context) -> None:
        """B - sum_c A_c A_c^T / n_c is positive semidefinite, as sums over images are; up to what the wire rounds."""
        if self.task.kind == "multilabel":  # an image of two classes is in two sums
            return
        if self.settings.dimensions:
            self._check_whole(upload, ctx.plan)
        if ctx.plan.privacy is not None:  # noisy sums need not be those of any images
            return
        term = self._statistics(upload)
        some = torch.randperm(self.width(), generator=ctx.generator("scatter"))[:CHECKED].sort().values  # memory and minutes
        scatter = unpacked(term.gram)[some][:, some] - term.means()[:, some].T @ term.sums[:, some]
        exact = self.settings.precision == "float64" or self.settings.dimensions
        slack = (1e-9 if exact else 1e-4) * float(term.gram.abs().max())
        if not positive_semidefinite(scatter, slack + 1e-12):
            raise RoundError(
                "its second moments are not those of any images with its class sums and counts",
                client=upload.client,
                field="gram",
                expected="a positive semidefinite scatter within classes",
                fix=go_on_without(upload.client),
            )

    def _check_whole(self, upload: Upload, plan: Plan) -> None:
        """Within the plan's limits, and within what images add up to and noise can be."""
        tensors, noise = upload.payload.tensors, Noise(0.0, 0.0, 0.0)
        if plan.privacy is not None:
            check_noise(upload, plan)
            noise = largest(plan, sites_in(upload))
        check_claims(upload, self._counts(upload), plan)
        with working_on(upload.client):
            term = Statistics(tensors["sums"].double(), tensors["gram"].double(), self._counts(upload))
            check_bounds(term, 1, noise, self.task)

    def adds_held_out(self, plan: Plan) -> bool:
        """With noise: which images are held out depends on all others."""
        return plan.privacy is not None

    def summands(self, plan: Plan) -> dict[str, Summand]:
        """The contract's tensors, and the counts that are facts of an open upload."""
        if self.settings.dimensions:
            most = min(plan.limits.samples, MOST_IMAGES) * LEVELS
            whole = {
                name: Summand(tuple(map(int, one.shape)), most * (LEVELS if name == "gram" else 1), whole=True)
                for name, one in self.contract("").items()
            }
            return whole if plan.privacy is None else with_headroom(whole, plan)
        images, most = plan.limits.samples, self.settings.bound
        named = {name: images * (most if name == "sums" else most**2) for name in self.contract("")}
        counts = Summand((rows_of(self.task),), images, whole=True)
        shapes = {name: tuple(map(int, one.shape)) for name, one in self.contract("").items()}
        return {"counts": counts, **{name: Summand(shapes[name], bound) for name, bound in named.items()}}

    def to_sum(self, payload: Payload) -> dict[str, torch.Tensor]:
        if self.settings.dimensions:
            return dict(payload.tensors)
        counts = [*payload.facts["class_counts"], payload.facts["samples"]][: rows_of(self.task)]
        return {**payload.tensors, "counts": torch.tensor(counts, dtype=torch.int64)}

    def from_sum(self, total: Payload, sites: int) -> Payload:
        tensors = dict(total.tensors)
        if self.settings.dimensions:
            return Payload(tensors, {**total.facts, "sites": sites})
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

    def shortened(self) -> Mapping[str, tuple[object, object]]:
        return {"personal_epochs": (1, 2)} if self.settings.personal else {}

    def work(self, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
        return (1, images, images * self.settings.personal_epochs) if phase == "personalize" else (1, images)

    def personalize(self, release: Release, shard: Shard, ctx: Context) -> Payload:
        """A residual map of the features that starts as nothing, fitted with CE and drawn to the global class means."""
        if not self.settings.personal:
            return super().personalize(release, shard, ctx)
        head, s = _Mapped(self._linear(release.shared)), self.settings
        x, y, means = (
            self._features(self.encoded(shard.train, shard, ctx), ctx),
            shard.train.labels,
            release.shared.tensors["means"],
        )
        head, x, y, means = head.to(ctx.device), x.to(ctx.device), y.to(ctx.device), means.to(ctx.device)
        scale = x.var(0).mean().clamp_min(1e-12)  # so that one alignment weight serves any encoder
        optimizer, rng = torch.optim.Adam(head.parameters(), s.personal_lr), ctx.generator("personal", shard.client)
        order = ((index,) for _ in range(s.personal_epochs) for index in batches(len(x), 64, rng))
        for (index,) in ahead(order, ctx.device):
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
        if self.settings.dimensions:
            public = Projected(payload.tensors["public/mean"], payload.tensors["public/basis"], self.settings.norm)
            head = _OfProjected(public, head)
        return corrected(OnTokens(self.tokenizer(), Pooled(head, self.settings.tokens)).eval(), payload)

    def encode(self, images: torch.Tensor, ctx: Context) -> torch.Tensor:
        return self._features(super().encode(images, ctx), ctx)

    def _linear(self, payload: Payload) -> nn.Linear:
        linear = nn.Linear(self.width(), len(self.task.classes))
        load_named(linear, payload.tensors, "head")
        return linear

    def _features(self, tokens: torch.Tensor, ctx: Context) -> torch.Tensor:
        found = pooled(tokens, self.settings.tokens)
        if not self.settings.dimensions:
            return found
        projected: torch.Tensor = Projected(*self._public_map(ctx), self.settings.norm)(found.cpu())
        return projected

    # --- sums in whole numbers -----------------------------------------------------------------------------------------------

    def _step(self) -> float:
        """What a whole number of an upload stands for, in units of the features."""
        return float(self.settings.norm / LEVELS) if self.settings.dimensions else 1.0

    def _map_key(self, ctx: Context) -> Json:
        """Names everything that the features of private rounds depend on besides the images."""
        s = self.settings
        return [tokens_digest(s), s.tokens, self.width(), s.norm, list(self.task.image), ctx.plan.seed, ctx.device.type]

    def _public_map(self, ctx: Context) -> tuple[torch.Tensor, torch.Tensor]:
        def features(images: torch.Tensor) -> torch.Tensor:
            nobody = nobodys(images)
            return pooled(self.encoded(nobody.train, nobody, ctx), self.settings.tokens)

        rng = ctx.generator("fedcgs", "public images")
        make = partial(public_map, self.width(), self.task.image, rng, features)
        made = ctx.get_or_compute(["osfl fedcgs projection", 1, self._map_key(ctx)], make).tensors
        return made["mean"], made["basis"]

    def _map_tensors(self, ctx: Context) -> dict[str, torch.Tensor]:
        return (
            dict(zip(("public/mean", "public/basis"), self._public_map(ctx), strict=True)) if self.settings.dimensions else {}
        )


class _OfProjected(nn.Module):
    """A classifier of features as they were summed."""

    def __init__(self, public: Projected, linear: nn.Module) -> None:
        super().__init__()
        self.public, self.linear = public, linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(self.public(x).float())
        return y


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
