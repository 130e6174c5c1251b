"""DAFL — one generator learns to make images that the teacher is sure of, evenly over classes; the student trains along.

Paper: Chen et al., "Data-Free Learning of Student Networks", ICCV 2019, https://arxiv.org/abs/1904.01186, with the ensemble
of clients as its teacher. The one-hot, information-entropy and activation terms are `objective`; `entropy_term` has the
base-10 logarithm of the public code.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn import functional

from osfl.core.method import Context, Phase
from osfl.core.types import ClientId, Payload, Presets, Release, Upload
from osfl.ingredients.distillation.student import kd_loss
from osfl.ingredients.ensembles.ensemble import COUNTED, Combination
from osfl.ingredients.generators.pictures import by_class
from osfl.ingredients.generators.synthesis import (
    Pair,
    check_finite,
    in_stages,
    out_of_range,
    student_problems,
    work_key,
)
from osfl.ingredients.inversion.pixels import Watched
from osfl.ingredients.statistics.site_prior import OneClassifier, SitePrior
from osfl.ingredients.training.local import CPU_TRAINING, SMOKE_TRAINING, Training
from osfl.ingredients.training.model_method import Combine, ModelMethod, Student, teacher_weights, teachers
from osfl.models.folding import freeze
from osfl.models.generators import Ending
from osfl.models.naming import named
from osfl.runtime.devices import ahead


@dataclass(frozen=True)
class Settings(SitePrior, Student, Training):
    ensemble: Combine = "logits"  # how clients become one; class_count and odds add class counts to the upload
    server_epochs: int = 2000  # so often server_steps steps
    server_steps: int = 120  # in each epoch: one step of the generator and one of the student
    synthesis_batch: int = 1024  # images a step
    latent_dim: int = 1000  # numbers that an image is made from
    generator_lr: float = 0.02  # Adam
    generator_width: int = 128  # channels of its first layers
    ending: Ending = "tanh+norm"  # of the generator: tanh and a batch norm without parameters, or sigmoid
    one_hot: float = 0.05  # weight of CE(T(x), argmax T(x))
    entropy: float = 5.0  # weight of the information entropy of the mean answer
    activation: float = 0.01  # weight of -mean |features|
    bn: float = 0.0  # weight of the BN statistics, mean over clients; not part of the paper
    student_lr: float = 0.1  # SGD, times 0.1 at 40 % and 80 % of the epochs
    student_momentum: float = 0.9  # of its SGD
    student_decay: float = 5e-4  # weight decay
    student_clip: float = 0.0  # largest gradient norm; 0 = do not clip
    temperature: float = 1.0  # of distillation


CPU = {
    **CPU_TRAINING,
    "ensemble": "class_count",
    "init": "average",
    "server_epochs": 10,
    "server_steps": 20,
    "synthesis_batch": 96,
    "latent_dim": 100,
    "generator_lr": 0.005,
    "generator_width": 32,
    "ending": "sigmoid",
    "bn": 0.3,
    "one_hot": 1.0,
    "student_lr": 0.02,
    "student_clip": 10.0,
}
SMOKE = {
    **SMOKE_TRAINING,
    "server_epochs": 2,
    "server_steps": 2,
    "synthesis_batch": 16,
    "latent_dim": 16,
    "generator_width": 8,
    "student_lr": 0.01,
}


class Dafl(OneClassifier, ModelMethod):
    Settings = Settings
    COMBINES = True
    PRIVATE = {**ModelMethod.PRIVATE, "ensemble": "logits"}  # noqa: RUF012
    PRESETS: ClassVar[Presets] = {"paper": {}, "cpu": CPU, "smoke": SMOKE}
    DEVIATIONS = ("the teacher is an ensemble of clients; the activation term is the mean over them",)

    def problems(self, clients: int) -> list[str]:
        found = super().problems(clients) + student_problems(self.settings, self.architectures())
        positive = (
            "server_epochs",
            "server_steps",
            "latent_dim",
            "generator_lr",
            "generator_width",
            "student_lr",
            "temperature",
        )
        zero = ("one_hot", "entropy", "activation", "bn", "student_momentum", "student_decay", "student_clip")
        return found + out_of_range(self.settings, positive, zero, ("synthesis_batch",))

    def needs_counts(self) -> bool:
        return bool(self.settings.ensemble in COUNTED)

    def shortened(self) -> Mapping[str, tuple[object, object]]:
        return {**super().shortened(), "server_epochs": (1, 2), "server_steps": (2, 6)}

    def work(self, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
        played = self.settings.server_epochs * self.settings.server_steps
        return (1, played) if phase == "server" else super().work(phase, images, clients)

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        game = Game(self, uploads, ctx)
        epochs = self.settings.server_epochs

        def run(before: Payload, span: range) -> Payload:
            game.restore(before)
            for epoch in span:
                game.play(epoch)
                ctx.progress("synthesis", epoch + 1, epochs)
            return game.payload()

        game.restore(in_stages(ctx, work_key("dafl", uploads, self, ctx), epochs, Payload({}), run))
        game.show()
        return Release(Payload(named(game.student, "model"), {"architecture": game.architecture}))


def entropy_term(logits: torch.Tensor) -> torch.Tensor:
    """sum_c p_c log10 p_c of the batch's mean probability p: lowest, -log10 C, when all classes come equally often."""
    mean = logits.softmax(-1).mean(0)
    return (mean * mean.clamp_min(1e-12).log10()).sum()


