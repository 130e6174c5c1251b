"""Steps of FedISCA's inversion and of DENSE's and Co-Boosting's generators: ours against the same mathematics as first
written, in one run.

    python -m benchmarks.synthesis_speed

Five ResNet-18 of width 16 as teachers, one as student, 28 px, batch 32, one thread. As first written: torch's default memory
order, weight gradients computed and thrown away, BN statistics from forward hooks, doubling by repetition and then a 3x3
convolution. Variants are interleaved; medians; the peak is a matrix product measured in the same run, and `speedup_at_peak`
is what a step would gain that ran as fast as that. `all_cores`: one step of two generators, ours side by side, as the methods
train them, as first written one after the other with all cores inside each operation.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.inversion_speed import as_first_written, plain_invert
from benchmarks.measuring import medians, require_quiet
from osfl.core.seeds import torch_generator
from osfl.core.types import Task
from osfl.ingredients.generators.synthesis import Objective, Seen, Synthesis, Teacher, generator_flops, generator_loss
from osfl.ingredients.inversion.pixels import Inversion, Watched, balanced_labels, invert
from osfl.ingredients.inversion.trajectories import Teacher as Teaching
from osfl.methods.coboosting import CoBoosting
from osfl.methods.coboosting import Settings as CoBoostingSettings
from osfl.methods.dense import Dense
from osfl.methods.dense import Settings as DenseSettings
from osfl.models.build import build_model
from osfl.models.flops import inversion_flops
from osfl.models.folding import freeze
from osfl.models.generators import Generator, UpConv, build_generator
from osfl.runtime.workers import Workers, compute_threads, default_workers, keep_freed_memory

ROUNDS, BATCH, CLIENTS, IMAGE = 5, 32, 5, (3, 28, 28)
PUBLIC_SECONDS = {"fedisca": 1.02, "dense": 1.19, "coboosting": 1.36}  # public code, same sizes, one thread, such a machine
TASK = Task("bench", tuple("abcdefgh"), IMAGE)


def run() -> dict[str, object]:
    require_quiet()
    keep_freed_memory()  # as every run does
    with compute_threads(1):
        return {
            "fedisca": _inversion(),
            "dense": _case("dense", Dense(TASK, DenseSettings()).objective, DenseSettings()),
            "coboosting": _case("coboosting", CoBoosting(TASK, CoBoostingSettings()).objective, CoBoostingSettings()),
        }


def _case(name: str, objective: Objective, settings: Synthesis) -> dict[str, object]:
    members = [_trained(index) for index in range(CLIENTS)]
    student, watch = _trained("student"), settings.bn > 0
    ours, plain = Ours(members, student, objective, watch), AsFirstWritten(members, student, objective, watch)
    error = abs(ours.loss_and_gradient()[0] - plain.loss_and_gradient()[0])
    gap = (ours.loss_and_gradient()[1] - plain.loss_and_gradient()[1]).abs().max() / plain.loss_and_gradient()[1].abs().max()
    pairs = [[kind(members, student, objective, watch) for _ in range(2)] for kind in (Ours, AsFirstWritten)]
    wall = medians({"ours": lambda: Workers().map(lambda one: one.step(), pairs[0]), "plain": lambda: _all_cores(pairs[1])}, 3)
    return {
        **_measured(name, ours.step, plain.step, generator_flops(ours.generator, [*members, student], IMAGE) * BATCH),
        "loss_error": error,
        "gradient_error": float(gap),
        "all_cores": {
            "cores": default_workers(),
            "load_average": round(os.getloadavg()[0], 1),
            "ours_seconds": round(wall["ours"], 4),
            "plain_seconds": round(wall["plain"], 4),
            "speedup": round(wall["plain"] / wall["ours"], 2),
        },
    }


def _inversion() -> dict[str, object]:
    """All clients inverted as one teacher, as FedISCA's public code does."""
    members, labels = [_trained(index) for index in range(CLIENTS)], balanced_labels(BATCH, range(8))
    settings = Inversion(steps=1)
    watched, plain = [Watched(member) for member in members], Teaching(("",), [as_first_written(member) for member in members])

    def ours() -> torch.Tensor:
        return invert(watched, labels, IMAGE, settings, torch_generator(0, "noise"))

    def first() -> torch.Tensor:
        return plain_invert(plain, labels, settings, torch_generator(0, "noise"))[-1]

    flops = sum(inversion_flops(member, IMAGE) for member in members) * BATCH
    return {**_measured("fedisca", ours, first, flops), "pixel_error": float((ours() - first()).abs().max())}


