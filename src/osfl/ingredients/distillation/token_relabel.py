"""Token relabel: a student ViT learns from every patch of synthetic images, from each kind in its own way.

Paper: Shen et al., "Provable Sparse Inversion and Token Relabel Enhanced One-shot Federated Learning with ViTs" (FedMITR),
2026. L_TR = KL(E(x) || S(x)) + λ1 CE(S(x_h), y) + λ2 KL(E(x_l) || S(x_l)): E are the clients as one, x_h the patches that
were made to the end, with the label they were made for, and x_l the others, which the clients label again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import TrainingError, UsageError
from osfl.core.method import Context, Part
from osfl.core.types import ClientId, Dataset, Json, Payload, Upload
from osfl.ingredients.distillation.order import progress_report, studies, turns
from osfl.ingredients.distillation.student import kd_loss
from osfl.ingredients.ensembles.ensemble import Combination
from osfl.ingredients.ensembles.odds import from_odds, rebalanced, softened
from osfl.ingredients.ensembles.paging import Networks
from osfl.ingredients.generators.pictures import by_class, gallery
from osfl.ingredients.generators.synthesis import check_finite, draw_labels, keep, take_up, work_key
from osfl.ingredients.inversion.sparse import (
    Inverted,
    Joint,
    SparseInversion,
    dropped,
    invert_sparsely,
    patches_left,
    pixels_of,
    sparse_flops,
)
from osfl.ingredients.statistics.averaging import average
from osfl.ingredients.statistics.claimed_counts import capped, capped_sites
from osfl.ingredients.training.local import batches, decay
from osfl.ingredients.training.model_method import ModelMethod, counts_of, start_student, teacher_weights, teachers
from osfl.ingredients.training.one_upload import by_client
from osfl.models.build import architecture_for, build_model
from osfl.models.flops import forward_flops, training_flops
from osfl.models.folding import freeze
from osfl.models.inputs import to_images
from osfl.models.naming import load_named, named
from osfl.models.vit import OnSubset, Vit
from osfl.runtime.devices import wide
from osfl.runtime.meter import spend
from osfl.runtime.precision import gradients

_NORMS = 3  # of each probed image
_SHARDS = 2  # a student's batch is cut in two whatever the machine, so that two cores work and bits stay the same


@dataclass(frozen=True)
class Terms:
    """How much each term of L_TR counts."""

    whole: float = 1.0  # KL on whole images
    kept: float = 0.5  # λ1: cross-entropy on patches that were made to the end
    rest: float = 0.5  # λ2: KL on the others


KD_ONLY = Terms(1.0, 0.0, 0.0)  # DeepInversion


# --- images and what is known about them -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pool:
    """Synthetic images with their kept patches, and the ensemble's outputs on them, computed once."""

    images: torch.Tensor  # (n, channels, height, width) float16
    labels: torch.Tensor  # (n,) made for
    makers: torch.Tensor  # (n,) which client was inverted; zeros where all were, as one
    keep: torch.Tensor  # (n, kept) patches made to the end
    drop: torch.Tensor  # (n, others)
    whole: torch.Tensor  # E(x), (n, classes)
    rest: torch.Tensor  # E(x_l), (n, classes); nothing was asked where nothing was dropped: zeros

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, index: torch.Tensor | slice, device: torch.device) -> Pool:
        """A part of the pool, ready to be learned from."""
        parts = {name: value[index].to(device) for name, value in self.tensors().items()}
        return Pool(**{**parts, "images": parts["images"].float()})

    def on(self, device: torch.device) -> Pool:
        return Pool(**{name: value.to(device) for name, value in self.tensors().items()})

    def tensors(self) -> dict[str, torch.Tensor]:
        return {field.name: getattr(self, field.name) for field in fields(self)}


class Pools:
    """Pools one after the other, as one, without a copy of what may be gigabytes of images."""

    def __init__(self, parts: Sequence[Pool]) -> None:
        lengths = torch.tensor([len(part) for part in parts])
        self.parts, self.ends = [part.tensors() for part in parts], lengths.cumsum(0)
        self.begins = self.ends - lengths

    def __len__(self) -> int:
        return int(self.ends[-1])

    def take(self, index: torch.Tensor, device: torch.device) -> Pool:
        """Rows in the order of the index, ready to be learned from."""
        whose = torch.bucketize(index, self.ends, right=True)
        places = zip(whose.tolist(), (index - self.begins[whose]).tolist(), strict=True)
        rows = [(self.parts[part], row) for part, row in places]
        picked = {field.name: torch.stack([part[field.name][row] for part, row in rows]) for field in fields(Pool)}
        return Pool(**picked).take(slice(None), device)


