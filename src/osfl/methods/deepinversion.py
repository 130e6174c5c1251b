"""DeepInversion — images optimized from noise until the client models recognize them train the server's model.

Paper: Yin et al., "Dreaming to Distill: Data-free Knowledge Transfer via DeepInversion", CVPR 2020; here as a federated
baseline. The server descends on pixels with CE + TV + BN statistics (`invert`), asks the clients about the finished images
once, and distills (`distill`). With `adi` > 0, 1 - JS(student, teacher) is added (`disagreement`): new images are made where
the student, as it is then, still disagrees, so `rounds` should be at least 2.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn

from osfl.core.method import Context, Part, Phase
from osfl.core.types import ClientId, Payload, Release, Upload
from osfl.ingredients.distillation.student import Pool, distill
from osfl.ingredients.ensembles.ensemble import COUNTED, fast_logits
from osfl.ingredients.ensembles.paging import made_of, networks_limit, some_of
from osfl.ingredients.generators.pictures import by_class
from osfl.ingredients.generators.synthesis import student_problems
from osfl.ingredients.inversion.pixels import Pixels, Watched, invert, labels_for, pixel_problems
from osfl.ingredients.inversion.trajectories import Teacher, teacher_of
from osfl.ingredients.statistics.claimed_counts import capped_sites
from osfl.ingredients.statistics.site_prior import OneClassifier, SitePrior
from osfl.ingredients.training.local import CPU_TRAINING, SMOKE_TRAINING, Training, too_low
from osfl.ingredients.training.model_method import Combine, ModelMethod, Student, counts_of, digests_of, start_student, teachers
from osfl.ingredients.training.one_upload import by_client
from osfl.models.build import build_model
from osfl.models.folding import freeze
from osfl.models.naming import load_named, named


@dataclass(frozen=True)
class Settings(SitePrior, Training, Student, Pixels):
    steps: int = 2000  # T, descent steps on the pixels
    ensemble: Combine = "logits"  # how the clients' answers become one teacher
    invert: Literal["ensemble", "clients"] = "ensemble"  # what dreams up images: all clients as one, or each by itself
    guides: Literal["everyone", "makers"] = "everyone"  # who answers: all clients, or the one whose images they are
    batches: int = 8  # batches of images that each maker makes in a round; the paper leaves it open
    rounds: int = 1  # images, then distillation on all images so far, so often
    adi: float = 0.0  # weight of the disagreement between student and teacher (adaptive DeepInversion)
    l2: float = 0.0  # weight of the images' norm
    server_epochs: int = 200  # passes over all images in a round; the distillation loop was never published
    student_batch: int = 128  # images a step of the student
    student_lr: float = 0.1  # the student's learning rate
    student_decay: float = 1e-4  # weight decay of the student
    temperature: float = 3.0  # softens teacher and student
    hard: float = 0.0  # weight of cross-entropy on the labels that images were made for
    noise_std: float = 0.0  # added to images while distilling, in units of the pixel range [-1, 1]
    mirror: bool = False  # mirror images at random while distilling
    ask_again: bool = False  # ask the guides about each changed image, not once about the original


class DeepInversion(OneClassifier, ModelMethod):
    Settings = Settings
    COMBINES = True
    PRIVATE = {**ModelMethod.PRIVATE, "ensemble": "logits", "labels": "balanced"}  # noqa: RUF012
    PRESETS = {  # noqa: RUF012
        "paper": {},
        "cpu": {  # guided by validation images of bloodcells-28; see the method's card
            **CPU_TRAINING,
            "images": 192,
            "steps": 100,
            "pixel_lr": 0.1,
            "tv": 2.5e-2,
            "flip": True,
            "clamp": True,
            "labels": "seen",
            "ensemble": "odds",
            "invert": "clients",
            "batches": 1,
            "temperature": 1.0,
            "server_epochs": 80,
            "student_lr": 0.05,
            "noise_std": 0.1,
            "mirror": True,
            "ask_again": True,
        },
        "smoke": {**SMOKE_TRAINING, "steps": 4, "images": 16, "batches": 1, "rounds": 2, "adi": 1.0, "server_epochs": 2},
    }
    DEVIATIONS = ("the paper has one teacher and no federation: here the clients are inverted together or one by one",)

    def problems(self, clients: int) -> list[str]:
        least = {
            "batches": 1,
            "rounds": 1,
            "server_epochs": 1,
            "student_batch": 2,
            "adi": 0,
            "l2": 0,
            "hard": 0,
            "noise_std": 0,
        }
        found = too_low(self.settings, least)
        if self.settings.ask_again and self.settings.guides == "makers":
            found.append("setting 'ask_again': only everyone can be asked again; set guides=everyone")
        if self.settings.adi and self.settings.rounds == 1:
            found.append("setting 'adi': there is no student to disagree with before the second round; set rounds=2 or more")
        found += student_problems(self.settings, self.architectures())
        return [*super().problems(clients), *pixel_problems(self.settings), *found]

    def needs_counts(self) -> bool:
        return bool(self.settings.ensemble in COUNTED or self.settings.labels != "balanced")

    def shortened(self) -> Mapping[str, tuple[object, object]]:
        rounds = {"rounds": (2, 3)} if self.settings.adi else {"rounds": (1, 2)}
        return {**super().shortened(), "steps": (4, 8), "batches": (1, 2), **rounds}

    def keeps(self) -> Sequence[str]:
        return ("batches", "rounds")

    def work(self, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
        """Steps of inversion, in rounds with and without a student to disagree with; batches answered, and studied."""
        if phase != "server":
            return super().work(phase, images, clients)
        s = self.settings
        studied = s.batches * s.rounds * (s.rounds + 1) / 2 * s.server_epochs
        return (1, s.batches * s.steps, (s.rounds - 1) * s.batches * s.steps, s.rounds * s.batches, studied)

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        uploads = by_client(uploads)
        student, architecture = start_student(uploads, self, ctx)
        members = teachers(uploads, self, ctx.device)
        everyone = teacher_of(uploads, members, self.settings.ensemble, len(self.task.classes), ctx.plan)
        key = {
            "what": "deepinversion",
            "settings": asdict(self.settings),
            "uploads": digests_of(uploads),
            "seed": ctx.plan.seed,
            "task": asdict(self.task),
            "share": ctx.plan.limits.share,
            "combine": ctx.plan.judging.combine,
        }
        pool: Pool | None = None

        def released() -> Payload:
            return Payload(named(student, "model"), {"architecture": architecture})

        for number in range(self.settings.rounds):
            pool = _joined(pool, self._images(uploads, members, student, architecture, number, {**key, "round": number}, ctx))

            def teach(pool: Pool = pool, number: int = number) -> Payload:
                return self._teach(student, pool, number, everyone, released, ctx)

            learned = ctx.get_or_compute({**key, "round": number, "student": True}, teach)
            load_named(student, learned.tensors, "model")
            ctx.progress("rounds", number + 1, self.settings.rounds)
        assert pool is not None and pool.labels is not None
        ctx.show("Synthetic images", by_class(pool.inputs, pool.labels, self.task.classes))
        return Release(released())

    def _images(
        self,
        uploads: Sequence[Upload],
        members: Sequence[nn.Module],
        student: nn.Module,
        architecture: str,
        number: int,
        key: Mapping[str, Any],
        ctx: Context,
    ) -> Pool:
        """New images of every maker, in parallel, each batch kept on its own; and what the guides say about them."""
        classes, mode, share = len(self.task.classes), self.settings.ensemble, ctx.plan.limits.share
        everyone = teacher_of(uploads, members, mode, classes, ctx.plan)
        single = [teacher_of([u], some_of(members, [i]), mode, classes, ctx.plan) for i, u in enumerate(uploads)]
        makers = [everyone] if self.settings.invert == "ensemble" else single
        claimed = capped_sites(counts_of(uploads, classes), share)
        counts = dict(zip([u.client for u in uploads], claimed, strict=True))

        students = named(student, "student") if self.settings.adi else {}
        parts = [
            Part(
                maker.clients,
                Payload(
                    {**students, "seen": torch.stack([counts[client] for client in maker.clients]).sum(0)},
                    {"round": number, "batch": batch, "architecture": architecture},
                ),
                functools.partial(dict, key, maker=maker.name, batch=batch),
            )
            for maker in makers
            for batch in range(self.settings.batches)
        ]
        by_name = {maker.clients: maker for maker in makers}
        made = ctx.spread(self, dreamed, uploads, parts, lambda part: self._batch(by_name[part.clients], part, student, ctx))
        inputs, labels = (torch.cat([payload.tensors[name] for payload in made]) for name in ("inputs", "labels"))
        logits = fast_logits(members, inputs, run_map=ctx.map, device=ctx.device)
        if self.settings.guides == "everyone" or self.settings.invert == "ensemble":
            return Pool(inputs, everyone.combine(logits).cpu(), labels)
        answers = torch.split(logits, self.settings.images * self.settings.batches, 1)  # by maker, all members' answers
        own = [maker.combine(part[i : i + 1]) for i, (maker, part) in enumerate(zip(single, answers, strict=True))]
        return Pool(inputs, torch.cat(own).cpu(), labels)

    def _batch(self, maker: Teacher, part: Part, student: nn.Module | None, ctx: Context) -> Payload:
        settings, number = self.settings, part.payload.facts["round"]
        rng = ctx.generator("images", maker.name, number, part.payload.facts["batch"])
        labels = labels_for(settings.labels, settings.images, part.payload.tensors["seen"], rng)
        images = invert(
            [Watched(member) for member in maker.members],
            labels,
            self.task.image,
            settings.inversion(adi=settings.adi if number else 0.0, l2=settings.l2),  # nothing to disagree with at first
            rng,
            student=freeze(student).to(ctx.device) if settings.adi and student is not None else None,
            device=ctx.device,
            combine=maker.combine,
        )
        return Payload({"inputs": images.cpu().contiguous(), "labels": labels})

    def _teach(
        self,
        student: nn.Module,
        pool: Pool,
        number: int,
        everyone: Teacher,
        released: Callable[[], Payload],
        ctx: Context,
    ) -> Payload:
        settings = self.settings
        frozen = everyone.of(made_of(everyone.members, freeze, networks_limit(ctx.device)))

        def progress(done: int, total: int) -> None:
            ctx.progress("distills", done, total)
            ctx.milestone(number * total + done, settings.rounds * total, released)

        distill(
            student,
            pool,
            ctx.generator("distil", number),
            epochs=settings.server_epochs,
            batch_size=settings.student_batch,
            lr=settings.student_lr,
            weight_decay=settings.student_decay,
            temperature=settings.temperature,
            hard=settings.hard,
            noise=settings.noise_std,
            mirror=settings.mirror,
            ask=frozen if settings.ask_again else None,
            device=ctx.device,
            progress=progress,
        )
        return Payload(named(student, "model"))


def dreamed(method: DeepInversion, uploads: Sequence[Upload], part: Part, ctx: Context) -> Payload:
    """One batch of one maker's images, wherever it is computed."""
    members = [method.upload_model(upload, ctx).to(ctx.device) for upload in uploads]
    maker = teacher_of(uploads, members, method.settings.ensemble, len(method.task.classes), ctx.plan)
    student = None
    if method.settings.adi:
        student = build_model(str(part.payload.facts["architecture"]), method.task)
        load_named(student, part.payload.tensors, "student")
    return method._batch(maker, part, student, ctx)


def _joined(old: Pool | None, new: Pool) -> Pool:
    if old is None:
        return new
    assert old.labels is not None and new.labels is not None
    return Pool(*(torch.cat(pair) for pair in ((old.inputs, new.inputs), (old.teacher, new.teacher), (old.labels, new.labels))))
