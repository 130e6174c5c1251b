"""FedBiCross — clients that answer alike form clusters; each cluster's student learns how much to learn from the others.

Paper: Xia, Zhang, Liu, Dai, Xia, "FedBiCross: A Bi-Level Optimization Framework to Tackle Non-IID Challenges in Data-Free
One-Shot Federated Learning on Medical Data", 2026, https://arxiv.org/abs/2601.01901v1. Stage 1 clusters clients by their
answers to noise (`kmeans`), inverts each cluster's teacher and keeps the trajectory (`lesson`). Stage 2 trains one student a
cluster on all clusters' images with weights w_k on the simplex: an SGD step on Σ_j w_kj L_KD^(j), then a projected step of w_k
on its own validation images, by the exact one-step hypergradient (`_bilevel_step`). Stage 3, at the client, fine-tunes the
cluster's model on its own images (`_personal_loss`).
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import TrainingError
from osfl.core.method import Context, Phase
from osfl.core.types import ADDED, ClientId, Payload, Release, Shard, Upload, one_by_one
from osfl.ingredients.distillation.student import kd_loss
from osfl.ingredients.ensembles.ensemble import COUNTED, fast_logits
from osfl.ingredients.ensembles.paging import some_of
from osfl.ingredients.generators.pictures import by_class
from osfl.ingredients.generators.synthesis import student_problems
from osfl.ingredients.inversion.pixels import Pixels, pixel_problems
from osfl.ingredients.inversion.trajectories import (
    Following,
    Learner,
    Lesson,
    Lessons,
    Teacher,
    finished_images,
    following_problems,
    kept_images,
    teacher_of,
)
from osfl.ingredients.statistics.kmeans import kmeans
from osfl.ingredients.training.local import (
    CPU_TRAINING,
    SMOKE_TRAINING,
    Training,
    batches_on,
    classifier,
    decay,
    local_model,
    not_positive,
    step,
    too_low,
)
from osfl.ingredients.training.model_method import Combine, ModelMethod, Student, digests_of, start_student, teachers
from osfl.ingredients.training.one_upload import by_client, picked
from osfl.methods.fedbicross.bilevel import hypergradient, learn
from osfl.methods.fedbicross.clustering import hierarchical, members_of, parameters, predictions, similarity
from osfl.models.inputs import to_input
from osfl.models.naming import load_named, named
from osfl.models.norms import recalibrated_bn
from osfl.runtime.devices import wide


@dataclass(frozen=True)
class Settings(Training, Student, Pixels, Following):
    repetitions: int = 1  # of synthesis and T student steps; the paper's text has one, FedISCA a hundred
    student_momentum: float = 0.0  # the inner step is plain SGD
    student_decay: float = 0.0
    student_schedule: Literal["steps", "cosine", "constant"] = "constant"
    ensemble: Combine = "logits"  # how the answers of a cluster's clients become one teacher
    clusters: int = 0  # K; 0 = the root of the number of clients, rounded up: 3, 4, 5 for 5, 10, 20, as in the tables
    clustering: Literal["predictions", "parameters", "hierarchical"] = "predictions"  # hierarchical: merged by their weights
    weights: Literal["learned", "uniform", "intra", "similarity"] = "learned"  # of the other clusters
    weight_lr: float = 0.05  # largest change of a weight in a step
    raw_weights: bool = False  # true: the step is weight_lr times the gradient, whatever its scale
    validation: float = 0.2  # share of the images that the weights are learned on
    # none: a control, in which no site learns anything from another
    server: Literal["distil", "none"] = field(default="distil", metadata=ADDED)  # none: stage 3 begins at the own upload
    personalize: bool = True  # stage 3
    personal_epochs: int = 10  # passes over the client's images in stage 3
    personal_lr: float = 1e-3  # learning rate of stage 3
    personal_batch: int = 128  # images a step of stage 3
    personal_schedule: Literal["steps", "cosine", "constant"] = "constant"  # of the learning rate, over stage 3
    personal_temperature: float = 1.0  # softens what stage 3 compares
    recalibrate_personal_bn: bool = False  # recompute BN statistics on the client's images before fine-tuning
    gamma: float = 0.5  # weight of KL(cluster's model || own)
    delta: float = 0.3  # weight of KL(local model || own)


class FedBiCross(ModelMethod):
    Settings = Settings
    COMBINES = True
    PRIVATE = {**ModelMethod.PRIVATE, "ensemble": "logits", "labels": "balanced"}  # noqa: RUF012
    PRESETS = {  # noqa: RUF012
        "paper": {},
        "cpu": {  # chosen on validation images of bloodcells-28 and skinlesions-28; see the method's card
            **CPU_TRAINING,
            "images": 64,
            "steps": 100,
            "pixel_lr": 0.1,
            "tv": 2.5e-2,
            "flip": True,
            "clamp": True,
            "labels": "seen",
            "ensemble": "class_count",
            "init": "average",
            "every": 2,
            "repetitions": 2,
            "temperature": 2.0,
            "student_lr": 0.005,
            "student_momentum": 0.9,
            "student_schedule": "cosine",
            "student_clip": 5.0,
            "weight_lr": 0.003,
            "recalibrate_personal_bn": True,
            "personal_epochs": 20,
            "personal_lr": 0.05,
            "personal_batch": 64,
            "personal_schedule": "cosine",
            "gamma": 0.1,
            "delta": 1.0,
        },
        "smoke": {
            **SMOKE_TRAINING,
            "images": 20,
            "steps": 4,
            "repetitions": 2,
            "student_lr": 0.01,
            "personal_epochs": 1,
        },
    }
    DEVIATIONS = (
        "clusters are found on probabilities, not logits: their scale differs between clients (the paper does not say)",
        "a weight changes by at most weight_lr a step: the paper gives no step size and raw inner products have no fixed scale",
        "all clusters' students begin at the same weights, and BN normalizes by each batch, also of validation images (not in "
        "the paper)",
        "the student's BN statistics follow only the clusters whose weight is above zero",
        "personalization uses SGD with momentum 0.9 and a temperature of 1 (the paper does not say)",
        "unless the settings say otherwise the student's steps are plain SGD, as in its equations (FedISCA's have momentum)",
        "trajectories are kept as 16-bit floats",
        "the student sees x^(t), the images after step t, where the paper's loss of step t has x^(t-1)",
        "of the paper's three alternatives of clustering, PACFL is missing: it needs subspaces of the clients' images",
    )

    # --- before the round ---

    def problems(self, clients: int) -> list[str]:
        s = self.settings
        found = [*super().problems(clients), *pixel_problems(s, least_images=10), *following_problems(s)]
        if not 0 <= s.clusters <= clients:
            found.append(f"setting 'clusters': expected 0 to {clients}, the number of clients, got {s.clusters}")
        if s.clustering != "predictions" and len(self.architectures()) > 1:
            found.append(f"setting 'clustering': {s.clustering!r} needs one architecture for all clients")
        found += student_problems(s, self.architectures())
        if not 0 < s.validation < 1:
            found.append(f"setting 'validation': expected a share between 0 and 1, got {s.validation}")
        found += too_low(s, {"personal_epochs": 1, "personal_batch": 2, "gamma": 0, "delta": 0, "weight_lr": 0})
        return found + not_positive(s, "personal_lr", "personal_temperature")

    def needs_counts(self) -> bool:
        return bool(self.settings.ensemble in COUNTED or self.settings.labels != "balanced")

    # --- stages 1 and 2, at the server ---

    def shortened(self) -> Mapping[str, tuple[object, object]]:
        every = self.settings.every
        after = {"personal_epochs": (1, 2)} if self.settings.personalize else {}
        return {**super().shortened(), "repetitions": (1, 2), "steps": (2 * every, 4 * every), **after}

    def keeps(self) -> Sequence[str]:
        return ("steps",)

    def work(self, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
        """Steps of the inversions, every so many-th of which students follow; the passes of stage 3."""
        s = self.settings
        if phase == "server":
            return (1, s.repetitions, s.repetitions * s.steps)
        if phase == "personalize":
            return (1, images, images * s.epochs, images * s.personal_epochs)
        return super().work(phase, images, clients)

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        uploads = by_client(uploads)
        if self.settings.server == "none":
            return Release(Payload({}), {one.client: Payload(one.payload.tensors, _architecture(one)) for one in uploads})
        members = teachers(uploads, self, ctx.device)
        groups, start = self._clusters(members, ctx)
        makers = [self._teacher(uploads, members, group, ctx) for group in groups]
        weights = start.clone()
        learners = [self._learner(uploads, group, ctx) for group in groups]
        history: list[torch.Tensor] = []
        kept = Payload({})
        key = {
            "what": "fedbicross",
            "version": 2,
            "settings": asdict(_server_side(self.settings)),
            "uploads": digests_of(uploads),
            "seed": ctx.plan.seed,
            "task": asdict(self.task),
            "share": ctx.plan.limits.share,
            "combine": ctx.plan.judging.combine,
        }
        made = Lessons(makers, uploads, self, ctx)
        for part in made.parts:

            def work(part: range = part, weights: torch.Tensor = weights) -> Payload:
                return self._repeat(part, made, learners, weights, ctx)

            kept = ctx.get_or_compute({**key, "until": part.stop}, work)
            weights = kept.tensors["weights"]
            history.append(kept.tensors["history"])
            for number, learner in enumerate(learners):
                load_named(learner.model, kept.tensors, f"cluster-{number}")
                learner.velocity = kept.tensors[f"velocity-{number}"].to(ctx.device, copy=True)
            ctx.progress("repetitions", part.stop, self.settings.repetitions)
        self._show(uploads, members, groups, weights, torch.cat(history, 1), finished_images(kept), ctx)
        return self._release(uploads, groups, learners, weights)

    def _clusters(self, members: Sequence[nn.Module], ctx: Context) -> tuple[list[list[int]], torch.Tensor]:
        """Stage 1: groups of clients, and the weights (clusters, clusters) to begin with."""
        s = self.settings
        points = predictions(members, self.task.image, ctx.generator("probes"), ctx.map, ctx.device)
        k = s.clusters or math.ceil(math.sqrt(len(members)))
        where = points if s.clustering == "predictions" else parameters(members)
        labels = hierarchical(where, k) if s.clustering == "hierarchical" else kmeans(where, k, ctx.generator("clusters"))
        groups = members_of(labels)
        count = len(groups)
        if s.weights == "intra":
            return groups, torch.eye(count, dtype=torch.float64)
        if s.weights == "similarity":
            return groups, similarity(points, groups)
        return groups, torch.full((count, count), 1 / count, dtype=torch.float64)

    def _teacher(self, uploads: Sequence[Upload], members: Sequence[nn.Module], group: Sequence[int], ctx: Context) -> Teacher:
        """F_k: the cluster's clients as one teacher."""
        chosen, classes = picked(uploads, group), len(self.task.classes)
        return teacher_of(chosen, some_of(members, group), self.settings.ensemble, classes, ctx.plan)

    def _learner(self, uploads: Sequence[Upload], group: Sequence[int], ctx: Context) -> Learner:
        """G_k: all clusters start from the same random weights, or from the average of their own clients."""
        student, _ = start_student(picked(uploads, group), self, ctx)
        return Learner(student, self.settings.temperature, ctx.device)

    def _repeat(self, part: range, made: Lessons, learners: Sequence[Learner], weights: torch.Tensor, ctx: Context) -> Payload:
        """Some repetitions: every cluster's images, then every cluster's student along all of them."""
        state: dict[str, torch.Tensor] = {}
        histories = []
        every, (train, val) = made.take(part), self._split(ctx)
        weights = weights.to(ctx.device, wide(ctx.device))
        for repetition, lessons in zip(part, every, strict=True):
            tasks = [(k, learner, lessons, weights[k], train, val, repetition) for k, learner in enumerate(learners)]
            at_once = functools.partial(made.beside, part) if repetition == part[-1] else ctx.map
            paths = torch.stack(at_once(lambda task: self._follow(*task), tasks))  # (clusters, kept steps, clusters)
            weights = paths[:, -1]
            histories.append(paths)
        for k, learner in enumerate(learners):
            state |= named(learner.model, f"cluster-{k}") | {f"velocity-{k}": learner.velocity.to("cpu", copy=True)}
        learned = {"weights": weights.cpu(), "history": torch.cat(histories, 1).cpu()}
        return Payload({**state, **kept_images(every[-1]), **learned})

    def _split(self, ctx: Context) -> tuple[torch.Tensor, torch.Tensor]:
        """Which images are for training and which for validation: the same at every step and in every cluster."""
        order = torch.randperm(self.settings.images, generator=ctx.generator("split"))
        held = min(max(2, round(self.settings.validation * len(order))), len(order) - 2)
        order = order.to(ctx.device)
        return order[held:], order[:held]

    def _follow(
        self,
        k: int,
        learner: Learner,
        lessons: Sequence[Lesson],
        weights: torch.Tensor,
        train: torch.Tensor,
        val: torch.Tensor,
        repetition: int,
    ) -> torch.Tensor:
        """Stage 2 for cluster k along one repetition; gives w_k after each step, (kept steps, clusters)."""
        lr = self.settings.student_lr * decay(self.settings.student_schedule, repetition, self.settings.repetitions)
        learned = self.settings.weights == "learned"
        used = [j for j, w in enumerate(weights.tolist()) if learned or w > 0]  # asked once: others than learned ones stay
        path = []
        for place in range(len(lessons[0].trajectory)):
            weights = self._bilevel_step(k, learner, lessons, weights, place, train, val, lr, used)
            path.append(weights)
        learner.check_finite(lr)
        return torch.stack(path)

    def _bilevel_step(
        self,
        k: int,
        learner: Learner,
        lessons: Sequence[Lesson],
        weights: torch.Tensor,
        place: int,
        train: torch.Tensor,
        val: torch.Tensor,
        lr: float,
        used: Sequence[int] = (),
    ) -> torch.Tensor:
        """Inner: G ← G - η Σ_j w_kj g_j. Outer: w_k ← Π(w_k + step ⟨g_val, g_j⟩), exact for this one step."""
        s, learned = self.settings, self.settings.weights == "learned" and len(lessons) > 1
        sources = {j: learner.gradient([lessons[j]], place, train, track=weights[j] > 0) for j in used or range(len(lessons))}
        total = torch.zeros_like(learner.velocity)
        for j, gradient in sources.items():
            total += weights[j] * gradient
        learner.step(total, lr, s.student_momentum, s.student_decay, s.student_clip)
        if not learned:
            return weights
        validation = learner.gradient([lessons[k]], place, val, track=False)
        slope = hypergradient(validation, list(sources.values()), lr, total, s.student_clip)
        return learn(weights, slope, s.weight_lr, s.raw_weights)

    def _release(
        self, uploads: Sequence[Upload], groups: Sequence[Sequence[int]], learners: Sequence[Learner], weights: torch.Tensor
    ) -> Release:
        """One model a cluster; who is in which cluster and the weights are known to all."""
        models = [named(learner.model, "model") for learner in learners]
        sent = [str(upload.payload.facts["architecture"]) for upload in uploads]
        architectures = [self.settings.student or min(sent[i] for i in group) for group in groups]
        personal = {
            uploads[i].client: Payload(models[k], {"architecture": architectures[k], "cluster": k})
            for k, group in enumerate(groups)
            for i in group
        }
        shares = [[round(float(w), 6) for w in row] for row in weights]
        names = [[uploads[i].client for i in group] for group in groups]
        return Release(Payload({}, {"clusters": names, "weights": shares}), personal)

    # --- stage 3, at the client ---

    def personalize(self, release: Release, shard: Shard, ctx: Context) -> Payload:
        given = release.for_client(shard.client)
        if not self.settings.personalize:
            return given
        cluster = classifier(given, self.task).to(ctx.device)
        if self.settings.recalibrate_personal_bn:
            cluster = recalibrated_bn(cluster, shard.train.images)
        local = classifier(local_model(shard, self.task, self.settings, ctx), self.task)
        guides = fast_logits([cluster, local], shard.train.images, run_map=one_by_one, device=ctx.device)
        own = copy.deepcopy(cluster)
        self._fine_tune(own, shard, guides, ctx)
        return Payload(named(own, "model"), given.facts)

    def _fine_tune(self, own: nn.Module, shard: Shard, guides: torch.Tensor, ctx: Context) -> None:
        s, rng = self.settings, ctx.generator("personal", shard.client)
        own.train()
        images, labels = shard.train.images.to(ctx.device), shard.train.labels.to(ctx.device)
        optimizer = torch.optim.SGD(own.parameters(), s.personal_lr, momentum=0.9)
        for epoch in range(s.personal_epochs):
            for group in optimizer.param_groups:
                group["lr"] = s.personal_lr * decay(s.personal_schedule, epoch, s.personal_epochs)
            total = torch.zeros((), device=ctx.device)
            for index in batches_on(ctx.device, len(shard.train), s.personal_batch, rng):
                loss = self._personal_loss(own(to_input(images[index], ctx.device)), labels[index], guides[:, index])
                step(own, optimizer, loss, clip=s.clip)
                total += loss.detach()
            if not math.isfinite(float(total)):
                raise TrainingError(
                    "personalization diverged: its loss is not finite",
                    client=shard.client,
                    field="personal_lr",
                    got=s.personal_lr,
                    fix="Lower it (`--set personal_lr=...`) or clip (`--set clip=5`).",
                )
        own.eval()

    def _personal_loss(self, sent: torch.Tensor, labels: torch.Tensor, guides: torch.Tensor) -> torch.Tensor:
        """CE + γ KL(G_k || f) + δ KL(f_i || f); `guides` are the logits of G_k and f_i, (2, batch, classes)."""
        s = self.settings
        loss = functional.cross_entropy(sent, labels)
        for weight, guide in ((s.gamma, guides[0]), (s.delta, guides[1])):
            loss = loss + weight * kd_loss(guide, sent, s.personal_temperature)
        return loss

    # --- pictures ---

    def _show(
        self,
        uploads: Sequence[Upload],
        members: Sequence[nn.Module],
        groups: Sequence[Sequence[int]],
        weights: torch.Tensor,
        history: torch.Tensor,
        pictures: Sequence[tuple[torch.Tensor, torch.Tensor]],
        ctx: Context,
    ) -> None:
        names = [f"cluster {k + 1}" for k in range(len(groups))]
        for name, (images, labels) in zip(names, pictures, strict=True):
            ctx.show(f"Synthetic images of {name}", by_class(images, labels, self.task.classes, each=2))
        ctx.show(
            "Cross-cluster weights",
            {
                "kind": "heatmap",
                "rows": names,
                "columns": names,
                "values": weights.tolist(),
                "row_title": "student",
                "column_title": "learns from",
                "note": "How much each cluster's student learns from each cluster's images.",
            },
        )
        ctx.show("Weights while learning", _evolution(history, names))
        ctx.show("Clusters", _assignment(uploads, groups, self.task.classes))
        ctx.show("Entropy of the teachers", self._entropy(uploads, members, groups, pictures, ctx))

    def _entropy(
        self,
        uploads: Sequence[Upload],
        members: Sequence[nn.Module],
        groups: Sequence[Sequence[int]],
        pictures: Sequence[tuple[torch.Tensor, torch.Tensor]],
        ctx: Context,
    ) -> dict[str, object]:
        """The paper's argument: averaging clients that conflict gives labels near uniform; clusters conflict less."""
        everyone = self._teacher(uploads, members, range(len(uploads)), ctx)
        # all at once: each client's network is read and frozen once, not once for each cluster
        asked = fast_logits(members, torch.cat([images for images, _ in pictures]), run_map=one_by_one, device=ctx.device).cpu()
        before, after = [], []
        for group, logits in zip(groups, asked.split([len(images) for images, _ in pictures], 1), strict=True):
            before.append(_entropies(everyone.combine(logits)))
            after.append(_entropies(self._teacher(uploads, members, group, ctx).combine(logits[list(group)])))
        most = math.log(len(self.task.classes))
        edges = [most * i / 20 for i in range(21)]
        counted = {
            name: torch.histc(torch.cat(values), 20, 0, most).int().tolist()
            for name, values in {"all clients": before, "own cluster": after}.items()
        }
        return {
            "kind": "histogram",
            "bins": edges,
            "series": counted,
            "x_label": "entropy of the answer (nats)",
            "y_label": "synthetic images",
            "note": f"Uniform answers would have {most:.2f}.",
        }


