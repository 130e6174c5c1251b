"""Data-free distillation with a generator: frozen clients as one teacher, generator steps, a student on a growing pool.

The outer loop is DENSE's (Zhang et al., NeurIPS 2022): a new generator each epoch makes a batch that the teacher takes for
given labels, and the student then passes over all batches so far. What a method adds is the generator's objective and
what it does to the pool before the student sees it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import TrainingError
from osfl.core.method import Context
from osfl.core.types import Json, Payload, Upload
from osfl.ingredients.distillation.order import StudyOrder, order_problems, progress_report, studies, turns
from osfl.ingredients.distillation.student import kd_loss
from osfl.ingredients.ensembles.ensemble import Combination
from osfl.ingredients.generators.pictures import by_class
from osfl.ingredients.inversion.pixels import Watched
from osfl.ingredients.statistics.averaging import Combine as Robust
from osfl.ingredients.statistics.claimed_counts import capped
from osfl.ingredients.training.local import batches, decay, step
from osfl.ingredients.training.model_method import (
    Combine,
    ModelMethod,
    Student,
    counts_of,
    start_student,
    teacher_weights,
    teachers,
)
from osfl.models.flops import forward_flops, inversion_flops, training_flops
from osfl.models.folding import freeze
from osfl.models.generators import Generator, build_generator
from osfl.models.inputs import to_images, to_input
from osfl.models.naming import load_named, named
from osfl.runtime.devices import ahead
from osfl.runtime.meter import spend
from osfl.runtime.payloads import payload_digest
from osfl.runtime.precision import descend

Objective = Callable[["Seen"], torch.Tensor]  # the generator's loss, a number
Touch = Callable[["Batch"], tuple[torch.Tensor, torch.Tensor]]  # inputs and teacher's answers that the student learns from
Draw = Callable[[int, torch.Generator], Sequence[torch.Tensor]]  # random numbers for a batch of so many


def draw_nothing(_: int, __: torch.Generator) -> Sequence[torch.Tensor]:
    return ()


@dataclass(frozen=True)
class Synthesis(StudyOrder, Student):
    """The server's part of a method that synthesizes by generators; defaults are DENSE's."""

    ensemble: Combine = "logits"  # how clients become one; class_count and odds add class counts to the upload
    server_epochs: int = 200  # T: each makes new images and teaches the student
    generators: int = 1  # independent ones an epoch, at the same time
    generator_steps: int = 30  # T_G: Adam steps on the generator and its noise
    generator_lr: float = 1e-3  # Adam, betas 0.5 and 0.999
    generator_width: int = 128  # channels of its first layers
    latent_dim: int = 256  # numbers that an image is made from
    synthesis_batch: int = 128  # images of one generator
    shift: int = 4  # random shift in pixels, and mirroring, before the networks see an image
    bn: float = 1.0  # weight of the BN statistics, mean over clients (lambda_1)
    adversarial: float = 0.5  # weight of the disagreement between teacher and student (lambda_2)
    pool_batches: int = 0  # newest generator batches that the student still sees; 0 = all
    passes: int = 1  # of the student over the pool, each epoch
    student_batch: int = 128  # images a step of the student
    student_lr: float = 0.01  # SGD
    student_momentum: float = 0.9  # of its SGD
    student_decay: float = 0.0  # weight decay
    student_cosine: bool = False  # bring the student's learning rate to zero over the epochs
    student_clip: float = 0.0  # largest gradient norm; 0 = do not clip
    temperature: float = 20.0  # of distillation
    hard: float = 0.0  # weight of cross-entropy on the label that an image was made for
    noise_std: float = 0.0  # Gaussian noise on what the student sees, in units of [-1, 1]


# --- settings that cannot work -----------------------------------------------------------------------------------------

POSITIVE = (
    "server_epochs",
    "generators",
    "generator_steps",
    "generator_lr",
    "generator_width",
    "latent_dim",
    "passes",
    "student_lr",
    "temperature",
)
NOT_NEGATIVE = (
    "shift",
    "bn",
    "adversarial",
    "pool_batches",
    "student_momentum",
    "student_decay",
    "student_clip",
    "hard",
    "noise_std",
)
PAIRS = ("synthesis_batch", "student_batch")  # batch norm needs two


def out_of_range(settings: Any, positive: Sequence[str], not_negative: Sequence[str], pairs: Sequence[str]) -> list[str]:
    """Settings outside their range, a sentence each."""
    found = [
        f"setting {name!r}: expected a positive number, got {value}"
        for name in positive
        if not ((value := getattr(settings, name)) > 0 and math.isfinite(value))
    ]
    found += [
        f"setting {name!r}: expected zero or more, got {value}"
        for name in not_negative
        if not ((value := getattr(settings, name)) >= 0 and math.isfinite(value))
    ]
    return found + [
        f"setting {name!r}: expected at least 2, got {value}" for name in pairs if (value := getattr(settings, name)) < 2
    ]


def student_problems(settings: Any, architectures: Sequence[str]) -> list[str]:
    """Starting from averaged weights needs one architecture for everybody."""
    everyone = {*architectures, *([settings.student] if settings.student else [])}
    if settings.init == "average" and len(everyone) > 1:
        return [f"setting 'init': 'average' needs one architecture for clients and student, got {', '.join(sorted(everyone))}"]
    return []


def synthesis_problems(settings: Any, architectures: Sequence[str]) -> list[str]:
    found = out_of_range(settings, POSITIVE, NOT_NEGATIVE, PAIRS) + order_problems(settings)
    return found + student_problems(settings, architectures)


# --- what it costs (osfl.core.method) ---------------------------------------------------------------------------------


def shortened_synthesis(settings: Synthesis) -> dict[str, tuple[int, int]]:
    follows = {"student_epochs": (1, 2)} if settings.student_epochs else {}
    return {"server_epochs": (1, 2), "generator_steps": (2, 4), "passes": (1, 2), **follows}


def synthesis_work(settings: Synthesis) -> tuple[float, ...]:
    """Steps of the generators, batches that the teachers answer, and batches that the student passes over."""
    epochs, limit = settings.server_epochs, settings.pool_batches / settings.generators or math.inf
    interleaved = settings.order == "interleaved"
    pools = [min(e + 1, limit) for e in range(epochs)] if interleaved else [min(epochs, limit)] * studies(settings)
    return (1, epochs * settings.generator_steps, epochs, sum(pools) * settings.passes)


# --- the teacher -------------------------------------------------------------------------------------------------------


class Teacher:
    """All clients as one frozen teacher. `watch` keeps BN layers to compare statistics; otherwise they are folded away.

    Not for two threads at once: a watched network keeps notes of its forward pass.
    """

    def __init__(
        self,
        members: Sequence[nn.Module],
        mode: str,
        weights: torch.Tensor,
        watch: bool,
        share: float = 1.0,
        robust: Robust = "mean",
    ) -> None:
        # weights that training changes later are capped here, by counts; odds are capped where votes are made of counts
        self.mode, self.share, self.members, self.robust = mode, share if mode == "odds" else 1.0, members, robust
        self.weights = weights if mode == "odds" else capped(weights, share)
        self.rule = Combination(len(members), mode, self.weights, self.share, robust)
        self.member_weights: torch.Tensor | None = None  # odds: how much each client counts beside its class counts
        self.watched = [Watched(member) for member in members] if watch else []
        self.folded = [] if watch else [freeze(member) for member in members]

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits (clients, batch, classes) and R_BN, the mean over clients."""
        if not self.watched:
            return torch.stack([member(x) for member in self.folded]), x.new_zeros(())
        answers = [member(x) for member in self.watched]
        return torch.stack([logits for logits, _ in answers]), torch.stack([term for _, term in answers]).mean()

    def combined(self, logits: torch.Tensor) -> torch.Tensor:
        """Members' logits as the teacher's, (batch, classes)."""
        if self.member_weights is not None:
            self.member_weights = self.member_weights.to(logits.device)
        return self.rule(logits, self.member_weights)

    def weigh(self, weights: torch.Tensor) -> None:
        """Members vote with these weights from now on; for odds, beside their class counts."""
        if self.mode == "odds":
            self.member_weights = weights
        else:
            self.weights = weights
            self.rule = Combination(len(self.members), self.mode, weights, self.share, self.robust)


