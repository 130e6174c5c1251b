"""FALCON — a frozen encoder turns images into token sequences; each client sends sequences of a generator, and a classifier.

Paper: Liu, Zhang, Wang, Zhu, Luo, "Feature-Aware One-Shot Federated Learning via Hierarchical Token Sequences", 2026,
https://arxiv.org/abs/2601.03882. A client encodes each image as one global and L regional tokens (`views`), fits a
mixture-density transformer p(s0 | y) p(s1..sL | s0, y) (`TokenGenerator`) and a classifier (`AttentionPool`), and sends drawn
sequences, or the generator where that is smaller. The server trains one classifier on all sequences with
(1 - alpha) CE + alpha T^2 KL(mean of the clients' classifiers || student) (`student_loss`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from osfl.core.errors import RoundError, TrainingError, UsageError
from osfl.core.method import Context, Phase
from osfl.core.types import ADDED, ClientId, Contract, Exposed, Field, Json, Payload, Probed, Release, Shard, Upload
from osfl.ingredients.ensembles.ensemble import robust_rules
from osfl.ingredients.statistics.averaging import combined, robust_values
from osfl.ingredients.statistics.claimed_counts import capped, drawn_for, sizes_of
from osfl.ingredients.statistics.class_counts import facts_without, reported_counts, shares
from osfl.ingredients.statistics.private_gaussians import private_facts
from osfl.ingredients.statistics.site_prior import OneClassifier, SitePrior, corrected, with_class_shares
from osfl.ingredients.tokens.bounded import BoundedTokenMethod, Bounding
from osfl.ingredients.tokens.encoding import Encoding, OnTokens, same_encoder, with_enough
from osfl.ingredients.tokens.training import Classifying, classifying_problems, fit_classifier, train_on_tokens
from osfl.ingredients.training.local import not_positive, too_low
from osfl.ingredients.training.one_upload import by_client, check_sane, working_on
from osfl.methods.falcon.distillation import noised, student_loss
from osfl.methods.falcon.generator import draw_sequences, fit_generator
from osfl.methods.falcon.token_space import into_space, standard_space, white_space
from osfl.models.initial import initialize
from osfl.models.naming import contract_of, load_named, named
from osfl.models.token_models import AttentionPool, TokenGenerator

if TYPE_CHECKING:
    from osfl.core.types import Tensors


@dataclass(frozen=True)
class Generating:
    """The clients' generators."""

    order: Literal["mar", "ar", "nar"] = "mar"  # regions given the global token; each given all before; each by itself
    generator_epochs: int = 400  # passes over the client's sequences, at most
    generator_batch: int = 256  # sequences a step
    generator_lr: float = 1e-4  # AdamW, weight decay 1e-4, gradients clipped at 2
    generator_width: int = 0  # 0: the tokens' own
    depth: int = 4  # transformer blocks
    heads: int = 16  # of attention, in each block
    components: int = 20  # K, Gaussians at each position; fewer where a client has few images
    standardize: bool = True  # z-score each dimension with the client's own statistics, undone before upload
    whiten: bool = field(default=False, metadata=ADDED)  # instead: less the mean of their class, covariance divided out
    least: int = 3  # images that a class needs: the generator learns no smaller ones, and nothing is drawn of them
    generator_patience: int = field(default=0, metadata=ADDED)  # epochs without gain on own held-out images; 0: train all


@dataclass(frozen=True)
class Settings(SitePrior, Encoding, Generating, Classifying, Bounding):
    per_image: float = 1.5  # sequences drawn for each real image
    labels: Literal["own", "balanced"] = field(default="own", metadata=ADDED)  # as often as own images; all its classes alike
    temperature_sampling: float = 1.0  # on the mixture's weights
    send: Literal["smaller", "sequences", "generator"] = "smaller"  # whichever takes fewer bytes, or always one
    wire: Literal["float32", "float16"] = "float32"  # of the sequences
    alpha: float = 0.5  # weight of distillation; 0: cross-entropy only
    temperature: float = 4.0  # T
    ensemble: Literal["uniform", "size", "class_count", "relative"] = "uniform"  # how the clients' classifiers are averaged
    init: Literal["random", "average", "mean"] = "random"  # the student's; average: by images; mean: plain, as in public code
    noise_std: float = 0.0  # deviation of noise on every token; the public code adds 1.0
    server: Literal["distil", "average"] = "distil"  # average: one-round FedAvg of the same classifiers, the baseline


