"""Distillation along an inversion trajectory: intermediate images, teachers adapted to noise, and a student.

Paper: Kang et al., "One-Shot Federated Learning on Medical Data using Knowledge Distillation with Image Synthesis and
Client Model Adaptation" (FedISCA), MICCAI 2023; FedBiCross builds on it. At step t of T the student learns
λ KD(F̃(x), G(x)) + (1 - λ) KD(F(x), G(x)) with λ = 1 - t/T: early images are noise, where the adapted F̃ is the better guide.
"""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

import torch
from torch import nn

from osfl.core.errors import TrainingError
from osfl.core.method import Context, Part
from osfl.core.types import Payload, Plan, Upload
from osfl.ingredients.distillation.student import kd_loss
from osfl.ingredients.ensembles.ensemble import COUNTED, Combination
from osfl.ingredients.ensembles.paging import made_of
from osfl.ingredients.inversion.pixels import Inversion, Watched, invert, labels_for
from osfl.ingredients.statistics.averaging import Combine as Robust
from osfl.ingredients.statistics.claimed_counts import capped_sites
from osfl.ingredients.training.local import not_positive, too_low
from osfl.ingredients.training.model_method import ModelMethod, counts_of, teacher_weights
from osfl.models.flops import forward_flops, training_flops
from osfl.models.folding import freeze
from osfl.models.norms import norms
from osfl.runtime.devices import wide
from osfl.runtime.meter import spend
from osfl.runtime.precision import gradients

Reading = Literal["running", "batch_stats"]
Item = TypeVar("Item")
Out = TypeVar("Out")
_AHEAD_BYTES = 1 << 30  # trajectories that are larger together are not made ahead of their time
_FORGOTTEN = 1e-7  # images whose weight in the running average is below float32's resolution need not be visited


@dataclass(frozen=True)
class Following:
    """How a student follows trajectories; mixed into Settings. Defaults are FedISCA's."""

    repetitions: int = 100  # new noise, new images and one pass along them, so often
    every: int = 1  # keep each so many-th step of a trajectory; the paper keeps all
    noise_teacher: Reading = "running"  # the equation: adapted running statistics; batch_stats: as FedISCA's code does
    temperature: float = 20.0  # softens teachers and student
    student_lr: float = 1e-3  # of the student
    student_momentum: float = 0.9  # of the student's SGD
    student_decay: float = 5e-4  # weight decay of the student
    student_schedule: Literal["steps", "cosine", "constant"] = "steps"  # over the repetitions
    student_clip: float = 0.0  # largest norm of the student's gradient; 0 = do not clip


def following_problems(settings: Following) -> list[str]:
    """Settings that teach nothing, a sentence each."""
    least = {"repetitions": 1, "every": 1, "student_momentum": 0, "student_decay": 0, "student_clip": 0}
    return too_low(settings, least) + not_positive(settings, "temperature", "student_lr")


# --- teachers ----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Teacher:
    """Clients that teach as one: who they are, their networks, and how their answers are combined."""

    clients: tuple[str, ...]
    members: Sequence[nn.Module]
    mode: str = "logits"
    weights: torch.Tensor | None = None
    share: float = 1.0  # the cap of weights by claimed counts
    robust: Robust = "mean"

    @property
    def name(self) -> str:
        return "+".join(self.clients)

    @functools.cached_property
    def combine(self) -> Combination:  # (members, batch, classes) -> (batch, classes)
        return Combination(len(self.clients), self.mode, self.weights, self.share, self.robust)

    def of(self, members: Sequence[nn.Module]) -> Teacher:
        """The same clients with other networks, as adapted or frozen copies are."""
        return replace(self, members=members)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.combine(torch.stack([member(x) for member in self.members]))


def teacher_of(uploads: Sequence[Upload], members: Sequence[nn.Module], mode: str, classes: int, plan: Plan) -> Teacher:
    """These clients as one teacher, in one of the ensemble modes, by the plan's cap of claimed counts and its robust rule."""
    weights = teacher_weights(uploads, mode, classes) if mode in ("size", *COUNTED) else None
    clients = tuple(upload.client for upload in uploads)
    return Teacher(clients, members, mode, weights, plan.limits.share, plan.judging.combine)


# --- trajectories ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trajectory:
    """Images x^(t) at the kept steps, (kept, n, channels, height, width), in memory of their own, as float16 or float32."""

    images: torch.Tensor
    times: tuple[float, ...]  # t/T of each kept step; the last is 1
    labels: torch.Tensor

    def at(self, place: int) -> torch.Tensor:
        return self.images[place].float().contiguous(memory_format=torch.channels_last)

    def __len__(self) -> int:
        return len(self.times)