class Featured(nn.Module):
    """A frozen client that also returns the input of its head, and with `watch` how far its BN statistics are off."""

    def __init__(self, model: nn.Module, watch: bool) -> None:
        super().__init__()
        self.network = Watched(model) if watch else freeze(model)
        self._given: list[torch.Tensor] = []
        heads = [module for module in self.network.modules() if isinstance(module, nn.Linear)]
        heads[-1].register_forward_pre_hook(lambda module, given: self._given.append(given[0]))  # ours: a copy of the upload

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits, mean |features| and R_BN."""
        answer = self.network(x)
        logits, term = answer if isinstance(answer, tuple) else (answer, x.new_zeros(()))
        return logits, self._given.pop().abs().mean(), term


class Game(Pair):
    """Generator and student play at every step, with the teachers between them."""

    def __init__(self, method: Dafl, uploads: Sequence[Upload], ctx: Context) -> None:
        super().__init__(method, uploads, ctx)
        self.settings = method.settings
        self.plain = teachers(uploads, method, ctx.device)
        self.members = [Featured(member, self.settings.bn > 0).to(ctx.device) for member in self.plain]
        weights = teacher_weights(uploads, self.settings.ensemble, len(method.task.classes))
        limits, how = ctx.plan.limits, ctx.plan.judging.combine
        self.rule = Combination(len(self.members), self.settings.ensemble, weights, limits.share, how)

    def play(self, epoch: int) -> None:
        settings = self.settings
        done = epoch / settings.server_epochs
        self.learner.param_groups[0]["lr"] = settings.student_lr * 0.1 ** ((done >= 0.4) + (done >= 0.8))
        rng = self.ctx.generator("game", epoch)
        self.student.train()
        total = torch.zeros((), device=self.ctx.device)
        size = (settings.synthesis_batch, settings.latent_dim)
        draws = ((torch.randn(size, generator=rng),) for _ in range(settings.server_steps))
        for (z,) in ahead(draws, self.ctx.device):
            total += self.turn(z)
        check_finite(total, "generator or the student", "generator_lr", settings.generator_lr)
        images = settings.synthesis_batch * settings.server_steps
        self.spend(self.plain, images, images, images)
        self.student.eval()

    def turn(self, z: torch.Tensor) -> torch.Tensor:
        """One step of the generator and one of the student on the same images."""
        x = self.draw(z)
        teacher, loss = self.objective(x)
        lesson = kd_loss(teacher.detach(), self.student(x.detach()), self.settings.temperature)
        return self.improve_generator(loss) + self.improve_student(lesson, self.settings.student_clip)

    def objective(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The teacher's answer, and oh CE(T, argmax T) + ie sum p log10 p - a mean |features| (+ bn R_BN)."""
        answers: list[Any] = [member(x) for member in self.members]
        teacher = self.rule(torch.stack([logits for logits, _, _ in answers]))
        loss = self.settings.one_hot * functional.cross_entropy(teacher, teacher.detach().argmax(-1))
        loss = loss + self.settings.entropy * entropy_term(teacher)
        loss = loss - self.settings.activation * torch.stack([size for _, size, _ in answers]).mean()
        return teacher, loss + self.settings.bn * torch.stack([term for _, _, term in answers]).mean()

    def show(self) -> None:
        with torch.no_grad():
            z = torch.randn((128, self.settings.latent_dim), generator=self.ctx.generator("gallery")).to(self.ctx.device)
            x = self.draw(z)
            teacher, _ = self.objective(x)
        note = "Made by the generator; below each, what the ensemble takes it for."
        self.ctx.show("Synthetic images", by_class(x.cpu(), teacher.argmax(-1).cpu(), self.task.classes, 4, note))