def draw_labels(count: int, weights: torch.Tensor, rng: torch.Generator) -> torch.Tensor:
    """So many labels, each class as likely as its weight; a class of weight 0 never comes."""
    return torch.multinomial(weights.to(torch.float64), count, replacement=True, generator=rng)


# --- generator steps ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Seen:
    """What the networks say about a batch of synthetic images, for an objective."""

    teacher: torch.Tensor  # combined, (batch, classes)
    student: torch.Tensor  # (batch, classes)
    bn: torch.Tensor  # R_BN, mean over clients
    labels: torch.Tensor  # (batch,) the classes that the images are for


def masked_divergence(teacher: torch.Tensor, student: torch.Tensor) -> torch.Tensor:
    """-mean_b 1(argmax S != argmax E) KL(E || S): zero where they agree, so a student like its teacher stops it."""
    differ = teacher.argmax(-1) != student.argmax(-1)
    divergence = functional.kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="none", log_target=True)
    return -(divergence.sum(-1) * differ).mean()


def moved(x: torch.Tensor, shift: int, rng: torch.Generator) -> torch.Tensor:
    """The batch shifted by up to so many pixels, zeros coming in, and mirrored half of the time."""
    if shift:
        down, right = torch.randint(0, 2 * shift + 1, (2,), generator=rng).tolist()
        height, width = x.shape[-2:]
        x = functional.pad(x, (shift,) * 4)[..., down : down + height, right : right + width]
        if bool(torch.rand((), generator=rng) < 0.5):
            x = x.flip(-1)
    return x.contiguous(memory_format=torch.channels_last)