def record(
    teacher: Teacher,
    labels: torch.Tensor,
    image: tuple[int, int, int],
    settings: Inversion,
    rng: torch.Generator,
    *,
    every: int = 1,
    half: bool = True,
    device: torch.device | None = None,
) -> Trajectory:
    """Invert the teacher and keep the intermediate images; the last step is always kept."""
    kept = [t for t in range(1, settings.steps + 1) if (settings.steps - t) % every == 0]
    place = {t: i for i, t in enumerate(kept)}
    images = torch.empty((len(kept), len(labels), *image), dtype=torch.float16 if half else torch.float32, device=device)

    def keep(t: int, x: torch.Tensor) -> None:
        if t in place:
            images[place[t]].copy_(x)  # a copy: x itself goes on changing

    watched = [Watched(member) for member in teacher.members]
    invert(watched, labels, image, settings, rng, each=keep, device=device, combine=teacher.combine)
    return Trajectory(images, tuple(t / settings.steps for t in kept), labels)


@torch.no_grad()
def adapted(model: nn.Module, trajectory: Trajectory, beta: float = 0.9) -> nn.Module:
    """A copy whose BN statistics were updated backwards along the trajectory: m ← β m + (1 - β) μ(x^(t)) for t = T…1.

    The weight of x^(t) is (1 - β) β^(t-1): the earliest, noisiest images count most. As in torch, the variance is unbiased.
    """
    network = copy.deepcopy(model).eval().requires_grad_(False)
    for norm in norms(network):
        norm.momentum = 1 - beta
        norm.train()
    visited = [place for place in range(len(trajectory)) if beta**place > _FORGOTTEN]
    for place in reversed(visited):
        network(trajectory.at(place))
    spend(forward_flops(network, tuple(trajectory.images.shape[2:])) * trajectory.images.shape[1] * len(visited))
    return network.eval()


def in_batch_mode(model: nn.Module) -> nn.Module:
    """A copy that normalizes with the statistics of each batch, as FedISCA's public code does; nothing in it moves."""
    network = copy.deepcopy(model).eval().requires_grad_(False)
    for norm in norms(network):
        norm.momentum = 0.0
        norm.train()
    return network


@torch.no_grad()
def answers(teacher: Teacher, trajectory: Trajectory) -> torch.Tensor:
    """The teacher's outputs at each kept step, (kept, n, classes); computed once, however often a student asks. One member
    after the other answers all steps, so that there need be only one in memory."""
    _, n, *shape = trajectory.images.shape

    def answered(member: nn.Module) -> torch.Tensor:
        spend(forward_flops(member, tuple(shape)) * n * len(trajectory))
        return torch.stack([member(trajectory.at(place)) for place in range(len(trajectory))])

    outputs = torch.stack([answered(member) for member in teacher.members], 1)  # (kept, members, n, classes)
    return torch.stack([teacher.combine(each) for each in outputs])


def noise_adapted(teacher: Teacher, trajectory: Trajectory, reading: Reading) -> Teacher:
    """F̃, in either reading of the papers."""
    if reading == "batch_stats":
        return teacher.of(made_of(teacher.members, in_batch_mode))
    return teacher.of(made_of(teacher.members, lambda member: freeze(adapted(member, trajectory))))


@dataclass(frozen=True)
class Lesson:
    """A trajectory with both teachers' answers to it: all that a student needs."""

    trajectory: Trajectory
    clean: torch.Tensor  # F(x^(t)), (kept, n, classes)
    noisy: torch.Tensor  # F̃(x^(t))

    def payload(self) -> Payload:
        """As it travels between processes."""
        images, labels = self.trajectory.images, self.trajectory.labels
        tensors = {"images": images, "labels": labels, "clean": self.clean, "noisy": self.noisy}
        return Payload(tensors, {"times": list(self.trajectory.times)})

    def on(self, device: torch.device) -> Lesson:
        path = Trajectory(self.trajectory.images.to(device), self.trajectory.times, self.trajectory.labels)
        return Lesson(path, self.clean.to(device), self.noisy.to(device))


def lesson_from(payload: Payload) -> Lesson:
    found = payload.tensors
    return Lesson(Trajectory(found["images"], tuple(payload.facts["times"]), found["labels"]), found["clean"], found["noisy"])


def lesson(
    makers: Teacher,
    guides: Teacher,
    labels: torch.Tensor,
    image: tuple[int, int, int],
    settings: Inversion,
    rng: torch.Generator,
    *,
    every: int,
    reading: Reading,
    device: torch.device | None = None,
) -> Lesson:
    """Images that `makers` dream up, with what `guides` say about them, before and after adaptation to noise."""
    trajectory = record(makers, labels, image, settings, rng, every=every, device=device)
    clean = answers(guides.of(made_of(guides.members, freeze)), trajectory)
    return Lesson(trajectory, clean, answers(noise_adapted(guides, trajectory, reading), trajectory))


