"""Inversion and the server phases that are built on it, against what one writes first, at equal results.

    python -m benchmarks.inversion_speed

One process, variants interleaved, medians; the peak is a matrix product measured in the same run. The straightforward version:
torch's default memory order, hooks on batch norm, gradients for the weights too, total variation as its formula reads, all
cores inside each operation, and teachers asked again at every step of every student. Both draw the same random numbers, so
that images and students can be compared, and both profit from memory that the process keeps (`kept_memory` says how much).
`less_work` compares processor time with one thread an operation, which a busy neighbor does not change.
"""

from __future__ import annotations

import copy
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.measuring import medians, require_quiet
from osfl.core.method import Context
from osfl.core.seeds import torch_generator
from osfl.core.types import Payload, Plan, Task, Upload
from osfl.ingredients.distillation.student import kd_loss
from osfl.ingredients.inversion import trajectories
from osfl.ingredients.inversion.pixels import Inversion, Watched, balanced_labels, invert, labels_for
from osfl.ingredients.inversion.trajectories import Teacher, teacher_of
from osfl.ingredients.statistics.simplex import project
from osfl.ingredients.training.local import decay
from osfl.ingredients.training.model_method import counts_of, start_student
from osfl.methods import fedbicross, fedisca
from osfl.models.build import build_model
from osfl.models.flops import inversion_flops
from osfl.models.naming import named
from osfl.runtime import workers
from osfl.runtime.meter import measure
from osfl.runtime.workers import Workers, compute_threads, default_workers

TASK = Task("bench", tuple("abcdefgh"), (3, 28, 28))
CASES: Mapping[str, tuple[str, int, int, int]] = {  # architecture, images, steps, rounds
    "cnn": ("cnn-w16", 128, 4, 5),
    "resnet": ("resnet18-w16", 64, 2, 3),
}
SHORTER: Mapping[str, Any] = {"architecture": "cnn-w16", "steps": 6, "repetitions": 1}
SHORT: Mapping[str, Any] = {"architecture": "cnn-w16", "steps": 12, "repetitions": 2}  # the cpu preset, but for its length
Members = Sequence[nn.Module]


def run() -> dict[str, object]:
    require_quiet()
    return {name: part() for name, part in PARTS.items()}


# --- inversion ---------------------------------------------------------------------------------------------------------------


def _inversion(architecture: str, images: int, steps: int, rounds: int) -> dict[str, object]:
    """Five clients, each inverted by itself; ours in a pool of workers, one model each."""
    models, plain = _models(architecture, 5), [as_first_written(m) for m in _models(architecture, 5)]
    labels, settings, pool = balanced_labels(images, range(8)), Inversion(steps=steps), Workers()

    def ours() -> list[torch.Tensor]:
        return pool.map(lambda i: invert([Watched(models[i])], labels, TASK.image, settings, torch_generator(0, i)), range(5))

    def first() -> list[torch.Tensor]:
        return [plain_invert(Teacher(("",), [m]), labels, settings, torch_generator(0, i))[-1] for i, m in enumerate(plain)]

    seconds = medians({"plain": first, "ours": ours, "peak": _product}, rounds)
    with compute_threads(1):
        work = medians({"plain": first, "ours": ours}, 3, time.process_time)
    flops, peak = inversion_flops(models[0], TASK.image) * images * steps * 5, _PRODUCT / seconds["peak"]
    pairs = zip(models, ours(), first(), strict=True)
    gap = max(_relative(_loss(model, a, labels), _loss(model, b, labels)) for model, a, b in pairs)
    return {
        "architecture": architecture,
        "clients": 5,
        "images": images,
        "steps": steps,
        "rounds": rounds,
        "workers": default_workers(),
        "plain_s": round(seconds["plain"], 3),
        "ours_s": round(seconds["ours"], 3),
        "speedup": round(seconds["plain"] / seconds["ours"], 2),
        "aim": 2.5,
        "load_average": round(os.getloadavg()[0], 1),
        "plain_cpu_s": round(work["plain"], 3),
        "ours_cpu_s": round(work["ours"], 3),
        "less_work": round(work["plain"] / work["ours"], 2),
        "relative_gap_of_losses": gap,
        "gflops_ours": round(flops / seconds["ours"] / 1e9, 1),
        "gflops_peak": round(peak / 1e9, 1),
        "share_of_peak": round(flops / seconds["ours"] / peak, 3),
        "speedup_at_peak": round(seconds["plain"] * peak / flops, 2),
    }


