"""OneSum — each site sends sums of fixed features (no training at all); their total is a Gaussian classifier.

A method of this project; relatives are FedCGS and analytic federated learning (`head=ridge`). A site sends class sums A_c,
counts n_c and second moments G of features that all sites compute alike: random convolutions drawn from the plan's seed, or a
frozen encoder. The server adds them; `methods/onesum/head.py` has the equations. Features lie on a grid (`on_grid`), so that
sums are exact: the release does not depend on who holds what, to the last bit, and without a site it is that of a round which
the site never joined.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial

import torch
from torch import nn

from osfl.core.errors import RoundError, TrainingError, UsageError
from osfl.core.method import Context, Phase, add_up, ignore_figure, relayed
from osfl.core.sums import ALL_SITES
from osfl.core.types import (
    ClientId,
    Contract,
    Dataset,
    Exposed,
    Field,
    Json,
    Payload,
    Plan,
    Probed,
    Release,
    Shard,
    Summand,
    Total,
    Upload,
)
from osfl.ingredients.ensembles.gathering import gather, members
from osfl.ingredients.statistics.claimed_counts import capped
from osfl.ingredients.statistics.gaussians import Statistics, folded_statistics, probed_means, summed, unpacked
from osfl.ingredients.statistics.one_vs_rest import hidden_few, images_in, log_odds, rows_of, targets
from osfl.ingredients.statistics.private_sums import (
    HEADROOM,
    check_claims,
    check_countable,
    check_shares,
    every_image,
    in_features,
    noise_problems,
    noised,
    noisy_gaussians,
    site_noise,
    sites_in,
    statement,
    with_headroom,
)
from osfl.ingredients.statistics.public_map import LEVELS
from osfl.ingredients.statistics.robust_sums import geometric_total
from osfl.ingredients.statistics.support import (
    exposed_beyond_classes,
    of_no_class,
    rows_that_show,
    shown_by_class,
    stops_for,
    too_few_in_open_sums,
)
from osfl.ingredients.training.local import SMOKE_TRAINING, classifier
from osfl.methods.onesum.feature_map import FeatureMap
from osfl.methods.onesum.figures import preview_figures, server_figures
from osfl.methods.onesum.head import Classifier, Head, Moments, head_of, lda, moments, qda, ridge
from osfl.methods.onesum.personal import (
    NETWORK,
    Blended,
    answer_of_site,
    heads_for_sites,
)
from osfl.methods.onesum.settings import Settings, settings_problems
from osfl.methods.onesum.terms import (
    check_features,
    checked_term,
    gram_of,
    grams_of,
    images_of,
    no_images,
    sums_of,
    to_whole,
)

_TOGETHER = 1024  # images whose features are in memory at once
_EXACT, _WHOLE = 2**53, 2**63  # whole numbers below are exact in float64, in which a site adds; and in int64, as all do


class OneSum(FeatureMap):
    Settings = Settings
    TASKS = ("multiclass", "multilabel")
    STRUCTURE = ("filters",)
    COMMON = ("features", "noise")
    PRIVATE = {"dimensions": 256, "filters": 32}  # noqa: RUF012
    PRESETS = {"paper": {}, "cpu": {}, "smoke": {**SMOKE_TRAINING, "filters": 4}}  # noqa: RUF012
    DEVIATIONS = (
        "a method of this project: there is no paper, and `paper` are its defaults",
        "classes with fewer than `least` images are in no sum",
    )

    def contract(self, architecture: str) -> Contract:
        d, classes = self.width(), rows_of(self.task)
        triangle, by_class, smaller = (d * (d + 1) // 2,), self.settings.by_class, self.settings.send == "smaller"
        gram = {f"class-{c}/gram": Field("I64", triangle, required=False, choice="gram") for c in range(classes)}
        if not by_class:
            gram = {"gram": Field("I64", triangle, required=not smaller, choice="gram" if smaller else "")}
        factor = {"factor": Field("F64", ("rows", d), required=False, choice="gram")} if smaller else {}
        counts = Field("I64", (classes,), below=None if self.settings.dimensions else 1 << 40)  # noise may make them negative
        return {"counts": counts, "sums": Field("I64", (classes, d)), **gram, **factor}

    def problems(self, clients: int) -> list[str]:
        s = self.settings
        found = super().problems(clients) if s.features == "encoder" else []
        return [*found, *settings_problems(s, self.task)]

    # --- a site --------------------------------------------------------------------------------------------------------------

    def client_phase(self, shard: Shard, ctx: Context) -> Payload:
        """n_c, A_c and G in whole steps of the grid, which are exact; zeros from a site without a class of `least` images."""
        if ctx.plan.privacy is not None:
            return self._private_term(shard, ctx)
        classes, data = rows_of(self.task), self._classes_large_enough(shard, ctx)
        if self.settings.by_class:
            held = sorted(set(data.labels.tolist())) or [0]
            found = {c: self._summed(data.subset(data.labels == c), shard, ctx) for c in held}
            tensors = {f"class-{c}/gram": to_whole(one.gram) for c, one in found.items()}
            total = summed(found.values())
        elif self.settings.send == "smaller" and 0 < 2 * len(data) * self.settings.vectors() < self.width():
            rows = self._features(data, shard, ctx) / self._step()
            total = folded_statistics(rows, self._targets(data), classes)
            tensors = {"factor": torch.linalg.qr(rows, mode="r").R}
        else:
            total = self._summed(data, shard, ctx)
            tensors = {"gram": to_whole(total.gram)}
        counts = Dataset(data.images, targets(data.labels)).class_counts(classes)
        return Payload({"counts": counts, "sums": to_whole(total.sums), **tensors}, {"features": self._digest(ctx)})

    def _targets(self, data: Dataset) -> torch.Tensor:
        """The rows that each feature vector is added to; an image's mirrors are added where it is."""
        return torch.cat([targets(data.labels)] * self.settings.vectors())

    def _private_term(self, shard: Shard, ctx: Context) -> Payload:
        """The site's term with noise, of every image of the site: which ones are held out depends on the others, and a class of
        few images is hidden by noise."""

        def make() -> Payload:
            data = every_image(shard)
            total = self._summed(self._countable(data, shard, ctx.plan.limits.samples), shard, ctx)
            counts = torch.bincount(data.labels, minlength=len(self.task.classes))
            return Payload({"counts": counts * LEVELS, "sums": to_whole(total.sums), "gram": to_whole(total.gram)})

        noise, features = site_noise(ctx.plan), self._digest(ctx)
        exact = ctx.get_or_compute(["osfl onesum exact term", 2, features, shard.digest], make).tensors
        tensors = noised(exact, noise)
        return Payload(tensors, {"features": features, "noise": noise.as_json()})

    def _classes_large_enough(self, shard: Shard, ctx: Context) -> Dataset:
        """Training images of classes that have enough: a sum over few shows each. The site learns which stay at home."""
        counts = shard.train.class_counts(len(self.task.classes))
        few = [self.task.classes[c] for c, count in enumerate(counts.tolist()) if 0 < count < self.settings.least]
        if few:
            ctx.progress(f"{shard.client} keeps {', '.join(few)}: fewer than {self.settings.least} images", len(few), len(few))
        if self.task.several:
            enough = shard.train if len(shard.train) >= self.settings.least else shard.train.subset(torch.arange(0))
            return self._countable(Dataset(enough.images, hidden_few(enough.labels, self.settings.least)), shard)
        return self._countable(shard.train.subset(counts[shard.train.labels] >= self.settings.least), shard)

    def _countable(self, kept: Dataset, shard: Shard, limit: int | None = None) -> Dataset:
        """No more images than float64 adds exactly, and than the plan lets a site have."""
        most = min(self._most_images(), limit or self._most_images())
        check_countable(len(kept), most, shard.client)
        return kept

    def _most_images(self) -> int:
        """How many images a site's sums can hold exactly."""
        return int(_EXACT // (LEVELS**2 * self.settings.vectors()))

    def _summed(self, data: Dataset, shard: Shard, ctx: Context) -> Statistics:
        """The sums over a site's images and their mirrors, in steps of the grid; G is folded."""
        parts, classes = torch.split(torch.arange(len(data)), _TOGETHER), rows_of(self.task)

        def sums(part: torch.Tensor) -> Statistics:
            some = data.subset(part)
            features = (self._features(some, shard, ctx) / self._step()).round_()  # a norm that is no power of two: last bits
            return folded_statistics(features, self._targets(some), classes)

        return summed(ctx.map(sums, parts)) if len(data) else no_images(classes, self.width())

    def exposed(self, payload: Payload, shard: Shard, ctx: Context) -> Iterator[Exposed]:
        """The mean features of each class, the thumbnail among them, rows of G and its span, beside those of the images."""
        if ctx.plan.privacy is not None:  # noise protects; to look at the images and stop would say something about them
            return
        means, pixels = self._means(payload, ctx.plan), self._pixels()
        counts = payload.tensors["counts"][: len(self.task.classes)].tolist()
        grams = {c: partial(self._in_features, gram) for c, gram in grams_of(payload).items()}
        whole = cache(partial(self._second_moments, payload))
        every, stops = self._rows(shard, ctx), stops_for(self.settings.readable, ctx.plan)
        held = [c for c, count in enumerate(counts) if count]
        parts = {c: (every[0][:, shard.train.shows(c)], every[1][:, shard.val.shows(c)]) for c in held}
        seen = {c: train.flatten(0, 1) for c, (train, _) in parts.items()}
        if self.task.several:
            seen[len(counts)] = every[0][:, of_no_class(shard.train, held)].flatten(0, 1)
        shown = {} if grams else shown_by_class(whole(), seen)
        for c, rows in parts.items():
            train, held_out = (part.mean(0) for part in rows)  # of an image and its mirrors
            yield Exposed(
                c,
                {"mean": means[c : c + 1].float()},
                train,
                held_out,
                moments=grams[c] if grams else whole,
                summed=self.settings.vectors() * (counts[c] if grams else self._images(payload)),
            )
            if pixels:
                yield Exposed(c, {"thumbnail": means[c : c + 1, -pixels:].float()}, train[:, -pixels:], held_out[:, -pixels:])
            each, others = (part.flatten(0, 1) for part in rows)
            yield Exposed(
                c,
                {"row of second moments": rows_that_show(grams[c](), each.double())[0].float() if grams else shown[c]},
                each,
                others,
                stops=stops,
            )
        if self.task.several:
            sums, copies = payload.tensors["sums"].double() * self._step(), self.settings.vectors()
            train, held_out = (torch.cat([part.flatten(0, 1), *([part.mean(0)] if copies > 1 else [])]) for part in every)
            yield exposed_beyond_classes(sums, payload.tensors["counts"] * copies, shown[len(counts)], train, held_out, stops)

    def _rows(self, shard: Shard, ctx: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """Features of the training and held-out images, (vectors, n, d): an image's mirrors side by side."""
        v, d = self.settings.vectors(), self.width()
        train, held_out = (
            (self._features(part, shard, ctx).float() if len(part) else torch.zeros(0, d)).reshape(v, len(part), d)
            for part in (shard.train, shard.val)
        )
        return train, held_out

    def too_few(self, payload: Payload, plan: Plan) -> tuple[int, int] | None:
        return too_few_in_open_sums(self._fewest(payload), self.settings.readable, plan)

    def cautions(self, payload: Payload, plan: Plan) -> Sequence[str]:
        """Exact sums over fewer images than features have the span of their features; of very few, the features of each
        (benchmarks/exact_sums.py computes them)."""
        if plan.privacy is not None or plan.secure_sum:
            return ()
        few, of = self._fewest(payload), " of a class" if self.settings.by_class else ""
        if not 0 < few * self.settings.vectors() < self.width():
            return ()
        return (
            f"{few:,} images{of} are fewer than {self.width():,} features: their sums have the span of their features, so "
            "whoever has the features of an image can tell whether it is among them, and whoever reads this upload may compute "
            "the features of single images from its sums. A plan with secure_sum = true or with [privacy] keeps them from it.",
        )

    def _fewest(self, payload: Payload) -> int:
        """Images behind the smallest of the second moments that are sent; 0 without any."""
        classes = payload.tensors["counts"][: len(self.task.classes)].tolist()
        return min(filter(None, classes if self.settings.by_class else [self._images(payload)]), default=0)

    def _images(self, payload: Payload) -> int:
        """How many images stand behind an upload."""
        return int(images_in(payload.tensors["counts"], self.task))

    def preview(self, payload: Payload, ctx: Context) -> Mapping[str, Json]:
        """The mean thumbnail of each class, and how the second moments fall off."""
        if "sums" not in payload.tensors:
            return {}
        gram, classes = unpacked(sums_of(payload).gram), len(self.task.classes)
        means, counts = self._means(payload, ctx.plan)[:classes], images_of(payload, ctx.plan)[:classes]
        return preview_figures(self._thumbnails(means), counts, self.task.classes, gram)

    def probed(self, upload: Upload, ctx: Context) -> Probed:
        """The class means; with noise, nothing but the counts."""
        if ctx.plan.privacy is not None:
            return Probed(tuple(images_of(upload.payload, ctx.plan).clamp_min(0).round().long().tolist()))
        term = sums_of(upload.payload)
        means = probed_means(Statistics(term.sums, term.gram, term.counts * self.settings.vectors()))
        return replace(means, counts=tuple(term.counts.tolist()))  # images, of which each may add several vectors

    def _means(self, payload: Payload, plan: Plan) -> torch.Tensor:
        """Mean features of each class, (classes, d); zeros where there are none."""
        counts = images_of(payload, plan) * self.settings.vectors()
        return torch.div(payload.tensors["sums"].double() * self._step(), counts.clamp_min(1)[:, None])

    def _second_moments(self, payload: Payload) -> torch.Tensor:
        return self._in_features(gram_of(payload))

    def _in_features(self, gram: torch.Tensor) -> torch.Tensor:
        """Folded second moments in steps of the grid, in units of the features."""
        return unpacked(gram.double()) * self._step() ** 2

    def additive(self) -> bool:
        return True

    def adds_held_out(self, plan: Plan) -> bool:
        """With noise: which images are held out depends on all others."""
        return plan.privacy is not None

    def summands(self, plan: Plan) -> dict[str, Summand]:
        """The contract's tensors, all whole numbers; a site's images, what each adds at most, and noise bound them."""
        if self.settings.send == "smaller":
            raise UsageError(
                "setting 'send': factors of G do not add up, as a secure sum needs; set send=triangle", field="settings"
            )
        images = min(plan.limits.samples, self._most_images())
        one = 1 if plan.privacy is None else LEVELS
        most = {"counts": images * one, "sums": images * self.settings.vectors() * LEVELS}
        gram = images * self.settings.vectors() * LEVELS**2
        found = {
            name: Summand(tuple(map(int, field.shape)), most.get(name, gram), whole=True)
            for name, field in self.contract("").items()
        }
        return found if plan.privacy is None else with_headroom(found, plan)

    def from_sum(self, total: Payload, sites: int) -> Payload:
        """With the number of sites, of whose noise the sum is full."""
        return Payload(total.tensors, {**total.facts, "sites": sites})

    def privacy_problems(self, plan: Plan) -> list[str]:
        if self.task.several:
            return [
                "privacy: the noise is for images of one class each; an image of several would change more sums than it hides"
            ]
        wanted = {"by_class": False, "send": "triangle", "head": "lda", "shrinkage": "gcv"}
        found = [
            f"setting {name!r}: with [privacy] expected {value!r}, got {getattr(self.settings, name)!r}"
            for name, value in wanted.items()
            if getattr(self.settings, name) != value
        ]
        if self.settings.dimensions < 1:
            found.append("setting 'dimensions': [privacy] needs features of bounded norm; set dimensions=256")
        return [*found, *noise_problems(plan)]

    def check_upload(self, upload: Upload, ctx: Context) -> None:
        """Of the plan's features, within its limits, and what some images add up to."""
        check_features(upload, self._digest(ctx))
        check_claims(upload, images_of(upload.payload, ctx.plan), ctx.plan)
        checked_term(upload, ctx.plan, self.settings.vectors())

    # --- the server ----------------------------------------------------------------------------------------------------------

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        """Terms are added one at a time: memory does not grow with the sites. Between peers they are passed on as they are."""
        if ctx.plan.topology is not None:
            return relayed(self, uploads, ctx)
        return self.release_of(add_up(self, uploads, ctx), uploads, ctx)

    def release_of(self, total: Total, uploads: Sequence[Upload], ctx: Context) -> Release:
        if ctx.plan.privacy is not None:
            sites = sites_in(uploads[0]) if ALL_SITES in total.images else len(total.images)
            check_shares(ctx.plan, sites)
            return Release(self._private_model(total, sites, ctx))
        sums, grams = self._capped_sums(total, uploads, ctx)
        return Release(self._model(sums, grams, ctx))

    def upload_model(self, upload: Upload, ctx: Context) -> nn.Module | None:
        """What a term alone says; with a share of the noise the server phase would wait for others. None: noise hides it."""
        if ctx.plan.privacy is None:
            return super().upload_model(upload, ctx)
        with contextlib.suppress(TrainingError):
            return self.build(self._private_model(self.term(upload), 1, ctx))
        return None

    def _private_model(self, total: Total, sites: int, ctx: Context) -> Payload:
        """The classifier of noisy sums. No site's term is scaled down: its part of the noise would go with it."""
        images = sum(total.images.values()) // LEVELS  # counts are in steps
        self._check_overflow(images + HEADROOM // LEVELS**2)  # noise takes as much as so many images
        noisy = noisy_gaussians(*in_features(total.tensors, ctx.plan, self._step(), sites), self.task.classes)
        found = Moments(noisy.images, noisy.shares, noisy.mean, torch.ones_like(noisy.mean), noisy.means, noisy.within)
        site = self.settings.prior == "site" and self.settings.blend == "auto"
        more = heads_for_sites(found, noisy.shrinkage) if site else {}
        facts = {"shrinkage": noisy.shrinkage, "privacy": statement(ctx.plan, sites)}
        return Payload({**self._map_tensors(ctx), **lda(found, noisy.shrinkage).tensors(), **more}, facts)

    def _model(self, total: Statistics, grams: torch.Tensor | None, ctx: Context) -> Payload:
        """The classifier of these sums."""
        if self.task.several:
            weight, bias, shrinkage = log_odds(
                total, None if self.settings.shrinkage == "gcv" else float(self.settings.shrinkage)
            )
            plain = Head(weight, bias, torch.zeros_like(bias), torch.ones(1, dtype=torch.float64))
            return Payload({**self._map_tensors(ctx), **plain.tensors()}, {"shrinkage": shrinkage})
        found, s = moments(total), self.settings
        curve = found.curve() if s.shrinkage == "gcv" else None
        shrinkage = float(s.shrinkage) if curve is None else curve.best
        if s.head == "qda":
            assert grams is not None
            head = qda(found, grams, total, shrinkage)
        else:
            head = lda(found, shrinkage) if s.head == "lda" else ridge(found, shrinkage)
        means = self._thumbnails(total.means())
        for title, figure in server_figures(found, head, curve, shrinkage, means, self.task.classes, s.filters, self._maps()):
            ctx.show(title, figure)
        more = heads_for_sites(found, shrinkage) if s.head == "lda" and s.prior == "site" and s.blend == "auto" else {}
        return Payload({**self._map_tensors(ctx), **head.tensors(), **more}, {"shrinkage": shrinkage})

    def _capped_sums(self, total: Total, uploads: Sequence[Upload], ctx: Context) -> tuple[Statistics, torch.Tensor | None]:
        """The sums in units of the features, and G of each class where it was sent. Mirrored images are images.

        A site that claims more than the plan's share of all images has its whole term scaled down: its means stay.
        """
        self._check_overflow(sum(total.images.values()))
        if ctx.plan.judging.combine == "geometric":
            return self._robust(uploads, ctx), None
        sums = {name: value.double() for name, value in total.tensors.items()}
        claims = torch.tensor(list(total.images.values()), dtype=torch.float64)
        for place, (claim, belief) in enumerate(zip(claims, capped(claims, ctx.plan.limits.share), strict=True)):
            if belief < claim:
                for name, value in self.term(uploads[place]).tensors.items():
                    sums[name] -= value.double() * (1 - float(belief / claim))
        step, counts = self._step(), sums["counts"] * self.settings.vectors()
        whole = Statistics(sums["sums"] * step, unpacked(sums["gram"]) * step**2, counts)
        return whole, unpacked(sums["grams"]) * step**2 if "grams" in sums else None

    def _robust(self, uploads: Sequence[Upload], ctx: Context) -> Statistics:
        """The geometric median of the sites' terms in place of their sum; all of them are in memory."""
        terms, step, vectors = [sums_of(upload.payload) for upload in uploads], self._step(), self.settings.vectors()
        scaled = [Statistics(term.sums * step, term.gram * step**2, term.counts * vectors) for term in terms]
        found = geometric_total(scaled, ctx.plan.limits.share)
        return replace(found, gram=unpacked(found.gram))

    def robust(self) -> Sequence[str]:
        """Of sums with one covariance for all classes, each image in one class."""
        return () if self.task.several or self.settings.head == "qda" else ("geometric",)

    def term(self, upload: Upload) -> Total:
        """Counts, A_c and G in whole steps; G of each class only where the head needs it."""
        tensors = upload.payload.tensors
        found = {"counts": tensors["counts"], "sums": tensors["sums"], "gram": to_whole(gram_of(upload.payload))}
        if self.settings.head == "qda":
            found["grams"] = torch.zeros(len(found["counts"]), len(found["gram"]), dtype=torch.int64)
            for c, gram in grams_of(upload.payload).items():
                found["grams"][c] = gram
        return Total(found, {upload.client: int(images_in(found["counts"], self.task))})

    def _check_overflow(self, images: int) -> None:
        """Some images, and not so many that sums could leave int64, whatever they show: each adds at most bound^2."""
        most = (_WHOLE - 1) // (LEVELS**2 * self.settings.vectors())
        if images > most:
            raise RoundError(
                "all sites together claim more images than sums can hold", field="counts", expected=f"at most {most}"
            )
        if not images:
            raise TrainingError(
                "no site has a class of enough images",
                field="least",
                expected=f"a class of at least {self.settings.least} images at some site",
                fix="Add images, or agree on a smaller `least`.",
            )

    # --- the release ---------------------------------------------------------------------------------------------------------

    def work(self, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
        """Sites may train a network of their own, before or after the round."""
        return (1, images) if phase == "server" else (1, images, images * self.settings.epochs)

    def personalize(self, release: Release, shard: Shard, ctx: Context) -> Payload:
        """The scores of all sites' images, weighed by how often the site has each class (`methods/onesum/personal.py`)."""
        shared = release.shared
        if ctx.plan.topology is not None:
            shared = self._with_neighbors(release.for_client(shard.client), shard, ctx)
        return shared if self.settings.prior == "global" else answer_of_site(self, shared, shard, ctx)

    def learned_prior(self, payload: Payload) -> tuple[torch.Tensor, float] | None:
        """For what `prior=site` with `blend=0` would reach, where all sites answer with the release."""
        s = self.settings
        if s.prior == "site" or s.head == "ridge" or self.task.several:
            return None
        return head_of(payload.tensors).prior, float(s.temperature)

    def needs_images_after_round(self) -> bool:
        return bool(self.settings.prior == "site")

    def build(self, payload: Payload) -> nn.Module:
        answers = Classifier(head_of(payload.tensors))
        summed = nn.Sequential(*self._feature_network(payload.tensors), answers)
        if "network" not in payload.facts:
            return summed.eval()
        weights = {name.removeprefix(NETWORK): value for name, value in payload.tensors.items() if name.startswith(NETWORK)}
        network = classifier(Payload(weights, payload.facts["network"]), self.task)
        return Blended(summed, network, float(payload.facts["site"]["blend"])).eval()

    # --- peers ---------------------------------------------------------------------------------------------------------------

    def relay(self, client: ClientId, uploads: Sequence[Upload], ctx: Context) -> Payload:
        """The neighbors' terms, one by one: who adds them up knows whose they are, and counts nobody twice."""
        return gather({upload.client: upload.payload for upload in uploads})

    def _with_neighbors(self, received: Payload, shard: Shard, ctx: Context) -> Payload:
        """The classifier of the site's own term and its neighbors', each once; `summed` in what it keeps says whose."""
        if self.settings.head == "qda":
            raise TrainingError(
                "peers keep one second moment for all classes", field="head", expected="lda or ridge", fix="Set head=lda."
            )
        total, names = self._previous_sum(shard, ctx)
        for name, payload in members(received).items():
            upload = Upload(name, "", payload)
            check_claims(upload, images_of(upload.payload, ctx.plan), ctx.plan)
            check_features(upload, self._digest(ctx))
            if name not in names:
                total, names = total + checked_term(upload, ctx.plan, self.settings.vectors()), [*names, name]
        step, copies = self._step(), self.settings.vectors()
        if not float(total.counts.sum()):
            raise TrainingError(
                "neither this site nor a neighbor has a class of enough images",
                client=shard.client,
                field="least",
                expected=f"a class of at least {self.settings.least} images",
                fix="Exchange with more neighbors, or agree on a smaller `least`.",
            )
        sums = Statistics(total.sums * step, unpacked(total.gram) * step**2, total.counts * copies)
        made = self._model(sums, None, replace(ctx, show=ignore_figure))
        kept = {"summed/sums": total.sums, "summed/gram": total.gram, "summed/counts": total.counts}
        return Payload({**made.tensors, **kept}, {**made.facts, "summed": names})

    def _previous_sum(self, shard: Shard, ctx: Context) -> tuple[Statistics, list[ClientId]]:
        """The sum after the encounter before, and whose terms are in it; at first the site's own."""
        if ctx.previous is None:
            own = Upload(shard.client, "", self.client_phase(shard, ctx))
            return checked_term(own, ctx.plan, self.settings.vectors()), [shard.client]
        t = ctx.previous.tensors
        return Statistics(t["summed/sums"], t["summed/gram"], t["summed/counts"]), list(ctx.previous.facts["summed"])

    def without_class(self, payload: Payload, label: int) -> Payload:
        """The same upload had its site no image of the class; possible where G was sent class by class."""
        counts, sums = (payload.tensors[name].clone() for name in ("counts", "sums"))
        counts[label], sums[label] = 0, 0
        kept = {name: value for name, value in payload.tensors.items() if name != f"class-{label}/gram"}
        facts = payload.facts if counts.any() else {**payload.facts, "samples": 0}
        return Payload({**kept, "counts": counts, "sums": sums}, facts)

    def separable(self) -> bool:
        """Whether one class can be taken out of an upload."""
        return bool(self.settings.by_class)

    @property
    def inseparable(self) -> str:
        """What has seen a class and stays when it is forgotten."""
        text = "sites go on weighing classes by how many images of them they have"
        return text if self.settings.prior == "site" else ""
