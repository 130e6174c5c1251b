"""FedISCA — a student learns from each step of an inversion from noise to images, by teachers adapted to that noise.

Paper: Kang et al., "One-Shot Federated Learning on Medical Data using Knowledge Distillation with Image Synthesis and Client
Model Adaptation", MICCAI 2023. Each repetition inverts the ensemble of client models (`record`: CE + TV + BN statistics) and
keeps every step; adapts the clients' BN statistics backwards along it (`adapted`); and trains the student forwards along it
(`_train_along`) with α_t KD(E, S) + (1 - α_t) KD(Ẽ, S), α_t = t/T.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Literal

import torch

from osfl.core.method import Context, Phase
from osfl.core.types import ADDED, ClientId, Payload, Release, Upload
from osfl.ingredients.ensembles.ensemble import COUNTED
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
from osfl.ingredients.statistics.site_prior import OneClassifier, SitePrior
from osfl.ingredients.training.local import CPU_TRAINING, SMOKE_TRAINING, Training, decay
from osfl.ingredients.training.model_method import Combine, ModelMethod, Student, digests_of, start_student, teachers
from osfl.ingredients.training.one_upload import by_client
from osfl.models.naming import load_named, named

HELD_BYTES = 4 << 30  # trajectories of all repetitions, with order=images_first


@dataclass(frozen=True)
class Settings(SitePrior, Training, Student, Pixels, Following):
    ensemble: Combine = "logits"  # how the clients' answers become one teacher
    invert: Literal["ensemble", "clients"] = "ensemble"  # what dreams up images: all clients as one, or each its share of them
    guides: Literal["everyone", "makers"] = "everyone"  # who answers: all clients, or the one whose images they are
    passes: int = 1  # passes of the student along each trajectory; images cost far more than its steps
    # images_first: only when all trajectories are there, along all of them in each pass
    order: Literal["interleaved", "images_first"] = field(default="interleaved", metadata=ADDED)  # when the student learns


class FedISCA(OneClassifier, ModelMethod):
    Settings = Settings
    COMBINES = True
    PRIVATE = {**ModelMethod.PRIVATE, "ensemble": "logits", "labels": "balanced"}  # noqa: RUF012
    PRESETS = {  # noqa: RUF012
        "paper": {},
        "cpu": {  # guided by validation images of bloodcells-28; see the method's card
            **CPU_TRAINING,
            "images": 160,
            "steps": 90,
            "pixel_lr": 0.1,
            "tv": 2.5e-2,
            "bn": 3.0,
            "flip": True,
            "clamp": True,
            "labels": "seen",
            "ensemble": "class_count",
            "init": "average",
            "invert": "clients",
            "every": 3,
            "repetitions": 3,
            "passes": 6,
            "temperature": 1.0,
            "student_lr": 0.05,
            "student_schedule": "cosine",
            "student_clip": 5.0,
        },
        "smoke": {**SMOKE_TRAINING, "images": 16, "steps": 4, "repetitions": 3, "student_lr": 0.01},
    }
    DEVIATIONS = (
        "trajectories are kept as 16-bit floats",
        "the noise-adapted teacher answers by the equation unless `noise_teacher=batch_stats`, which is what the code does",
        "images move by up to 2 pixels at every size (the code: 30 above 128 px)",
        "the last iterate is reported; the published figures are the best epoch on test data",
    )

    def problems(self, clients: int) -> list[str]:
        found = student_problems(self.settings, self.architectures())
        found += [f"setting 'passes': expected at least 1, got {self.settings.passes}"] * (self.settings.passes < 1)
        found += self._too_large()
        return [*super().problems(clients), *pixel_problems(self.settings), *following_problems(self.settings), *found]

    def _too_large(self) -> list[str]:
        """All trajectories are held at once where the student learns behind the last of them."""
        s = self.settings
        needed = s.repetitions * (s.steps // max(1, s.every)) * s.images * math.prod(self.task.image) * 2
        if s.order == "interleaved" or needed <= HELD_BYTES:
            return []
        wanted, most = needed / 2**30, HELD_BYTES / 2**30
        return [
            f"setting 'order': images_first holds all trajectories, {wanted:.1f} GiB, and at most {most:.0f} GiB are allowed; "
            "raise `every`, or lower `repetitions` or `images`"
        ]

    def needs_counts(self) -> bool:
        return bool(self.settings.ensemble in COUNTED or self.settings.labels != "balanced")

    def shortened(self) -> Mapping[str, tuple[object, object]]:
        every = self.settings.every
        return {**super().shortened(), "repetitions": (1, 2), "steps": (2 * every, 4 * every), "passes": (1, 2)}

    def keeps(self) -> Sequence[str]:
        return ("steps",) if self.settings.order == "interleaved" else ("steps", "repetitions")

    def work(self, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
        """Repetitions, steps of their inversions, and steps that the student follows."""
        if phase != "server":
            return super().work(phase, images, clients)
        s, kept = self.settings, math.ceil(self.settings.steps / self.settings.every)
        return (1, s.repetitions, s.repetitions * s.steps, s.repetitions * kept * s.passes)

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        uploads = by_client(uploads)
        student, architecture = start_student(uploads, self, ctx)
        makers, everyone = self._teachers(uploads, ctx)
        learner = Learner(student, self.settings.temperature, ctx.device)
        kept = Payload({})
        key = {
            "what": "fedisca",
            "settings": asdict(self.settings),
            "uploads": digests_of(uploads),
            "seed": ctx.plan.seed,
            "task": asdict(self.task),
            "share": ctx.plan.limits.share,
            "combine": ctx.plan.judging.combine,
        }
        guides = everyone if self.settings.guides == "everyone" else None
        # a share each, so that time grows with the clients as it does for the ensemble, not with their square
        made = Lessons(makers, uploads, self, ctx, guides, images=math.ceil(self.settings.images / len(makers)))

        def released() -> Payload:
            return Payload(named(learner.model, "model"), {"architecture": architecture})

        def watch(passes: int) -> None:
            ctx.milestone(passes, self.settings.repetitions * self.settings.passes, released)

        for part in made.parts if self.settings.order == "interleaved" else [range(self.settings.repetitions)]:

            def work(part: range = part) -> Payload:
                lessons = made.take(part)
                made.beside(part, lambda mine: self._passes(learner, mine, part, watch), [lessons])
                state = {**named(learner.model, "model"), "velocity": learner.velocity.to("cpu", copy=True)}
                return Payload({**state, **kept_images(lessons[-1])})

            kept = ctx.get_or_compute({**key, "until": part.stop}, work)
            load_named(learner.model, kept.tensors, "model")
            learner.velocity = kept.tensors["velocity"].to(ctx.device, copy=True)
            ctx.progress("repetitions", part.stop, self.settings.repetitions)
        self._show(finished_images(kept), ctx)
        return Release(released())

    def _teachers(self, uploads: Sequence[Upload], ctx: Context) -> tuple[list[Teacher], Teacher]:
        """Who makes images, and all clients as one."""
        members, classes, mode = teachers(uploads, self, ctx.device), len(self.task.classes), self.settings.ensemble
        everyone = teacher_of(uploads, members, mode, classes, ctx.plan)
        if self.settings.invert == "ensemble":
            return [everyone], everyone
        return [teacher_of([u], some_of(members, [i]), mode, classes, ctx.plan) for i, u in enumerate(uploads)], everyone

    def _passes(self, learner: Learner, lessons: Sequence[Sequence[Lesson]], part: range, watch: Callable[[int], None]) -> None:
        """`watch` is told how many passes are done, of all repetitions."""
        s = self.settings
        if s.order == "interleaved":
            for repetition, mine in zip(part, lessons, strict=True):
                for number in range(s.passes):
                    self._train_along(learner, mine, 1, decay(s.student_schedule, repetition, s.repetitions))
                    watch(repetition * s.passes + number + 1)
            return
        for turn in range(s.passes * len(lessons)):
            self._train_along(
                learner, lessons[turn % len(lessons)], 1, decay(s.student_schedule, turn, s.passes * len(lessons))
            )
            watch(turn + 1)

    def _train_along(self, learner: Learner, lessons: Sequence[Lesson], passes: int, rate: float) -> None:
        """One student step for each kept step, forwards, `passes` times: the running statistics end at the finished images."""
        settings, lr = self.settings, self.settings.student_lr * rate
        for place in [*range(len(lessons[0].trajectory))] * passes:
            gradient = learner.gradient(lessons, place)
            learner.step(gradient, lr, settings.student_momentum, settings.student_decay, settings.student_clip)
        learner.check_finite(lr)

    def _show(self, pictures: Sequence[tuple[torch.Tensor, torch.Tensor]], ctx: Context) -> None:
        images, labels = (torch.cat(parts) for parts in zip(*pictures, strict=True))
        ctx.show("Synthetic images", by_class(images, labels, self.task.classes, note="Of the last repetition, at step T."))