def _architecture(upload: Upload) -> dict[str, object]:
    return {"architecture": upload.payload.facts["architecture"]}


def _server_side(settings: Settings) -> Settings:
    """The same server phase serves any stage 3, so its kept work is not named after it."""
    plain = Settings()
    late = (
        "personalize",
        "personal_epochs",
        "personal_lr",
        "personal_batch",
        "personal_schedule",
        "personal_temperature",
        "recalibrate_personal_bn",
        "gamma",
        "delta",
    )
    return replace(settings, **{name: getattr(plain, name) for name in late})


def _entropies(logits: torch.Tensor) -> torch.Tensor:
    """At most log C, also where rounding gives a little more: a histogram that ends there would drop uniform answers."""
    log_p = logits.double().log_softmax(-1)
    return (-(log_p.exp() * log_p).sum(-1)).clamp_max(math.log(logits.shape[-1]))


def _evolution(history: torch.Tensor, names: Sequence[str]) -> dict[str, object]:
    """Weights (clusters, steps, clusters) as lines, thinned to some sixty points."""
    steps = history.shape[1]
    shown = sorted({round(i * (steps - 1) / 59) for i in range(60)})
    series = {
        f"{names[k]} from {names[j]}": history[k, shown, j].tolist() for k in range(len(names)) for j in range(len(names))
    }
    return {"kind": "lines", "x": [i + 1 for i in shown], "series": series, "x_label": "student step", "y_label": "weight"}


def _assignment(uploads: Sequence[Upload], groups: Sequence[Sequence[int]], classes: Sequence[str]) -> dict[str, object]:
    """Clients by cluster, with their label histograms where they sent them."""
    clients = {f"cluster {k + 1}": [uploads[i].client for i in group] for k, group in enumerate(groups)}
    counts = {one.client: one.payload.facts["class_counts"] for one in uploads if "class_counts" in one.payload.facts}
    return {"kind": "groups", "groups": clients, "classes": list(classes), **({"counts": counts} if counts else {})}