def _measured(name: str, ours: Callable[[], object], plain: Callable[[], object], flops: float) -> dict[str, object]:
    """One thread, so that processor time is what a quiet machine would take."""
    left, right = torch.randn(2, 2048, 2048, generator=torch_generator(0, "peak"))
    seconds = medians({"ours": ours, "plain": plain, "peak": lambda: left @ right}, ROUNDS, time.process_time)
    peak = 2 * 2048**3 / seconds["peak"]
    return {
        "teachers": f"{CLIENTS} x resnet18-w16",
        "batch": BATCH,
        "threads": 1,
        "rounds": ROUNDS,
        "ours_seconds": round(seconds["ours"], 4),
        "plain_seconds": round(seconds["plain"], 4),
        "speedup": round(seconds["plain"] / seconds["ours"], 2),
        "public_code_seconds": PUBLIC_SECONDS[name],
        "speedup_over_public_code": round(PUBLIC_SECONDS[name] / seconds["ours"], 2),
        "aim_over_public_code": 3.0,
        "gflops_ours": round(flops / seconds["ours"] / 1e9, 1),
        "gflops_peak": round(peak / 1e9, 1),
        "share_of_peak": round(flops / seconds["ours"] / peak, 3),
        "speedup_at_peak": round(seconds["plain"] * peak / flops, 2),
    }


def _all_cores(generators: Sequence[Ours]) -> None:
    with compute_threads(default_workers()):
        for one in generators:
            one.step()


def _trained(label: str | int) -> nn.Module:
    """A network with batch-norm statistics that are not the initial ones."""
    model = build_model("resnet18-w16", TASK, torch_generator(0, "member", label))
    with torch.no_grad():
        model.train()(torch.randn((32, *IMAGE), generator=torch_generator(0, "statistics")))
    return model.eval()


class Ours:
    """The step as the methods take it."""

    def __init__(self, members: Sequence[nn.Module], student: nn.Module, objective: Objective, watch: bool) -> None:
        self.teacher = Teacher(members, "logits", torch.ones(len(members)), watch)
        self.student, self.objective = freeze(student), objective
        self.generator = build_generator(IMAGE, torch_generator(0, "generator"), latent_dim=256)
        self.z = torch.randn((BATCH, 256), generator=torch_generator(0, "z")).requires_grad_()
        self.labels = torch.arange(BATCH) % len(TASK.classes)
        self.optimizer = torch.optim.Adam([*self.generator.parameters(), self.z], 1e-3, betas=(0.5, 0.999))

    def loss(self) -> torch.Tensor:
        rng = torch_generator(0, "shift")
        return generator_loss(self.generator, self.z, self.labels, self.teacher, self.student, 0, rng, self.objective)

    def loss_and_gradient(self) -> tuple[float, torch.Tensor]:
        loss = self.loss()
        (gradient,) = torch.autograd.grad(loss, self.z)
        return float(loss.detach()), gradient

    def step(self) -> None:
        loss = self.loss()
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self.optimizer.step()


class AsFirstWritten(Ours):
    """The same mathematics the way one writes it first."""

    def __init__(self, members: Sequence[nn.Module], student: nn.Module, objective: Objective, watch: bool) -> None:
        super().__init__(members, student, objective, watch)
        self.members = [_contiguous(member) for member in members]
        self.student = _contiguous(student)
        self.terms: list[torch.Tensor] = []
        for module in [m for member in self.members for m in member.modules() if isinstance(m, nn.BatchNorm2d)] * watch:
            module.register_forward_hook(self._compare)
        self.generator = _as_first_written(self.generator)
        self.optimizer = torch.optim.Adam([*self.generator.parameters(), self.z], 1e-3, betas=(0.5, 0.999))

    def _compare(self, module: nn.Module, given: tuple[torch.Tensor, ...], out: Any) -> None:
        assert isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_var is not None
        mean, var = given[0].mean((0, 2, 3)), given[0].var((0, 2, 3), unbiased=False)
        self.terms.append((mean - module.running_mean).norm() + (var - module.running_var).norm())

    def loss(self) -> torch.Tensor:
        x = self.generator(self.z).contiguous()
        teacher = torch.stack([member(x) for member in self.members]).mean(0)
        bn = torch.stack(self.terms).sum() / len(self.members) if self.terms else x.new_zeros(())
        self.terms.clear()
        return self.objective(Seen(teacher, self.student(x), bn, self.labels))


def _contiguous(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload,no-any-return]


class _Repeat(UpConv):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(functional.interpolate(x, scale_factor=2.0), self.weight, self.bias, padding=1)


def _as_first_written(generator: Generator) -> Generator:
    plain = _contiguous(generator)
    for module in plain.modules():
        if isinstance(module, UpConv):
            module.__class__ = _Repeat
    assert isinstance(plain, Generator)
    return plain


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