_FACTORS = torch.randn(2, 2048, 2048, generator=torch_generator(0, "peak"))
_PRODUCT = 2 * 2048**3  # operations


def _product() -> torch.Tensor:
    """What the machine does best, with all cores."""
    return _FACTORS[0] @ _FACTORS[1]


def plain_invert(teacher: Teacher, labels: torch.Tensor, settings: Inversion, rng: torch.Generator) -> list[torch.Tensor]:
    """Every x^(t) of these models as one teacher, with forward hooks for the BN statistics."""
    terms: list[torch.Tensor] = []

    def hook(layer: Any, inputs: tuple[torch.Tensor], _: torch.Tensor) -> None:
        a = inputs[0]
        mean, var = a.mean((0, 2, 3)), a.var((0, 2, 3), unbiased=False)
        terms.append((mean - layer.running_mean).norm() + (var - layer.running_var).norm())

    norms = [m for model in teacher.members for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    handles = [norm.register_forward_hook(hook) for norm in norms]
    x = torch.randn((len(labels), *TASK.image), generator=rng).requires_grad_()
    optimizer, kept = torch.optim.Adam([x], settings.lr), []
    scale = (x.numel() / (256 * 3 * 32 * 32)) ** -0.5
    for _ in range(settings.steps):
        down, right = torch.randint(-settings.roll, settings.roll + 1, (2,), generator=rng).tolist()
        seen = torch.roll(x, (down, right), (2, 3))
        if settings.flip and bool(torch.rand((), generator=rng) < 0.5):
            seen = seen.flip(3)
        terms.clear()
        loss = functional.cross_entropy(teacher(seen), labels) + settings.tv * scale * _plain_variation(seen)
        loss = loss + settings.bn * sum(terms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if settings.clamp:
            with torch.no_grad():
                x.clamp_(-1, 1)
        kept.append(x.detach().clone())
    for handle in handles:
        handle.remove()
    return kept


def _plain_variation(x: torch.Tensor) -> torch.Tensor:
    right, down = x[..., :, :-1] - x[..., :, 1:], x[..., :-1, :] - x[..., 1:, :]
    falling, rising = x[..., :-1, :-1] - x[..., 1:, 1:], x[..., 1:, :-1] - x[..., :-1, 1:]
    total: torch.Tensor = right.norm() + down.norm() + falling.norm() + rising.norm()
    return total


def _loss(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        logits, term = Watched(model)(x)
        return float(functional.cross_entropy(logits, labels) + 10 * term)


# --- whole server phases ---------------------------------------------------------------------------------------------------


Plain = Callable[[Any, Sequence[Upload], Context], Members]


def _server(method: Any, plain: Plain, **more: Any) -> dict[str, object]:
    """The cpu preset's sizes, with fewer steps; everything that is asked once an image or once a step keeps its share."""
    settings = method.Settings(**{**method.PRESETS["cpu"], **SHORT, **more})
    server, uploads = method(TASK, settings), _uploads(settings.architecture, 5)
    ctx = _context(settings, uploads)
    found: dict[str, Any] = {}

    def ours(name: str = "ours") -> None:
        with compute_threads(1):
            found[name] = server.server_phase(uploads, ctx)

    def first() -> None:
        found["plain"] = plain(server, uploads, ctx)

    seconds = medians({"plain": first, "ours": ours, "peak": _product}, 3)
    with compute_threads(1):
        work = medians({"plain": first, "ours": ours}, 1, time.process_time)
    peak = _PRODUCT / seconds["peak"]
    record = trajectories.record
    trajectories.record = partial(record, half=False)  # equal results are equal without rounding to 16 bits
    with measure() as spent:
        ours("exact")
    trajectories.record = record
    return {
        "settings": {"preset": "cpu", **SHORT, **more},
        "clients": 5,
        "rounds": 3,
        "plain_s": round(seconds["plain"], 2),
        "ours_s": round(seconds["ours"], 2),
        "speedup": round(seconds["plain"] / seconds["ours"], 2),
        "aim": 3.0,
        "load_average": round(os.getloadavg()[0], 1),
        "plain_cpu_s": round(work["plain"], 2),
        "ours_cpu_s": round(work["ours"], 2),
        "less_work": round(work["plain"] / work["ours"], 2),
        "gflops_ours": round(spent.flops / seconds["ours"] / 1e9, 1),
        "gflops_peak": round(peak / 1e9, 1),
        "share_of_peak": round(spent.flops / seconds["ours"] / peak, 3),
        "largest_relative_gap_of_students": _gap(found["exact"], found["plain"]),
        "the_same_with_16_bit_trajectories": _gap(found["ours"], found["plain"]),
    }


class _PlainTeacher:
    """Clients as one, their images on the way from noise to class, and the networks adapted to them."""

    def __init__(self, server: Any, uploads: Sequence[Upload], chosen: Sequence[int], members: Members, plan: Plan) -> None:
        mine = [uploads[i] for i in chosen]
        self.settings: Any = server.settings
        self.clean = teacher_of(mine, [members[i] for i in chosen], self.settings.ensemble, len(TASK.classes), plan)
        self.seen = counts_of(mine, len(TASK.classes)).sum(0)

    def dream(self, guides: Teacher, ctx: Context, repetition: int, images: int) -> None:
        s, rng = self.settings, ctx.generator("trajectory", self.clean.name, repetition)
        steps = plain_invert(self.clean, labels_for(s.labels, images, self.seen, rng), s.inversion(), rng)
        kept = [(t, x) for t, x in enumerate(steps, 1) if (s.steps - t) % s.every == 0]
        self.trajectory = [x for _, x in kept]
        self.times: list[float] = [t / s.steps for t, _ in kept]
        self.guides, self.noisy = guides, guides.of([_plain_adapted(member, self.trajectory) for member in guides.members])

    def loss(self, student: nn.Module, place: int, index: torch.Tensor) -> torch.Tensor:
        x = self.trajectory[place][index]
        logits: torch.Tensor = student(x)
        return self.compare(x, logits, place)

    def compare(self, x: torch.Tensor, logits: torch.Tensor, place: int) -> torch.Tensor:
        with torch.no_grad():
            calm, wild = self.guides(x), self.noisy(x)
        share, tau = 1 - self.times[place], float(self.settings.temperature)
        return share * kd_loss(wild, logits, tau) + (1 - share) * kd_loss(calm, logits, tau)


def _plain_fedisca(server: Any, uploads: Sequence[Upload], ctx: Context) -> list[nn.Module]:
    """Each client's images; all clients guide, and are asked again on each of the passes of the student."""
    s, members = server.settings, [as_first_written(server.build(u.payload)) for u in uploads]
    everyone = teacher_of(uploads, members, s.ensemble, len(TASK.classes), ctx.plan)
    makers = [_PlainTeacher(server, uploads, [i], members, ctx.plan) for i in range(len(uploads))]
    student = as_first_written(start_student(uploads, server, ctx)[0]).train()
    optimizer = _sgd(student, s)
    for repetition in range(s.repetitions):
        for maker in makers:
            maker.dream(everyone, ctx, repetition, math.ceil(s.images / len(makers)))
        _set_rate(optimizer, s, repetition)
        for place in [*range(len(makers[0].trajectory))] * s.passes:
            images = [maker.trajectory[place] for maker in makers]
            parts = student(torch.cat(images)).chunk(len(makers))
            loss = sum(m.compare(x, logits, place) for m, x, logits in zip(makers, images, parts, strict=True)) / len(makers)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[union-attr]
            nn.utils.clip_grad_norm_(student.parameters(), s.student_clip)
            optimizer.step()
    return [student]


def _plain_fedbicross(server: Any, uploads: Sequence[Upload], ctx: Context) -> list[nn.Module]:
    """Every cluster's student asks every cluster's teachers again."""
    s, members = server.settings, [as_first_written(server.build(u.payload)) for u in uploads]
    groups, start = server._clusters([server.build(u.payload) for u in uploads], ctx)
    makers = [_PlainTeacher(server, uploads, group, members, ctx.plan) for group in groups]
    students = [as_first_written(start_student([uploads[i] for i in g], server, ctx)[0]).train() for g in groups]
    optimizers, weights = [_sgd(student, s) for student in students], list(start)
    train, val = server._split(ctx)
    for repetition in range(s.repetitions):
        for maker in makers:
            maker.dream(maker.clean, ctx, repetition, s.images)
        for k, student in enumerate(students):
            _set_rate(optimizers[k], s, repetition)
            for place in range(len(makers[0].trajectory)):
                weights[k] = _plain_bilevel(student, optimizers[k], k, weights[k], makers, place, s, train, val)
    return students


def _plain_bilevel(
    student: nn.Module,
    optimizer: torch.optim.Optimizer,
    k: int,
    w: torch.Tensor,
    makers: Sequence[_PlainTeacher],
    place: int,
    s: Any,
    train: torch.Tensor,
    val: torch.Tensor,
) -> torch.Tensor:
    parameters = list(student.parameters())
    sources = [torch.autograd.grad(maker.loss(student, place, train), parameters) for maker in makers]
    for place_of, parameter in enumerate(parameters):
        parameter.grad = sum(float(w[j]) * g[place_of] for j, g in enumerate(sources))  # type: ignore[assignment]
    nn.utils.clip_grad_norm_(parameters, s.student_clip)
    optimizer.step()
    kept = copy.deepcopy(dict(student.named_buffers()))
    held = torch.autograd.grad(makers[k].loss(student, place, val), parameters)
    for n, b in student.named_buffers():
        b.copy_(kept[n])
    flat = torch.cat([a.flatten() for a in held]).double()
    inner = torch.stack([flat @ torch.cat([b.flatten() for b in g]).double() for g in sources])
    return project(w + s.weight_lr * inner / (float(inner.abs().max()) + 1e-12))


def _sgd(student: nn.Module, s: Any) -> torch.optim.SGD:
    return torch.optim.SGD(student.parameters(), s.student_lr, momentum=s.student_momentum, weight_decay=s.student_decay)


def _set_rate(optimizer: torch.optim.Optimizer, s: Any, repetition: int) -> None:
    optimizer.param_groups[0]["lr"] = s.student_lr * decay(s.student_schedule, repetition, s.repetitions)


def _plain_adapted(member: nn.Module, trajectory: Sequence[torch.Tensor]) -> nn.Module:
    network = copy.deepcopy(member).train()
    with torch.no_grad():
        for x in reversed(trajectory):
            network(x)
    return network.eval()


def _gap(release: Any, students: Sequence[nn.Module]) -> float:
    """Largest relative distance between our students and the straightforward ones, layer by layer."""
    if release.personal:
        ours = {p.facts["cluster"]: p.tensors for p in release.personal.values()}
    else:
        ours = {0: release.shared.tensors}
    gaps = []
    for k, student in enumerate(students):
        for name, tensor in named(student, "model").items():
            if tensor.is_floating_point():
                gaps.append(float((ours[k][name] - tensor).norm() / (tensor.norm() + 1e-12)))
    return max(gaps)


def _scaling() -> dict[str, object]:
    """Our server phases with more clients, the `cpu` preset but fewer steps; linear growth would be 4 from 5 to 20."""
    return {"aim": 4.0, "fedisca": _growth(fedisca.FedISCA), "fedbicross": _growth(fedbicross.FedBiCross)}


def _growth(method: Any) -> dict[str, object]:
    settings = method.Settings(**{**method.PRESETS["cpu"], **SHORTER})
    server = method(TASK, settings)

    def phase(count: int) -> Callable[[], object]:
        uploads = _uploads(settings.architecture, count)
        ctx = _context(settings, uploads)

        def work() -> None:
            with compute_threads(1):
                server.server_phase(uploads, ctx)

        return work

    seconds = medians({str(n): phase(n) for n in (5, 10, 20)}, 3)
    growth = round(seconds["20"] / seconds["5"], 2)
    return {
        "settings": {"preset": "cpu", **SHORTER},
        "seconds": {n: round(s, 2) for n, s in seconds.items()},
        "growth_5_to_20": growth,
    }


def _memory() -> dict[str, object]:
    """Training steps of a small network in a process that keeps freed memory, and in one that leaves it to the C library."""
    seconds: dict[str, float] = {}
    for turn in ("kept", "default") * 2:
        command = [sys.executable, "-m", "benchmarks.inversion_speed", turn]
        done = subprocess.run(command, capture_output=True, check=True, text=True)
        seconds[turn] = min(seconds.get(turn, float("inf")), float(done.stdout))
    speedup = round(seconds["default"] / seconds["kept"], 2)
    return {"what": "30 student steps, cnn-w16, 160 images", "best_of": 2, "seconds": seconds, "speedup": speedup}


def _student_steps(keep: bool) -> float:
    """Seconds of such steps; the first ones warm up."""
    if keep:
        workers.keep_freed_memory()
    student, x = _models("cnn-w16", 1)[0].train(), torch.randn((160, *TASK.image), generator=torch_generator(0, "x"))
    target, x = torch.zeros(160, 8), x.contiguous(memory_format=torch.channels_last)

    def steps() -> None:
        for _ in range(30):
            torch.autograd.grad(kd_loss(target, student(x)), list(student.parameters()))

    with compute_threads(1):
        return round(medians({"": steps}, 3)[""], 3)


# --- shared ------------------------------------------------------------------------------------------------------------------


def _models(architecture: str, count: int) -> Sequence[nn.Module]:
    """Models with BN statistics of their own."""
    models = [build_model(architecture, TASK, torch_generator(0, "member", i)) for i in range(count)]
    with torch.no_grad():
        for i, model in enumerate(models):
            model.train()(torch.randn((32, *TASK.image), generator=torch_generator(0, "statistics", i)))
            model.eval()
    return models


def as_first_written(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload,no-any-return]


def _uploads(architecture: str, count: int) -> list[Upload]:
    """As clients send them; everyone has seen some of the classes."""
    made = []
    for i, model in enumerate(_models(architecture, count)):
        seen = torch.randint(-50, 100, (len(TASK.classes),), generator=torch_generator(0, "counts", i)).clamp_min(0)
        facts = {"architecture": architecture, "samples": int(seen.sum()), "class_counts": seen.tolist()}
        made.append(Upload(f"client-{i:02d}", "", Payload(named(model, "model"), facts)))
    return made


def _context(settings: Any, uploads: Sequence[Upload]) -> Context:
    plan = Plan(TASK, "bench", settings, tuple(upload.client for upload in uploads))
    return Context(plan, torch.device("cpu"), map=Workers().map)


def _relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b)


PARTS: Mapping[str, Callable[[], dict[str, object]]] = {
    **{f"inversion_{name}": partial(_inversion, *case) for name, case in CASES.items()},
    "fedisca": lambda: _server(fedisca.FedISCA, _plain_fedisca),
    "fedbicross": lambda: _server(fedbicross.FedBiCross, _plain_fedbicross, clusters=3),
    "clients": _scaling,
    "kept_memory": _memory,
}

if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(_student_steps(keep=sys.argv[1] == "kept"))
    else:
        for name, part in PARTS.items():
            print(json.dumps({name: part()}, indent=2), flush=True)