def relabel_terms(student: Vit, part: Pool, terms: Terms, temperature: float = 1.0) -> torch.Tensor:
    """The three terms of L_TR before they are weighted, (3,); one without weight is not computed."""
    whole = kept = rest = part.whole.new_zeros(())
    if terms.whole:
        whole = kd_loss(part.whole, student(part.images), temperature)
    if terms.kept:
        kept = functional.cross_entropy(student(part.images, part.keep), part.labels)
    if terms.rest and part.drop.shape[1]:
        rest = kd_loss(part.rest, student(part.images, part.drop), temperature)
    return torch.stack([whole, kept, rest])


def weighted(values: torch.Tensor, terms: Terms) -> torch.Tensor:
    return (values * _weights(terms, values.device)).sum()


@functools.lru_cache(maxsize=16)
def _weights(terms: Terms, device: torch.device) -> torch.Tensor:
    """Made once, because a GPU would wait for each copy."""
    return torch.tensor([terms.whole, terms.kept, terms.rest], device=device)


def gradient_norms(student: Vit, part: Pool, terms: Terms, temperature: float = 1.0) -> torch.Tensor:
    """||∇|| of the student for each image, (n, 3): hard labels on all patches, and relabeled patches in two weightings.

    The theorem's L_DI and L_Fed bound these. The second loss is the part of L_TR that treats patches apart, its weights
    scaled to sum to 1, so that both losses have equal weight; the third is that of Eq. 17, CE + λ2 KL.
    """
    parameters, total = list(student.parameters()), (terms.kept + terms.rest) or 1.0
    apart = Terms(0.0, terms.kept / total, terms.rest / total), Terms(0.0, 1.0, terms.rest)
    rows = []
    for i in range(len(part)):
        one = part.take(slice(i, i + 1), part.whole.device)
        hard = functional.cross_entropy(student(one.images), one.labels)
        soft = [weighted(relabel_terms(student, one, way, temperature), way) for way in apart]
        rows.append(torch.stack([_norm(gradients(loss, parameters)) for loss in (hard, *soft)]))
    return torch.stack(rows) if rows else torch.zeros(0, _NORMS)


def _norm(slopes: Sequence[torch.Tensor]) -> torch.Tensor:
    total: torch.Tensor = torch.stack([slope.norm() for slope in slopes]).norm()
    return total


def kept_samples(
    what: str, uploads: Sequence[Upload], method: ModelMethod, ctx: Context, learned: Callable[[], PatchServer]
) -> Dataset:
    """The images that the server phase kept; only where they are lost, after forgetting for example, it learns once more."""
    key = {**work_key(what, uploads, method, ctx), "samples": True}
    kept = ctx.get_or_compute(key, lambda: learned().samples()).tensors
    return Dataset(kept["images"], kept["labels"])


# --- the server ----------------------------------------------------------------------------------------------------------