def synthesize(
    teacher: Teacher,
    student: nn.Module,
    labels: torch.Tensor,
    image: tuple[int, int, int],
    settings: Synthesis,
    rng: torch.Generator,
    objective: Objective,
    *,
    clip: float = 0.0,
    device: torch.device | None = None,
) -> torch.Tensor:
    """A new generator and its noise, trained for these labels; the images it ends with, uint8."""
    device = device or torch.device("cpu")
    generator = build_generator(image, rng, latent_dim=settings.latent_dim, width=settings.generator_width).to(device)
    z = torch.randn((len(labels), settings.latent_dim), generator=rng).to(device).requires_grad_()
    labels = labels.to(device)
    optimizer = torch.optim.Adam([*generator.parameters(), z], settings.generator_lr, betas=(0.5, 0.999))
    passes = len(labels) * settings.generator_steps
    spend(generator_flops(generator, [*teacher.members, student], image) * passes, makes=len(labels))
    shorten = functools.partial(nn.utils.clip_grad_norm_, [*generator.parameters(), z], clip)
    for _ in range(settings.generator_steps):
        loss = generator_loss(generator, z, labels, teacher, student, settings.shift, rng, objective)
        descend(optimizer, loss, shorten if clip else None)
    check_finite(loss, "generator", "generator_lr", settings.generator_lr)
    with torch.no_grad():
        return to_images(generator(z).cpu())


def generator_loss(
    generator: Generator,
    z: torch.Tensor,
    labels: torch.Tensor,
    teacher: Teacher,
    student: nn.Module,
    shift: int,
    rng: torch.Generator,
    objective: Objective,
) -> torch.Tensor:
    """One pass of noise through the generator and all networks to the objective."""
    x = moved(generator(z), shift, rng)
    logits, bn = teacher(x)
    return objective(Seen(teacher.combined(logits), student(x), bn, labels))


def generator_flops(generator: Generator, networks: Sequence[nn.Module], image: tuple[int, ...]) -> float:
    """Of one generator step for one image: its own training, and gradients to the pixels through these networks."""
    return training_flops(generator, (generator.linear.in_features,)) + sum(inversion_flops(n, image) for n in networks)