PROBED = 16  # sequences of a class that are compared with other sites'
ATTACKED = 256  # sequences of a class that the egress check compares with images


class Falcon(OneClassifier, BoundedTokenMethod):
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
            "generator_epochs": 60,
            "generator_batch": 64,
            "generator_lr": 1e-3,
            "generator_width": 128,
            "depth": 2,
            "heads": 4,
            "components": 5,
            "whiten": True,
            "generator_patience": 3,
            "hidden": 320,
            "wire": "float16",
            "ensemble": "relative",
            "alpha": 0.2,
        },
        "smoke": {
            "encoder": "random",
            "window": 8,
            "resolution": 8,
            "stride": 8,
            "generator_epochs": 2,
            "generator_batch": 32,
            "generator_lr": 1e-3,
            "generator_width": 16,
            "depth": 1,
            "heads": 2,
            "components": 2,
            "epochs": 3,
            "batch_size": 32,
            "hidden": 32,
        },
    }
    DEVIATIONS = (
        "log variances are clamped to [-7, 7] and tokens standardized: the likelihood of few samples is unbounded otherwise",
        "the generator sees the class and copies of the global token; the paper lists the regions among its inputs, where one "
        "could see itself: as in the public code",
        "the generator's loss is the mean over positions (the paper: their sum), and its gradients are clipped at a norm of 2, "
        "both as in the public code",
        "1.5 sequences are drawn for each image unless `per_image` is set: the public code's number, the paper has none",
        "the classifier adds its query to what it finds, as the public code does and the paper's equation does not "
        "(`query_residual=false`), and leaves out hidden units of its feed-forward layer: the paper does not say which",
        "a single token (images no larger than a window) is projected like several; the public code hands it on as it is",
        "a client with few images has fewer components: one for every ten images",
        "generators learn classes with at least `least` images; a sequence of a smaller class would be one of its images",
        "all clients' classifiers begin at the same random weights, and so do their generators (the paper does not say)",
        "the last epoch is used; the public code selects by accuracy on pooled real validation tokens",
    )
    inseparable = "the classifiers that came with the sequences were trained on the class, too"

    def problems(self, clients: int) -> list[str]:
        s = self.settings
        found = too_low(
            s,
            {
                "generator_epochs": 1,
                "depth": 1,
                "heads": 1,
                "components": 1,
                "generator_batch": 2,
                "least": 1,
                "generator_patience": 0,
                "generator_width": 0,
                "noise_std": 0,
            },
        )
        found += not_positive(s, "generator_lr", "per_image", "temperature", "temperature_sampling")
        found += [f"setting 'alpha': expected 0 to 1, got {s.alpha}"] * (not 0 <= s.alpha <= 1)
        found += classifying_problems(s)
        before = [*super().problems(clients), *found]
        width = 0 if before else s.generator_width or self.shape()[1]
        if width % s.heads:
            before.append(f"setting 'heads': {s.heads} do not divide the generator's width {width}")
        return before

    # --- what travels ---

    def contract(self, architecture: str) -> Contract:
        s, (tokens, width) = self.settings, self.shape()
        found = dict(contract_of(self._classifier(None), "classifier"))
        if s.server == "average":
            return found
        # either sequences with their labels, or a whole generator with the space that it works in
        pool: dict[str, Any] = {"required": False, "group": "sequences", "choice": "sequences or generator"}
        maker = {**pool, "group": "generator"}
        found["sequences"] = Field("F16" if s.wire == "float16" else "F32", ("n", tokens, width), **pool)
        found["labels"] = Field("I64", ("n",), below=len(self.task.classes), **pool)
        for name, line in contract_of(self._generator(s.components, None), "generator").items():
            shape = tuple(
                "k" if i == 0 and "weights." in name else "kd" if i == 0 and _per_component(name) else side
                for i, side in enumerate(line.shape)
            )
            found[name] = Field(line.dtype, shape, **maker)
        length = tokens * width
        space = (len(self.task.classes) + length, length) if s.whiten else (2, width)
        found["statistics"] = Field("F32", space, **maker)  # where the generator works
        return found

    def client_phase(self, shard: Shard, ctx: Context) -> Payload:
        if ctx.plan.privacy is not None:
            return self._private(shard, ctx)
        tokens = self.encoded(shard.train, shard, ctx)
        if self.settings.server == "average":
            return Payload(self._local(tokens, shard, ctx), self.facts(shard))
        kept = with_enough(shard, self.settings.least)
        generator = ctx.get_or_compute(
            {**self._key(shard, ctx), "what": "token generator", **_part(self.settings, Generating)},
            lambda: self._generated(self.encoded(kept.train, shard, ctx), kept, ctx),
        )
        facts = self.facts(kept)
        sequences = self._sequences(generator, shard.client, self._wanted(facts["class_counts"]), ctx)
        return Payload({**self._local(tokens, shard, ctx), **self._smaller(generator, sequences)}, facts)

    def _private(self, shard: Shard, ctx: Context) -> Payload:
        """Sequences drawn from Gaussians of noisy sums, in the place of the generator's, and a classifier that learned from
        them alone."""
        found = self.site_gaussians(shard, ctx)
        wanted = {c: n for c, n in enumerate(self._wanted(found.counts)) if n}
        drawn = [found.sample(c, n, ctx.generator("sequences", shard.client, c)) for c, n in wanted.items()]
        x, y = torch.cat(drawn).float()[:, None], torch.tensor(list(wanted)).repeat_interleave(torch.tensor([*wanted.values()]))
        facts = {"encoder": self.tokenizer().digest, **private_facts(found, ctx.plan)}
        model = named(self._fitted(x, y, shard.client, ctx), "classifier")
        return Payload(model if self.settings.server == "average" else {**model, **self._sent(x, y)}, facts)

    def _sent(self, sequences: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        kind = torch.float16 if self.settings.wire == "float16" else torch.float32
        return {"sequences": sequences.to(kind), "labels": labels}

    def _key(self, shard: Shard, ctx: Context) -> dict[str, Json]:
        """What names a client's finished work."""
        bounding = _part(self.settings, Bounding) if self.settings.dimensions else {}
        return {
            "client": shard.client,
            "data": shard.digest,
            "seed": ctx.plan.seed,
            "encoding": {**_part(self.settings, Encoding), **bounding},
            "classes": len(self.task.classes),
            "device": ctx.device.type,
        }

    def _local(self, tokens: torch.Tensor, shard: Shard, ctx: Context) -> Tensors:
        """The client's classifier."""

        def fitted() -> AttentionPool:
            return self._fitted(tokens, shard.train.labels, shard.client, ctx)

        key = {**self._key(shard, ctx), "what": "token classifier", **_part(self.settings, Classifying)}
        return ctx.get_or_compute(key, lambda: Payload(named(fitted(), "classifier"))).tensors

    def _smaller(self, generator: Payload, sequences: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        sizes = [sum(t.numel() * t.element_size() for t in each.values()) for each in (sequences, generator.tensors)]
        wanted = self.settings.send
        send_sequences = wanted == "sequences" or (wanted == "smaller" and sizes[0] <= sizes[1])
        return sequences if send_sequences else dict(generator.tensors)

    def exposed(self, payload: Payload, shard: Shard, ctx: Context) -> Iterator[Exposed]:
        """The sequences of each class, sent or drawn from the generator, beside the tokens of the site's images."""
        if self.settings.server == "average":
            return
        upload = Upload(shard.client, "", payload)
        features, offered = self.features_of(shard, ctx), self._offered(upload)
        pool = self._pool(upload, offered, offered, ctx)
        for c in sorted(set(pool["labels"].tolist())):
            kinds = {"sequence": pool["sequences"][pool["labels"] == c][:ATTACKED].flatten(1)}
            if self.settings.whiten and "statistics" in payload.tensors:
                kinds["mean"] = payload.tensors["statistics"][c : c + 1]
            yield Exposed(c, kinds, *features(c))

    # --- the client's two models ---

    def _classifier(self, rng: torch.Generator | None) -> AttentionPool:
        found: AttentionPool = self.settings.classifier(self.shape()[1], len(self.task.classes), rng)
        return found

    def _fitted(self, tokens: torch.Tensor, labels: torch.Tensor, client: ClientId, ctx: Context) -> AttentionPool:
        """The local classifier, from a start that all clients share."""
        return fit_classifier(
            self.settings,
            tokens,
            labels,
            len(self.task.classes),
            ctx.generator("classifier"),
            ctx.generator("local", client),
            ctx.device,
            lambda done, total: ctx.progress(f"{client} classifier", done, total),
        )

    def _generator(self, components: int, rng: torch.Generator | None) -> TokenGenerator:
        s, (tokens, width) = self.settings, self.shape()
        model = TokenGenerator(
            tokens,
            width,
            len(self.task.classes),
            width=s.generator_width,
            depth=s.depth,
            heads=s.heads,
            components=components,
            order=s.order,
        )
        initialize(model, rng)
        return model

    def _generated(self, tokens: torch.Tensor, shard: Shard, ctx: Context) -> Payload:
        """The client's generator: least negative log-likelihood, mean over positions, AdamW."""
        s, rng, labels = self.settings, ctx.generator("generator", shard.client), shard.train.labels
        space = self._space(tokens, labels)
        held_out = None
        if s.generator_patience and len(shard.val):
            held_out = into_space(self.encoded(shard.val, shard, ctx), shard.val.labels, space), shard.val.labels
        z = into_space(tokens, labels, space)
        model = self._generator(max(1, min(s.components, len(tokens) // 10)), ctx.generator("generator start"))
        try:
            fit_generator(
                model,
                z,
                labels,
                rng,
                epochs=s.generator_epochs,
                batch_size=s.generator_batch,
                lr=s.generator_lr,
                device=ctx.device,
                held_out=held_out,
                patience=s.generator_patience,
                progress=lambda done, total: ctx.progress(f"{shard.client} generator", done, total),
            )
        except TrainingError as error:
            error.client = shard.client
            raise
        return Payload({**named(model, "generator"), "statistics": space})

    def _space(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if self.settings.whiten:
            return white_space(tokens, labels, len(self.task.classes))
        found = standard_space(tokens)
        return found if self.settings.standardize else torch.stack([torch.zeros_like(found[0]), torch.ones_like(found[1])])

    def _wanted(self, counts: Sequence[int]) -> list[int]:
        """So many sequences of each class for so many images; classes that a client lacks get none."""
        had = [c for c, count in enumerate(counts) if count]
        wanted = {c: max(1, round(self.settings.per_image * counts[c])) for c in had}
        if self.settings.labels == "balanced":
            wanted = {c: max(1, n) for c, n in zip(had, shares(sum(wanted.values()), [1] * len(had)), strict=True)}
        return [wanted.get(c, 0) for c in range(len(counts))]

    def _sequences(self, generator: Payload, client: str, wanted: Sequence[int], ctx: Context) -> dict[str, torch.Tensor]:
        """So many drawn sequences of each class, each class with its own seed."""
        components = len(generator.tensors["generator/weights.bias"])
        model = self._generator(components, None)
        load_named(model, {n: t for n, t in generator.tensors.items() if n.startswith("generator/")}, "generator")
        found, labels = draw_sequences(
            model,
            generator.tensors["statistics"],
            {c: n for c, n in enumerate(wanted) if n},
            lambda c: ctx.generator("sequences", client, c),
            self.settings.temperature_sampling,
            ctx.device,
        )
        return self._sent(found, labels)

    # --- the server ---

    def shortened(self) -> Mapping[str, tuple[object, object]]:
        return {**super().shortened(), "generator_epochs": (1, 2)}

    def work(self, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
        """Images encoded, the generator's passes over them (all of them: patience may end it earlier), the classifier's."""
        s = self.settings
        generator = (images * s.generator_epochs,) if phase == "client" else ()
        return (1, images, *((images * s.epochs,) if phase != "personalize" else ()), *generator)

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        same_encoder(uploads, self.settings)
        uploads = by_client(uploads)
        if self.settings.server == "average":
            averaged = Release(Payload({**self._averaged(uploads, ctx), **self.map_tensors(ctx)}))
            return with_class_shares(averaged, uploads, self.settings, ctx.plan.limits.share)
        x, y = self.tokens(uploads, ctx)
        student = self._classifier(ctx.generator("student"))
        if self.settings.init != "random":
            load_named(student, self._averaged(uploads, ctx, alike=self.settings.init == "mean"), "classifier")
        x, y = x.to(ctx.device), y.to(ctx.device)
        teacher, s, rng = self._teacher(uploads, x, ctx), self.settings, ctx.generator("distil")

        def draw(count: int) -> list[torch.Tensor]:
            noise = [noised(torch.zeros(count, *x.shape[1:]), s.noise_std, rng)] if s.noise_std else []
            return [*noise, *student.draw_kept(count, rng)]

        def loss(index: torch.Tensor, *drawn: torch.Tensor) -> torch.Tensor:
            seen, kept = (x[index] + drawn[0], drawn[1:]) if s.noise_std else (x[index], drawn)
            return student_loss(student(seen, *kept), y[index], teacher[index], s.alpha, s.temperature)

        train_on_tokens(
            student, len(x), loss, rng, s, ctx.device, lambda done, total: ctx.progress("classifier", done, total), draw
        )
        release = Release(Payload({**named(student, "classifier"), **self.map_tensors(ctx)}))
        if s.labels == "balanced":  # sequences of all classes alike: there are no shares to divide out
            return release
        return with_class_shares(release, uploads, s, ctx.plan.limits.share)

    def tokens(self, uploads: Sequence[Upload], ctx: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """The sequences (n, 1 + L, d) of all clients and their labels; none where only classifiers travel."""
        if self.settings.server == "average":
            return torch.zeros(0, *self.shape()), torch.zeros(0, dtype=torch.int64)
        uploads = by_client(uploads)
        offered = [self._offered(upload) for upload in uploads]
        if not any(map(any, offered)):
            raise RoundError(
                "no upload holds a sequence",
                field="sequences",
                expected="some of any class",
                got="none",
                fix="Ask a site to train again, in a new round.",
            )
        taken = drawn_for(offered, self._sequence_bytes(), ctx.plan.limits)
        pool = [self._pool(*one, ctx) for one in zip(uploads, offered, taken, strict=True)]
        return torch.cat([part["sequences"].float() for part in pool]), torch.cat([part["labels"] for part in pool])

    def probed(self, upload: Upload, ctx: Context) -> Probed:
        """A few sequences of each class, and the classifier, which answers sequences."""
        counts = tuple(reported_counts(upload.payload.facts, upload.client))
        with working_on(upload.client):
            model = self._classifier(None)
            load_named(model, upload.payload.tensors, "classifier")
            if self.settings.server == "average":
                return Probed(counts)
            few = [min(PROBED, n) for n in self._offered(upload)]
            if not any(few):
                return Probed(counts)
            found = dict(upload.payload.tensors)
            if "sequences" not in found:
                found = self._sequences(upload.payload, upload.client, few, ctx)
            places = torch.cat([(found["labels"] == c).nonzero().flatten()[:n] for c, n in enumerate(few)])
            return Probed(counts, model.eval(), found["sequences"][places].float(), found["labels"][places])

    def _sequence_bytes(self) -> int:
        return 4 * math.prod(self.shape())

    def _offered(self, upload: Upload) -> list[int]:
        """So many sequences of each class a client sent, or asks for by what it claims to have."""
        labels = upload.payload.tensors.get("labels")
        if labels is not None:
            return [int(n) for n in torch.bincount(labels, minlength=len(self.task.classes))]
        return self._wanted(reported_counts(upload.payload.facts, upload.client))

    def _pool(self, upload: Upload, offered: Sequence[int], taken: Sequence[int], ctx: Context) -> dict[str, torch.Tensor]:
        """A client's sequences, as it sent them or drawn here from its generator, which gives the same; where the plan's cap
        asks for fewer or more of a class, so many are taken of them, in turn."""
        tensors = upload.payload.tensors
        found = {name: tensors[name] for name in ("sequences", "labels") if name in tensors}
        with working_on(upload.client):
            if not found:  # all that it asks for where the plan has memory for it, and so the same as if it had sent them
                fits = sum(offered) * self._sequence_bytes() <= ctx.plan.limits.drawn_bytes
                offered = offered if fits else taken
                found = self._sequences(upload.payload, upload.client, offered, ctx)
            if list(offered) != list(taken):
                places = [(found["labels"] == c).nonzero().flatten() for c in range(len(taken))]
                rows = [place[torch.arange(n) % len(place)] for place, n in zip(places, taken, strict=True) if n]
                found = {name: value[torch.cat(rows)] for name, value in found.items()} if rows else found
            check_sane(found["sequences"], "sequences")
        return found

    @torch.no_grad()
    def _teacher(self, uploads: Sequence[Upload], x: torch.Tensor, ctx: Context) -> torch.Tensor:
        """p_T of every sequence, (n, classes): the weighted mean of the clients' softened answers. Asked once.

        `relative`: each output over the client's average output. By Bayes' rule that takes the frequency of its classes
        out; a client with one class, whose output is constant, then has no weight.
        """
        how = self.settings.ensemble
        counts = torch.tensor([reported_counts(upload.payload.facts, upload.client) for upload in uploads], dtype=torch.float32)
        claims = {"size": counts.sum(1, keepdim=True).expand_as(counts), "class_count": counts}.get(
            how, torch.ones_like(counts)
        )
        weights = claims if how == "uniform" else capped(claims, ctx.plan.limits.share)
        weights = weights + 1e-6 if how == "class_count" else weights  # where nobody has a class, all answer alike
        weights = (weights / weights.sum(0)).to(ctx.device)

        def softened() -> Iterator[torch.Tensor]:
            for upload in uploads:
                with working_on(upload.client):
                    model = self._classifier(None)
                    load_named(model, upload.payload.tensors, "classifier")
                    model.to(ctx.device).eval()
                    answers = torch.cat([model(part) for part in torch.split(x, 4096)])
                    check_sane(answers, "classifier")
                chances = (answers / self.settings.temperature).softmax(-1)
                yield chances / chances.mean(0).clamp_min(1e-12) if how == "relative" else chances

        if (rule := ctx.plan.judging.combine) != "mean":
            total = robust_values(torch.stack(list(softened())), weights[:, None], rule)
            return total / total.sum(-1, keepdim=True).clamp_min(1e-12)
        total = torch.zeros(len(x), len(self.task.classes), device=ctx.device)
        for weight, chances in zip(weights, softened(), strict=True):
            total += weight * chances
        return total / total.sum(-1, keepdim=True)

    def robust(self) -> Sequence[str]:
        """For the clients' softened answers, and their averaged classifier."""
        return robust_rules("class_count" if self.settings.ensemble == "class_count" else "probabilities")

    def _averaged(self, uploads: Sequence[Upload], ctx: Context, alike: bool = False) -> dict[str, torch.Tensor]:
        own = ({n: t for n, t in u.payload.tensors.items() if n.startswith("classifier/")} for u in uploads)
        weights = [1.0] * len(uploads) if alike else sizes_of(uploads, ctx.plan.limits.share).tolist()
        return combined(own, weights, ctx.plan.judging.combine)

    def without_class(self, payload: Payload, label: int) -> Payload:
        """The same upload had its client no sequence of the class; the classifier has still seen it (see the card)."""
        if "labels" not in payload.tensors:
            raise UsageError(
                "an upload holds one generator of all its classes, which cannot be taken apart",
                field="class",
                fix='Forget the whole client; in the next plan, send = "sequences".',
            )
        keep = payload.tensors["labels"] != label
        cut = {"sequences": payload.tensors["sequences"][keep], "labels": payload.tensors["labels"][keep]}
        return Payload({**payload.tensors, **cut}, facts_without(payload.facts, label))

    def upload_model(self, upload: Upload, ctx: Context) -> nn.Module:
        return self.build(Payload({**upload.payload.tensors, **self.map_tensors(ctx)}, upload.payload.facts))

    def build(self, payload: Payload) -> nn.Module:
        model = self._classifier(None)
        load_named(model, payload.tensors, "classifier")
        return corrected(OnTokens(self.tokenizer(), self.seeing(model, payload)).eval(), payload)


def _per_component(name: str) -> bool:
    return name.removeprefix("generator/").startswith(("means.", "variances."))


def _part(settings: Settings, kind: type[Any]) -> dict[str, object]:
    """The settings of one mixin: what names the work that depends on nothing else."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in asdict(settings).items() if name in names}