class PatchServer:
    """Frozen client ViTs, a student with its optimizer, and the images so far. Every epoch's images and every epoch's
    student are kept, so that a killed server goes on from there, to the same bytes."""

    def __init__(
        self,
        method: ModelMethod,
        uploads: Sequence[Upload],
        ctx: Context,
        what: str,
        inversion: SparseInversion,
        terms: Terms,
        probe: int = 0,
    ) -> None:
        uploads = by_client(uploads)
        self.method, self.uploads = method, uploads
        self.ctx, self.settings, self.task = ctx, method.settings, method.task
        self.inversion, self.terms = inversion, terms
        self.probe = probe if terms.kept or terms.rest else 0  # else there is nothing to compare
        self.clients, classes = [upload.client for upload in uploads], len(method.task.classes)
        self.counts = counts_of(uploads, classes)
        votes = softened(teacher_weights(uploads, self.settings.ensemble, classes), self.settings.votes)
        self.votes = capped(votes, ctx.plan.limits.share)
        self._rules: dict[torch.device, tuple[torch.Tensor, torch.Tensor, Combination | None]] = {}
        self.together = self.settings.invert == "ensemble"
        known = capped_sites(self.counts, ctx.plan.limits.share).sum(0, keepdim=True) if self.together else self.counts
        self.wanted = label_weights(self.settings.labels, known)  # of each maker
        self.makers = ["all clients"] if self.together else self.clients
        # images of one client need no other client's model, so clients are spread over several devices
        self.places = [ctx.device if self.together else ctx.for_client(client).device for client in self.clients]
        sent = teachers(uploads, method, ctx.device)
        self.members = Networks(len(sent), lambda i: as_vit(freeze(sent[i])).to(self.places[i]), sent.limit)
        model, self.architecture = start_student(uploads, method, ctx)
        self.student = as_vit(model.to(ctx.device))
        self.start = named(self.student, "model")
        self.optimizer = torch.optim.SGD(
            self.student.parameters(),
            self.settings.student_lr,
            momentum=self.settings.student_momentum,
            weight_decay=self.settings.student_decay,
        )
        self.pools: list[Pool] = []
        self.losses, self.norms = torch.zeros(0, 3), torch.zeros(0, _NORMS)  # (epochs, terms); (probed images, losses)
        self.key = work_key(what, uploads, method, ctx)

    def learn(self) -> None:
        """Algorithm 1: images from every client against the server as it is, then a pass over all images so far. Or all images
        first, against the server as it began, and then `student_epochs` passes over all of them."""
        for images, lesson in turns(self.settings):
            if images is not None:
                self.dream(images)
            if lesson is not None:
                self.study(lesson)
                self.ctx.milestone(lesson + 1, studies(self.settings), self.release)
            self.ctx.progress(*progress_report(self.settings, images, lesson, "server epochs"))

    def release(self) -> Payload:
        """The student as it is now, or a point on its straight way from where it began: synthetic images teach it things that
        hold for them only, and a partial update has forgotten less of what the clients learned from real images."""
        weights, share = named(self.student, "model"), self.settings.student_share
        if share < 1:
            weights = average([self.start, weights], [1 - share, share])
        return Payload(weights, {"architecture": self.architecture})

    # --- images ---

    def dream(self, epoch: int) -> None:
        """New images of every client; the oldest leave when the pool is full."""
        made = self.ctx.get_or_compute({**self.key, "images": epoch}, lambda: Payload(self._dream(epoch).tensors()))
        self.pools = [*self.pools, Pool(**made.tensors)][-self.settings.pool_epochs :]

    def _dream(self, epoch: int) -> Pool:
        count, servers = self.settings.images, {place: as_vit(freeze(self.student)).to(place) for place in set(self.places)}
        joint = Joint(self.members, self.combined)

        def make(part: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            model: Inverted = joint if self.together else self.members[part]
            device = self.places[part]
            rng = self.ctx.generator("images", *([self.makers[0], part] if self.together else [self.makers[part]]), epoch)
            labels = draw_labels(count, self.wanted[0 if self.together else part], rng)
            server = servers[device]
            found = invert_sparsely(model, labels, self.task.image, self.inversion, rng, server=server, device=device)
            return halved(found.images, self.inversion.lr).cpu().contiguous(), labels, found.keep.cpu()

        if self.ctx.elsewhere is None or self.together:  # all clients as one stay where their rule is
            made = self.ctx.map(make, range(len(self.members)))  # as many images, whoever makes them
        else:
            found = self.ctx.spread(
                self.method, inverted_client, self.uploads, [self._part(i, epoch) for i in range(len(self.members))]
            )
            made = [(one.tensors["images"], one.tensors["labels"], one.tensors["keep"]) for one in found]
        images, labels, kept = (torch.cat(parts) for parts in zip(*made, strict=True))
        makers = torch.arange(len(self.members)).repeat_interleave(count) * (not self.together)
        drop = dropped(kept, self.student.patches)
        whole, rest = self.ask(images, drop)
        return Pool(images, labels, makers, kept, drop, whole, rest)

    def _part(self, place: int, epoch: int) -> Part:
        """One client's images as another process makes them: with the student as it is now."""
        student = {**named(self.student, "student"), "wanted": self.wanted[place]}
        facts = {"epoch": epoch, "student": self.architecture, "inversion": asdict(self.inversion)}
        return Part((self.clients[place],), Payload(student, facts))

    def ask(self, images: torch.Tensor, drop: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """E(x) and E(x_l): each client looks at each image once, and once at its dropped patches."""
        count = drop.shape[1] if self.terms.rest else 0

        @torch.no_grad()  # gradients are switched off per thread, and this runs in others
        def ask(place: int) -> tuple[torch.Tensor, torch.Tensor]:
            member, device, outputs, again = self.members[place], self.places[place], [], []
            for x, away in zip(torch.split(images, 64), torch.split(drop, 64), strict=True):
                x = x.to(device).float()
                outputs.append(member(x).cpu())
                again.append(member(x, away.to(x.device)).cpu() if count else torch.zeros_like(outputs[-1]))
            spend(ask_flops(member, count, self.task.image) * len(images))
            return torch.cat(outputs), torch.cat(again)

        answers = self.ctx.map(ask, range(len(self.members)))
        outputs, again = (self.combined(torch.stack(parts)) for parts in zip(*answers, strict=True))
        return outputs, again

    def combined(self, logits: torch.Tensor) -> torch.Tensor:
        """All clients as one, E."""
        counts, votes, combination = self._rule_on(logits.device)
        freed = rebalanced(logits, counts, self.settings.balance)
        return from_odds(freed, votes, logits.mean(0)) if combination is None else combination(freed)

    def _rule_on(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, Combination | None]:
        """What the answers are combined with, moved once: a copy at each step of an inversion would make a GPU wait."""
        if device not in self._rules:
            counts, votes = (part.to(wide(device)).to(device) for part in (self.counts, self.votes))
            mode, how = self.settings.ensemble, self.ctx.plan.judging.combine
            plain = None if mode == "odds" else Combination(len(self.members), mode, self.votes, robust=how)
            self._rules[device] = counts, votes, plain
        return self._rules[device]

    # --- the student ---

    def study(self, epoch: int) -> None:
        """The student passes over the pool."""
        done = self.ctx.get_or_compute({**self.key, "student": epoch, "norms": _NORMS}, lambda: self._study(epoch))
        take_up(self.student, self.optimizer, "model", done.tensors)
        self.losses, self.norms = done.tensors["losses"], done.tensors["norms"]

    def _study(self, epoch: int) -> Payload:
        settings, pool = self.settings, Pools([part.on(self.ctx.device) for part in self.pools])
        norms = self._probe(self.pools[-1], self.ctx.generator("probe", epoch))
        rate = decay("cosine" if settings.student_cosine else "constant", epoch, studies(settings))
        self.optimizer.param_groups[0]["lr"] = settings.student_lr * rate
        rng = self.ctx.generator("study", epoch)
        self.student.train()
        order = [index for _ in range(settings.passes) for index in batches(len(pool), settings.student_batch, rng)]
        losses = torch.stack([self._step(pool, index) for index in order]).mean(0, keepdim=True).cpu()
        check_finite(losses.sum(), "student", "student_lr", settings.student_lr)
        self.student.eval()
        newest = self.pools[-1]
        each = study_flops(self.student, newest.keep.shape[1], newest.drop.shape[1], self.terms, self.task.image)
        spend(each * len(pool) * settings.passes)
        state = keep(self.student, self.optimizer, "model")
        return Payload({**state, "losses": torch.cat([self.losses, losses]), "norms": torch.cat([self.norms, norms])})

    def _step(self, pool: Pools, index: torch.Tensor) -> torch.Tensor:
        """One step of SGD on a batch; returns its three terms."""
        parameters = list(self.student.parameters())

        def slopes(part: torch.Tensor) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
            share = len(part) / len(index)
            values = relabel_terms(self.student, pool.take(part, self.ctx.device), self.terms, self.settings.temperature)
            return gradients(share * weighted(values, self.terms), parameters), share * values.detach()

        found = self.ctx.map(slopes, index.chunk(_SHARDS))
        for parameter, *parts in zip(parameters, *(slope for slope, _ in found), strict=True):
            parameter.grad = torch.stack(parts).sum(0)
        if self.settings.student_clip:
            nn.utils.clip_grad_norm_(parameters, self.settings.student_clip)
        self.optimizer.step()
        return torch.stack([values for _, values in found]).sum(0)

    def _probe(self, newest: Pool, rng: torch.Generator) -> torch.Tensor:
        """Gradient norms of the student, as it is before this epoch, on some of the new images."""
        chosen = torch.randperm(len(newest), generator=rng)[: self.probe]
        if not len(chosen) or not newest.drop.shape[1]:  # nothing was dropped: all losses are of the same patches
            return torch.zeros(0, _NORMS)
        found = self.ctx.map(
            lambda part: gradient_norms(
                self.student, newest.take(part, self.ctx.device), self.terms, self.settings.temperature
            ).cpu(),
            chosen.chunk(_SHARDS),
        )
        return torch.cat(found)

    # --- what the report shows ---

    def samples(self) -> Payload:
        """The images that the student sees in the end, and what they were made for."""
        # an epoch at a time: floats take much memory
        images = torch.cat([to_images(pool.images.float()) for pool in self.pools])
        return Payload({"images": images, "labels": torch.cat([pool.labels for pool in self.pools])})

    def keep_samples(self) -> None:
        """For the evaluation, which asks for them with `kept_samples` when the server phase is over."""
        self.ctx.get_or_compute({**self.key, "samples": True}, self.samples)

    def show(self) -> None:
        newest, classes = self.pools[-1], self.task.classes
        images = newest.images.float()
        note = "Of the last epoch, made for the class named below each; never seen by any client."
        self.ctx.show("Synthetic images", by_class(images, newest.labels, classes, 4, note))
        if newest.drop.shape[1]:
            self.ctx.show("Kept and dropped patches", self._patches(newest))
        self.ctx.show("Loss over server epochs", loss_curve(self.losses, self.terms))
        self.ctx.show("Labels of the synthetic images", label_table(newest, self.makers, classes))
        self.ctx.show("What the synthetic images are taken for", taken_table(newest, self.makers, classes))
        if len(self.norms):
            self.ctx.show("Gradient norms of the student", norm_figure(self.norms, self.terms))

    def _patches(self, newest: Pool) -> Json:
        """Pairs: a synthetic image, and the same with its dropped patches blanked (Fig. 6)."""
        first = [int((newest.makers == i).nonzero()[0]) for i in range(len(self.makers))][:12]
        x, inside = newest.images[first].float(), pixels_of(newest.keep[first], self.student.grid, self.student.patch)
        pairs = torch.cat([x, x.new_ones(*x.shape[:3], 2), torch.where(inside > 0, x, 1.0)], 3)  # white between them
        names = [f"{self.makers[int(newest.makers[i])]}: {self.task.classes[int(newest.labels[i])]}" for i in first]
        count, total = newest.keep.shape[1], self.student.patches
        note = f"Left as made, right without the {total - count} of {total} patches that were stopped."
        return {**gallery(pairs, names, note), "wide": True}


def loss_curve(losses: torch.Tensor, terms: Terms) -> Json:
    weights = {"whole images, KL": terms.whole, "kept patches, CE": terms.kept, "dropped patches, KL": terms.rest}
    series = {name: losses[:, i].tolist() for i, (name, weight) in enumerate(weights.items()) if weight}
    return {
        "kind": "lines",
        "x": list(range(1, len(losses) + 1)),
        "series": series,
        "x_label": "server epoch",
        "y_label": "loss",
        "note": "Mean over the epoch's steps, before weighting.",
    }


def label_table(pool: Pool, clients: Sequence[str], classes: Sequence[str]) -> Json:
    """What each client's images were made for (Fig. 3)."""
    note = "Images of the last epoch by the label that they were made for."
    return _by_client(pool, pool.labels, clients, classes, "made for", note)


def taken_table(pool: Pool, clients: Sequence[str], classes: Sequence[str]) -> Json:
    """What all clients together take each client's images for, and how often that is the label they were made for."""
    outputs = pool.whole.argmax(1)
    agreement = float((outputs == pool.labels).float().mean())
    note = f"Images of the last epoch by what the clients together take them for; {agreement:.0%} are what they were made for."
    return _by_client(pool, outputs, clients, classes, "taken for", note)


def _by_client(pool: Pool, labels: torch.Tensor, clients: Sequence[str], classes: Sequence[str], title: str, note: str) -> Json:
    values = [torch.bincount(labels[pool.makers == i], minlength=len(classes)).tolist() for i in range(len(clients))]
    return {
        "kind": "heatmap",
        "rows": list(clients),
        "columns": list(classes),
        "values": values,
        "row_title": "made from",
        "column_title": title,
        "unit": "images",
        "note": note,
    }


def lipschitz(norms: torch.Tensor) -> dict[str, Json]:
    """The measured theorem: the largest gradient norm on either side, the means, and whether L_Fed < L_DI held, with weights
    that sum to 1 and with those of Eq. 17."""
    columns = dict(zip(("DI", "Fed", "Eq17"), norms.T, strict=True))
    largest: dict[str, Json] = {f"L_{name}": round(float(column.max()), 4) for name, column in columns.items()}
    means: dict[str, Json] = {f"mean_{name}": round(float(column.mean()), 4) for name, column in columns.items()}
    most = norms.max(0).values
    held: dict[str, Json] = {"held": bool(most[1] < most[0]), "held_Eq17": bool(most[2] < most[0])}
    return {**largest, **means, "images": len(norms), **held}


def norm_figure(norms: torch.Tensor, terms: Terms) -> Json:
    """Both distributions, and what the second one is: a student that agrees with its teachers about dropped patches has hardly
    any gradient from them, and then L_Fed is little more than the label's gradient times its share."""
    found, most = lipschitz(norms), float(norms.max())
    share = terms.kept / ((terms.kept + terms.rest) or 1.0)
    bins = torch.linspace(0, most if most > 0 else 1.0, 21)
    counts = {
        name: torch.histogram(norms[:, i].contiguous(), bins).hist.int().tolist()
        for i, name in enumerate(("hard labels on all patches", "relabeled patches", "relabeled patches, Eq. 17"))
    }
    note = (
        f"L_Fed < L_DI held: {'yes' if found['held'] else 'no'}. Largest norm {found['L_DI']:.3g} with hard labels on all "
        f"patches, {found['L_Fed']:.3g} with relabeled ones; means {found['mean_DI']:.3g} and {found['mean_Fed']:.3g}, over "
        f"{len(norms)} images, the same for all. That relabeled loss is {share:.0%} cross-entropy on kept patches and "
        f"{1 - share:.0%} KL on dropped ones, without the KL on whole images; where the KL asks for little, that share alone "
        f"makes L_Fed the smaller one. With Eq. 17's own weights, 1 for the label and {terms.rest:g} for the KL, it held: "
        f"{'yes' if found['held_Eq17'] else 'no'} (largest norm {found['L_Eq17']:.3g})."
    )
    return {
        "kind": "histogram",
        "bins": bins.tolist(),
        "series": counts,
        "x_label": "gradient norm",
        "y_label": "images",
        "note": note,
        "measured": found,
    }


def inverted_client(method: ModelMethod, uploads: Sequence[Upload], part: Part, ctx: Context) -> Payload:
    """Images of one client in one epoch, wherever they are computed; what `PatchServer` does with its own networks."""
    facts, upload = part.payload.facts, uploads[0]
    how = facts["inversion"]
    inversion = SparseInversion(**{**how, "events": tuple((int(step), float(share)) for step, share in how["events"])})
    student = build_model(str(facts["student"]), method.task)
    load_named(student, part.payload.tensors, "student")
    rng = ctx.generator("images", upload.client, facts["epoch"])
    labels = draw_labels(method.settings.images, part.payload.tensors["wanted"], rng)
    model, server = (as_vit(freeze(one)).to(ctx.device) for one in (method.upload_model(upload, ctx), student))
    found = invert_sparsely(model, labels, method.task.image, inversion, rng, server=server, device=ctx.device)
    return Payload(
        {"images": halved(found.images, inversion.lr).cpu().contiguous(), "labels": labels, "keep": found.keep.cpu()}
    )


# --- small parts -----------------------------------------------------------------------------------------------------------


def as_vit(model: nn.Module) -> Vit:
    if isinstance(model, Vit):
        return model
    raise UsageError(
        f"{type(model).__name__} has no patches to drop: clients and server need vision transformers",
        field="architecture",
        fix="Use vit, deit_tiny or another ViT of `osfl ls architectures`.",
    )


def halved(images: torch.Tensor, lr: float) -> torch.Tensor:
    """As 16-bit floats; pixels beyond their range would be infinite, and the student's fault when it sees them."""
    found = images.half()
    if bool(found.isfinite().all()):
        return found
    raise TrainingError(
        f"inversion gave pixels up to {float(images.abs().max()):.3g}, beyond 16-bit floats",
        field="pixel_lr",
        got=lr,
        fix="Lower it (`--set pixel_lr=...`), or keep pixels in range (`--set clamp=true`).",
    )


def label_weights(how: str, counts: torch.Tensor) -> torch.Tensor:
    """How likely each client is asked for each class, (clients, classes), not yet normalized."""
    if how == "uniform":
        return torch.ones_like(counts)
    return (counts > 0).double() if how == "seen" else counts.double()


def study_flops(student: Vit, kept: int, others: int, terms: Terms, image: tuple[int, int, int]) -> float:
    """Of one image in one pass of the student, with so many patches kept and so many dropped."""
    total = training_flops(student, image) if terms.whole else 0.0
    subsets = ((terms.kept, kept), (terms.rest, others))
    return total + sum(training_flops(OnSubset(student, count), image) for weight, count in subsets if weight and count)


def ask_flops(member: Vit, others: int, image: tuple[int, int, int]) -> float:
    """Of asking one client about one image, and once more about its dropped patches where there are any."""
    return forward_flops(member, image) + (forward_flops(OnSubset(member, others), image) if others else 0.0)


HEAVY = 1e9  # operations of one image from which on a rehearsal makes fewer of them


def shortened_inversion(method: ModelMethod) -> dict[str, tuple[object, object]]:
    s = method.settings
    heavy = max(forward_flops(build_model(name, method.task), method.task.image) for name in method.architectures()) > HEAVY
    steps = {"steps": (2, 4), "images": (2, 2)} if heavy else {"steps": (6, 12)}
    follow: dict[str, tuple[object, object]] = {"stops": ("", "")} if getattr(s, "stops", "") else {}
    follow |= {"student_epochs": (1, 2)} if s.student_epochs else {}
    return {**steps, "passes": (1, 2), **follow}


def relabel_work(settings: Any) -> tuple[float, ...]:
    """Steps of the inversions, images asked about and images studied; `relabel_flops` has their operations."""
    epochs, made = settings.server_epochs, settings.images
    last, first = settings.pool_epochs or epochs, settings.order == "images_first"
    pools = [min(epochs, last)] * studies(settings) if first else [min(epoch + 1, last) for epoch in range(epochs)]
    return (1, epochs * settings.steps * made, epochs * made, sum(pools) * made * settings.passes)


def relabel_flops(method: ModelMethod, clients: Sequence[ClientId], inversion: SparseInversion, terms: Terms) -> float:
    """All operations of Algorithm 1, known before anything runs: the same as the meter counts."""
    settings, image = method.settings, method.task.image
    names = [architecture_for(settings.architecture, client) for client in clients]
    built = {name: as_vit(build_model(name, method.task)) for name in {*names, settings.student or min(names)}}
    student, members = built[settings.student or min(names)], [built[name] for name in names]
    kept = patches_left(student.patches, inversion.events)
    asked_again = student.patches - kept if terms.rest else 0
    new, epochs = settings.images * len(members), settings.server_epochs
    last, first = settings.pool_epochs or epochs, settings.order == "images_first"
    pools = [min(epochs, last)] * studies(settings) if first else [min(epoch + 1, last) for epoch in range(epochs)]
    seen = sum(pools) * new * settings.passes
    total: float = seen * study_flops(student, kept, student.patches - kept, terms, image)
    for member in members:
        dreamed = sparse_flops(member, image, inversion) * (new if settings.invert == "ensemble" else settings.images)
        against = sparse_flops(student, image, inversion) * settings.images if inversion.js else 0.0
        total += epochs * (dreamed + against + new * ask_flops(member, asked_again, image))
    return total