def check_finite(loss: torch.Tensor, whose: str, field: str, value: float) -> None:
    if not math.isfinite(float(loss.detach())):
        raise TrainingError(f"the {whose}'s loss is not finite", field=field, got=value, fix=f"Lower it (`--set {field}=...`).")


# --- the student -------------------------------------------------------------------------------------------------------


def keep(module: nn.Module, optimizer: torch.optim.Optimizer, prefix: str) -> dict[str, torch.Tensor]:
    """A network and its optimizer as named tensors, so that a stage can begin where the last one ended."""
    tensors = named(module, prefix)
    for name, parameter in module.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                tensors[f"{prefix}.{key}/{name}"] = value.detach().cpu().clone().contiguous()
    return tensors


def take_up(module: nn.Module, optimizer: torch.optim.Optimizer, prefix: str, tensors: Mapping[str, torch.Tensor]) -> None:
    """The other way round."""
    load_named(module, tensors, prefix)
    for name, parameter in module.named_parameters():
        for full, value in tensors.items():
            key, _, owner = full.removeprefix(f"{prefix}.").partition("/")
            if full.startswith(f"{prefix}.") and owner == name:
                # in the parameter's own memory order, which elementwise updates then keep
                like = torch.empty_like(parameter) if value.shape == parameter.shape else torch.empty_like(value)
                optimizer.state[parameter][key] = like.detach().copy_(value)


@dataclass(frozen=True)
class Batch:
    """A part of the pool that the student is about to learn from."""

    inputs: torch.Tensor  # in [-1, 1]
    logits: torch.Tensor  # of every client, (clients, batch, classes)
    drawn: Sequence[torch.Tensor] = ()  # random numbers for it


def spans(total: int, parts: int) -> Iterator[range]:
    """0..total cut into at most so many ranges."""
    size = max(1, math.ceil(total / parts))
    return (range(first, min(first + size, total)) for first in range(0, total, size))


def work_key(what: str, uploads: Sequence[Upload], method: ModelMethod, ctx: Context) -> dict[str, Json]:
    """Names work completely: what, from which uploads, with which settings and seed."""
    made_from = {upload.client: payload_digest(upload.payload) for upload in uploads}
    return {
        "what": what,
        "from": made_from,
        "settings": asdict(method.settings),
        "seed": ctx.plan.seed,
        "task": asdict(method.task),
        "share": ctx.plan.limits.share,
        "combine": ctx.plan.judging.combine,
    }


def in_stages(
    ctx: Context, key: Mapping[str, Json], epochs: int, start: Payload, run: Callable[[Payload, range], Payload], parts: int = 8
) -> Payload:
    """Epochs in a few stages that are each kept, so that a killed server phase goes on from the last one."""
    payload = start
    for span in spans(epochs, parts):
        before = payload
        payload = ctx.get_or_compute(
            {**key, "epochs": [span.start, span.stop]},
            lambda before=before, span=span: run(before, span),  # type: ignore[misc]
        )
    return payload