class Lessons:
    """Every maker's lesson of every repetition, in parallel. No lesson depends on a student, so that those of the next
    stretch of repetitions are made while students follow this one: workers need not wait for one another."""

    def __init__(
        self,
        makers: Sequence[Teacher],
        uploads: Sequence[Upload],
        method: ModelMethod,
        ctx: Context,
        guides: Teacher | None = None,
        images: int | None = None,
    ) -> None:
        self.makers, self.guides, self.ctx = makers, guides, ctx  # without guides, each maker guides along its own images
        self.uploads, self.method = uploads, method
        self.named = {maker.clients: maker for maker in makers}
        self.images = images or method.settings.images  # that each maker makes in a repetition
        self.settings, self.image = method.settings, method.task.image
        counts = capped_sites(counts_of(uploads, len(method.task.classes)), ctx.plan.limits.share)
        self.counts = dict(zip([upload.client for upload in uploads], counts, strict=True))
        self.parts = in_parts(self.settings.repetitions, len(makers))
        self._ready: dict[range, list[Lesson]] = {}

    def take(self, part: range) -> list[list[Lesson]]:
        """The lessons of these repetitions, each a list over the makers."""
        made = self._ready.pop(part, None) or self._made(self._tasks(part))
        return [made[start : start + len(self.makers)] for start in range(0, len(made), len(self.makers))]

    def beside(self, part: range, work: Callable[[Item], Out], items: Sequence[Item]) -> list[Out]:
        """`ctx.map(work, items)`, which ends this part, while the lessons of the part after it are made."""
        after = next((other for other in self.parts if other.start == part.stop), range(0))
        if self._bytes(after) > _AHEAD_BYTES:
            return self.ctx.map(work, items)
        jobs: list[Callable[[], Any]] = [functools.partial(work, item) for item in items]
        tasks = self._tasks(after)
        ahead: list[Callable[[], Any]] = [functools.partial(self._make, task) for task in tasks]
        apart = self.ctx.spreads and bool(tasks)
        if apart:
            ahead = [functools.partial(self._made, tasks)]
        done = self.ctx.map(lambda job: job(), [*jobs, *ahead])
        made = done[len(jobs) :]
        self._ready = {after: made[0] if apart else made}
        return done[: len(jobs)]

    def _tasks(self, part: range) -> list[Part]:
        return [self._task(repetition, maker) for repetition in part for maker in self.makers]

    def _task(self, repetition: int, maker: Teacher) -> Part:
        """Whose uploads a lesson needs: its makers', and its guides'."""
        guides = self.guides.clients if self.guides else maker.clients
        clients = (*maker.clients, *(client for client in guides if client not in maker.clients))
        seen = torch.stack([self.counts[client] for client in maker.clients]).sum(0)
        facts = {"repetition": repetition, "makers": list(maker.clients), "guides": list(guides), "images": self.images}
        return Part(clients, Payload({"seen": seen}, facts))

    def _made(self, tasks: Sequence[Part]) -> list[Lesson]:
        found = self.ctx.spread(self.method, made_lesson, self.uploads, tasks, lambda task: self._make(task).payload())
        return [lesson_from(one).on(self.ctx.device) for one in found]

    def _bytes(self, part: range) -> int:
        s, (channels, height, width) = self.settings, self.image
        return int(len(self._tasks(part)) * (s.steps // s.every) * self.images * channels * height * width * 2)

    def _make(self, task: Part) -> Lesson:
        maker = self.named[tuple(task.payload.facts["makers"])]
        return lesson_for(self.method, maker, self.guides or maker, task, self.ctx)


def lesson_for(method: ModelMethod, maker: Teacher, guides: Teacher, task: Part, ctx: Context) -> Lesson:
    """The lesson of one maker in one repetition."""
    s, facts = method.settings, task.payload.facts
    rng = ctx.generator("trajectory", maker.name, facts["repetition"])
    labels = labels_for(s.labels, facts["images"], task.payload.tensors["seen"], rng)
    return lesson(
        maker,
        guides,
        labels,
        method.task.image,
        s.inversion(),
        rng,
        every=s.every,
        reading=s.noise_teacher,
        device=ctx.device,
    )


def made_lesson(method: ModelMethod, uploads: Sequence[Upload], task: Part, ctx: Context) -> Payload:
    """The same from the uploads alone, wherever it is computed."""
    sent = {upload.client: upload for upload in uploads}
    models = {client: method.upload_model(upload, ctx).to(ctx.device) for client, upload in sent.items()}

    def teacher(names: str) -> Teacher:
        clients = task.payload.facts[names]
        chosen, members = [sent[client] for client in clients], [models[client] for client in clients]
        return teacher_of(chosen, members, method.settings.ensemble, len(method.task.classes), ctx.plan)

    return lesson_for(method, teacher("makers"), teacher("guides"), task, ctx).payload()


# --- the student -----------------------------------------------------------------------------------------------------------


class Learner:
    """A student with SGD by hand, on flat vectors: bi-level weights need each source's gradient by itself."""

    def __init__(self, model: nn.Module, temperature: float, device: torch.device | None = None) -> None:
        self.device = device or torch.device("cpu")
        self.model = model.to(self.device).train()
        self.temperature = temperature
        self.parameters = list(model.parameters())
        self.largest = torch.zeros((), device=self.device)  # norm of a gradient so far
        self.velocity = torch.zeros(sum(p.numel() for p in self.parameters), device=self.device)
        self._flops = functools.cache(lambda image: training_flops(self.model, image))

    def gradient(
        self, lessons: Sequence[Lesson], place: int, index: torch.Tensor | None = None, track: bool | torch.Tensor = True
    ) -> torch.Tensor:
        """∇_G L_KD^(t), flat, on one batch of all these lessons' images at a kept step; `index` takes some of each.

        Without `track` the forward pass is in training mode but does not change the running statistics; where that depends on
        a number of the device, it is a tensor, so that nobody has to wait for it.
        """
        x, clean, noisy = (torch.cat(parts) for parts in zip(*(_at(one, place, index) for one in lessons), strict=True))
        share = 1 - lessons[0].trajectory.times[place]  # λ
        with _statistics(self.model, track):
            output = self.model(x.contiguous(memory_format=torch.channels_last))
            loss = share * kd_loss(noisy, output, self.temperature) + (1 - share) * kd_loss(clean, output, self.temperature)
            found = gradients(loss, self.parameters)
        spend(self._flops(tuple(x.shape[1:])) * len(x))
        return torch.cat([gradient.flatten() for gradient in found])

    @torch.no_grad()
    def step(self, direction: torch.Tensor, lr: float, momentum: float = 0.0, decay: float = 0.0, clip: float = 0.0) -> None:
        """One SGD step, as torch.optim.SGD does it. `check_finite` is to follow, after some of them."""
        size = direction.norm()
        self.largest = torch.maximum(self.largest, size)  # what is no number stays
        if clip:
            direction = direction * (clip / size.to(wide(self.device))).clamp_max(1)
        if decay:
            direction = direction + decay * torch.cat([p.flatten() for p in self.parameters])
        self.velocity.mul_(momentum).add_(direction)
        start = 0
        for parameter in self.parameters:
            change = self.velocity[start : start + parameter.numel()]
            parameter.sub_(lr * change.view(parameter.shape))
            start += parameter.numel()

    def check_finite(self, lr: float) -> None:
        """Stop if a gradient was not finite. Not asked at each step: a GPU would have to wait for the answer."""
        if not float(self.largest) < float("inf"):
            raise TrainingError(
                "the student's gradient is not finite",
                field="student_lr",
                got=lr,
                fix="Lower it (`--set student_lr=...`) or clip (`--set student_clip=5`).",
            )


def _at(one: Lesson, place: int, index: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    parts = one.trajectory.images[place], one.clean[place], one.noisy[place]
    images, clean, noisy = parts if index is None else (part[index] for part in parts)
    return images.float(), clean, noisy


@contextlib.contextmanager
def _statistics(model: nn.Module, track: bool | torch.Tensor) -> Iterator[None]:
    """Behind it, BN layers have the running statistics that they had before, unless `track`."""
    moving = [] if track is True else [value for norm in norms(model) for value in (norm.running_mean, norm.running_var)]
    kept = [(value, value.clone()) for value in moving if value is not None]
    yield
    for value, before in kept:
        value.copy_(torch.where(track, value, before) if isinstance(track, torch.Tensor) else before)


def in_parts(count: int, groups: int) -> list[range]:
    """Repetitions cut into stretches that are synthesized at once: two where there is one group, so that two cores work.

    The cut does not depend on the machine: a stretch is also what a killed run repeats.
    """
    size = 2 if groups == 1 else 1
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def kept_images(lessons: Sequence[Lesson]) -> dict[str, torch.Tensor]:
    """The finished images of each lesson and their labels, for pictures, as a payload keeps them."""
    images = {f"images/{i}": one.trajectory.images[-1].half().cpu() for i, one in enumerate(lessons)}
    return images | {f"labels/{i}": one.trajectory.labels for i, one in enumerate(lessons)}


def finished_images(payload: Payload) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The other way round: (images, labels) of each lesson."""
    count = sum(name.startswith("images/") for name in payload.tensors)
    return [(payload.tensors[f"images/{i}"].float(), payload.tensors[f"labels/{i}"]) for i in range(count)]