class Workshop:
    """The server of DENSE and its heirs: teachers, a student with its optimizer, and the pool of images made so far."""

    def __init__(self, method: ModelMethod, uploads: Sequence[Upload], ctx: Context) -> None:
        self.ctx, self.settings, self.task = ctx, method.settings, method.task
        classes = len(method.task.classes)
        members = teachers(uploads, method, ctx.device)
        weights = teacher_weights(uploads, self.settings.ensemble, classes)
        watch, share, how = self.settings.bn > 0, ctx.plan.limits.share, ctx.plan.judging.combine
        # one a thread, because a watched network keeps notes
        self.teachers = [
            Teacher(members, self.settings.ensemble, weights, watch, share, how) for _ in range(self.settings.generators)
        ]
        # to predict, and for gradients to pixels
        self.folded = Teacher(members, self.settings.ensemble, weights, watch=False, share=share, robust=how)
        self.label_weights = (counts_of(uploads, classes).sum(0) > 0).double()  # every class that anyone has, as often
        self.student, self.architecture = start_student(uploads, method, ctx)
        self.student.to(ctx.device)
        self.optimizer = torch.optim.SGD(
            self.student.parameters(),
            self.settings.student_lr,
            momentum=self.settings.student_momentum,
            weight_decay=self.settings.student_decay,
        )
        self.images = torch.empty((0, *self.task.image), dtype=torch.uint8)
        self.labels = torch.empty(0, dtype=torch.int64)
        self.logits = torch.empty((len(members), 0, classes))  # every client's answers to the pool, asked once

    # --- what a stage leaves behind ---

    def release(self) -> Payload:
        """The student as it is now."""
        return Payload(named(self.student, "model"), {"architecture": self.architecture})

    def payload(self, **more: torch.Tensor) -> Payload:
        pool = {"pool/images": self.images, "pool/labels": self.labels, "pool/logits": self.logits}
        return Payload({**keep(self.student, self.optimizer, "model"), **pool, **more})

    def restore(self, payload: Payload) -> None:
        if not payload.tensors:
            return
        take_up(self.student, self.optimizer, "model", payload.tensors)
        self.images, self.labels = payload.tensors["pool/images"], payload.tensors["pool/labels"]
        self.logits = payload.tensors["pool/logits"]

    # --- one epoch ---

    def turn(self, number: int, grow: Callable[[int], None], study: Callable[[int], None]) -> None:
        """New images, a lesson, or one after the other, in the order of the settings."""
        images, lesson = turns(self.settings)[number]
        if images is not None:
            grow(images)
        if lesson is not None:
            study(lesson)
            self.ctx.milestone(lesson + 1, studies(self.settings), self.release)
        self.ctx.progress(*progress_report(self.settings, images, lesson, "synthesis"))

    def grow(self, epoch: int, objective: Objective, clip: float = 0.0) -> None:
        """New images by new generators; the oldest leave when the pool is full."""
        student = freeze(self.student)  # answers in evaluation mode, weights frozen

        def make(which: int) -> tuple[torch.Tensor, torch.Tensor]:
            rng = self.ctx.generator("generator", epoch, which)
            labels = draw_labels(self.settings.synthesis_batch, self.label_weights, rng)
            teacher = self.teachers[which]
            images = synthesize(
                teacher, student, labels, self.task.image, self.settings, rng, objective, clip=clip, device=self.ctx.device
            )
            return images, labels

        made = self.ctx.map(make, range(self.settings.generators))
        images, labels = torch.cat([i for i, _ in made]), torch.cat([y for _, y in made])
        limit = (self.settings.pool_batches or (epoch + 1) * self.settings.generators) * self.settings.synthesis_batch
        self.images = torch.cat([self.images, images])[-limit:]
        self.labels = torch.cat([self.labels, labels])[-limit:]
        self.logits = torch.cat([self.logits, self._ask(images)], 1)[:, -limit:]

    @torch.no_grad()
    def _ask(self, images: torch.Tensor) -> torch.Tensor:
        spend(sum(forward_flops(member, self.task.image) for member in self.folded.members) * len(images))
        return torch.cat([self.folded(to_input(part, self.ctx.device))[0].cpu() for part in torch.split(images, 128)], 1)

    def study(self, epoch: int, touch: Touch | None = None, draw: Draw = draw_nothing) -> None:
        """The student passes over the pool: KD, plus cross-entropy on the labels if `hard` is set. `draw` gives the random
        numbers that `touch` wants for a batch."""
        self.student.train()
        rate = decay("cosine" if self.settings.student_cosine else "constant", epoch, studies(self.settings))
        self.optimizer.param_groups[0]["lr"] = self.settings.student_lr * rate
        rng = self.ctx.generator("study", epoch)
        total = torch.zeros((), device=self.ctx.device)
        pool = tuple(value.to(self.ctx.device) for value in (self.images, self.labels, self.logits))
        for _ in range(self.settings.passes):
            for index, *drawn in ahead(self._steps(rng, draw), self.ctx.device):
                total += self._lesson(index, drawn, pool, touch or self._as_kept)
        check_finite(total, "student", "student_lr", self.settings.student_lr)
        spend(training_flops(self.student, self.task.image) * len(self.images) * self.settings.passes)
        self.student.eval()

    def _as_kept(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        return batch.inputs, self.folded.combined(batch.logits)

    def _steps(self, rng: torch.Generator, draw: Draw) -> Iterator[Sequence[torch.Tensor]]:
        """What each step of a pass draws: which images, what `touch` wants, and noise."""
        for index in batches(len(self.images), self.settings.student_batch, rng):
            drawn = [index, *draw(len(index), rng)]
            if self.settings.noise_std:
                drawn.append(torch.randn((len(index), *self.task.image), generator=rng))
            yield drawn

    def _lesson(
        self, index: torch.Tensor, drawn: Sequence[torch.Tensor], pool: Sequence[torch.Tensor], touch: Touch
    ) -> torch.Tensor:
        images, labels, logits = pool
        inputs, teacher = touch(Batch(to_input(images[index], self.ctx.device), logits[:, index], drawn))
        if self.settings.noise_std:
            inputs = inputs + self.settings.noise_std * drawn[-1]
        answer = self.student(inputs.contiguous(memory_format=torch.channels_last))
        loss = kd_loss(teacher, answer, self.settings.temperature)
        if self.settings.hard:
            loss = loss + self.settings.hard * functional.cross_entropy(answer, labels[index])
        step(self.student, self.optimizer, loss, clip=self.settings.student_clip)
        return loss.detach()

    def show(self) -> None:
        """The newest images of each class, for the report."""
        newest = slice(-self.settings.synthesis_batch * self.settings.generators, None)
        figure = by_class(
            to_input(self.images[newest]),
            self.labels[newest],
            self.task.classes,
            4,
            "Made by the last generators for the class named below each; never seen by any client.",
        )
        self.ctx.show("Synthetic images", figure)


class Pair:
    """One generator and one student that learn in turn, each with its optimizer: the server of DAFL and FedFTG."""

    def __init__(self, method: ModelMethod, uploads: Sequence[Upload], ctx: Context, classes: int = 0) -> None:
        self.ctx, self.task, settings = ctx, method.task, method.settings
        self.student, self.architecture = start_student(uploads, method, ctx)
        self.student.to(ctx.device)
        self.generator = build_generator(
            method.task.image,
            ctx.generator("generator"),
            latent_dim=settings.latent_dim,
            width=settings.generator_width,
            classes=classes,
            ending=settings.ending,
            start="uniform",
        ).to(ctx.device)
        self.maker = torch.optim.Adam(self.generator.parameters(), settings.generator_lr)
        self.learner = torch.optim.SGD(
            self.student.parameters(),
            settings.student_lr,
            momentum=settings.student_momentum,
            weight_decay=settings.student_decay,
        )

    def payload(self) -> Payload:
        student = keep(self.student, self.learner, "model")
        return Payload({**student, **keep(self.generator, self.maker, "generator")})

    def restore(self, payload: Payload) -> None:
        if payload.tensors:
            take_up(self.student, self.learner, "model", payload.tensors)
            take_up(self.generator, self.maker, "generator", payload.tensors)

    def draw(self, z: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        x: torch.Tensor = self.generator(z, labels)
        return x.contiguous(memory_format=torch.channels_last)

    def improve_generator(self, loss: torch.Tensor) -> torch.Tensor:
        step(self.generator, self.maker, loss)
        return loss.detach()

    def improve_student(self, loss: torch.Tensor, clip: float) -> torch.Tensor:
        step(self.student, self.learner, loss, clip=clip)
        return loss.detach()

    def spend(self, networks: Sequence[nn.Module], passed: int, studied: int, made: int) -> None:
        """Book so many passes of generator and networks and of the student; and how many images the student met."""
        image = self.task.image
        spend(generator_flops(self.generator, networks, image) * passed, makes=made)
        spend(training_flops(self.student, image) * studied)
