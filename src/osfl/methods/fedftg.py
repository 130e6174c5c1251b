"""FedFTG, one round — FedAvg's model is fine-tuned at the server on images of a conditional generator.

Paper: Zhang et al., "Fine-tuning Global Model via Data-Free Knowledge Distillation for Non-IID Federated Learning", CVPR
2022, https://arxiv.org/abs/2203.09249. Customized label sampling is `draw_labels` by class counts, the class-level ensemble
is `shares`, the generator's loss is `objective`. The paper fine-tunes in each of many rounds; we have one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import nn
from torch.nn import functional

from osfl.core.method import Context, Phase
from osfl.core.types import ClientId, Payload, Presets, Release, Upload
from osfl.ingredients.generators.pictures import by_class
from osfl.ingredients.generators.synthesis import (
    Pair,
    check_finite,
    draw_labels,
    in_stages,
    out_of_range,
    student_problems,
    work_key,
)
from osfl.ingredients.inversion.pixels import Watched
from osfl.ingredients.statistics.claimed_counts import capped_counts
from osfl.ingredients.statistics.site_prior import OneClassifier, SitePrior, with_class_shares
from osfl.ingredients.training.local import CPU_TRAINING, SMOKE_TRAINING, Training, decay
from osfl.ingredients.training.model_method import ModelMethod, Student, counts_of, teachers
from osfl.models.folding import freeze
from osfl.models.generators import Ending
from osfl.models.naming import named


@dataclass(frozen=True)
class Settings(SitePrior, Student, Training):
    init: Literal["random", "average", "client", "pretrained"] = "average"  # the paper fine-tunes the clients' average
    iterations: int = 10  # I: each trains the generator on every client, then the student
    generator_steps: int = 1  # on each client, in each iteration
    student_steps: int = 5  # in each iteration
    synthesis_batch: int = 128  # images a step
    latent_dim: int = 100  # numbers that an image is made from, besides its class
    generator_lr: float = 0.01  # Adam
    generator_width: int = 128  # channels of its first layers
    ending: Ending = "tanh+norm"  # of the generator: tanh and a batch norm without parameters, or sigmoid
    classify: float = 1.0  # lambda_cls: weight of cross-entropy at the client
    diverse: float = 1.0  # lambda_dis: weight of the diversity term
    disagree: float = 1.0  # weight of the distance between student and client
    bn: float = 0.0  # weight of the client's BN statistics; not part of the paper
    student_lr: float = 0.1  # SGD
    student_momentum: float = 0.0  # of its SGD
    student_decay: float = 1e-3  # weight decay
    student_clip: float = 0.0  # largest gradient norm; 0 = do not clip
    student_cosine: bool = False  # bring the student's learning rate to zero over the iterations


CPU = {
    **CPU_TRAINING,
    "iterations": 60,
    "synthesis_batch": 96,
    "generator_width": 32,
    "generator_lr": 0.005,
    "ending": "sigmoid",
    "bn": 0.3,
    "disagree": 0.1,
    "diverse": 0.1,
    "student_lr": 0.02,
    "student_momentum": 0.9,
    "student_clip": 10.0,
    "student_cosine": True,
}
SMOKE = {
    **SMOKE_TRAINING,
    "iterations": 2,
    "student_steps": 2,
    "synthesis_batch": 16,
    "latent_dim": 16,
    "generator_width": 8,
    "student_lr": 0.01,
}


class FedFtg(OneClassifier, ModelMethod):
    Settings = Settings
    PRESETS: ClassVar[Presets] = {"paper": {}, "cpu": CPU, "smoke": SMOKE}
    DEVIATIONS = (
        "one round: the paper fine-tunes after each of many",
        "networks keep their batch norm (the paper's have group norm); the student's statistics become those of its images",
        "weights act on each sample's cross-entropy (the code averages first), and the student's loss is not divided by the "
        "number of classes",
        "the disagreement's gradient reaches the generator through student and clients (the code: the student only)",
        "distances in the diversity term are means, as in the code (printed: sums)",
    )

    def problems(self, clients: int) -> list[str]:
        found = super().problems(clients) + student_problems(self.settings, self.architectures())
        positive = (
            "iterations",
            "generator_steps",
            "student_steps",
            "latent_dim",
            "generator_lr",
            "generator_width",
            "student_lr",
        )
        zero = ("classify", "diverse", "disagree", "bn", "student_momentum", "student_decay", "student_clip")
        return found + out_of_range(self.settings, positive, zero, ("synthesis_batch",))

    def needs_counts(self) -> bool:
        return True

    def shortened(self) -> Mapping[str, tuple[object, object]]:
        return {**super().shortened(), "iterations": (1, 3)}

    def work(self, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
        return (1, self.settings.iterations) if phase == "server" else super().work(phase, images, clients)

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        tuning = Tuning(self, uploads, ctx)
        total = self.settings.iterations

        def run(before: Payload, span: range) -> Payload:
            tuning.restore(before)
            for iteration in span:
                tuning.iterate(iteration)
                ctx.progress("fine-tuning", iteration + 1, total)
            return tuning.payload()

        tuning.restore(in_stages(ctx, work_key("fedftg", uploads, self, ctx), total, Payload({}), run))
        tuning.show()
        release = Release(Payload(named(tuning.student, "model"), {"architecture": tuning.architecture}))
        return with_class_shares(release, uploads, self.settings, ctx.plan.limits.share)


def shares(counts: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """a_k(y) = n_yk / sum_j n_yj: how much each client counts for each sample, (clients, batch)."""
    chosen = counts[:, labels]
    return (chosen / chosen.sum(0).clamp_min(1e-12)).to(torch.float32)


def diversity(z: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """exp(-mean_ij |z_i - z_j|^2 |x_i - x_j|_1), distances as means over their numbers: images of unlike noise differ."""
    far_z = torch.cdist(z, z).square() / z.shape[1]
    flat = x.flatten(1)
    far_x = torch.cdist(flat, flat, p=1.0) / flat.shape[1]
    return (-(far_z * far_x)).mean().exp()


class Tuning(Pair):
    """The averaged model, a conditional generator, and the clients as teachers of the classes that they have."""

    def __init__(self, method: FedFtg, uploads: Sequence[Upload], ctx: Context) -> None:
        classes = len(method.task.classes)
        super().__init__(method, uploads, ctx, classes)
        self.settings = method.settings
        self.counts = capped_counts(counts_of(uploads, classes), ctx.plan.limits.share)
        members = teachers(uploads, method, ctx.device)
        self.folded = [freeze(member) for member in members]
        self.members = [Watched(member) for member in members] if self.settings.bn > 0 else self.folded
        self.plain = members

    def iterate(self, iteration: int) -> None:
        """Noise and labels, a few generator steps on each client, a few student steps on what came out."""
        settings, device = self.settings, self.ctx.device
        rng = self.ctx.generator("fine-tuning", iteration)
        labels = draw_labels(settings.synthesis_batch, self.counts.sum(0), rng)
        share = shares(self.counts, labels).to(device)
        z, labels = torch.randn((len(labels), settings.latent_dim), generator=rng).to(device), labels.to(device)
        student = freeze(self.student)
        total = torch.zeros((), device=device)
        for member, weight in zip(self.members, share, strict=True):
            for _ in range(settings.generator_steps):
                total += self.improve_generator(self.objective(member, student, z, labels, weight))
        total += self._teach(z, labels, share, iteration)
        check_finite(total, "generator or the student", "generator_lr", settings.generator_lr)
        n = len(labels)
        self.spend([*self.plain, student], n * settings.generator_steps, n * settings.student_steps, n)

    def objective(
        self, member: nn.Module, student: nn.Module, z: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor
    ) -> torch.Tensor:
        """-mean a_k mean_c |S - T_k| + cls a_k CE(T_k, y) + dis / N diversity (+ bn R_BN / N), for one client k."""
        settings, clients = self.settings, len(self.members)
        x = self.draw(z, labels)
        answer: object = member(x)
        logits, term = answer if isinstance(answer, tuple) else (answer, x.new_zeros(()))
        apart = (student(x) - logits).abs().mean(1)
        losses = settings.classify * functional.cross_entropy(logits, labels, reduction="none") - settings.disagree * apart
        loss: torch.Tensor = (weight * losses).mean() + (settings.diverse * diversity(z, x) + settings.bn * term) / clients
        return loss

    def _teach(self, z: torch.Tensor, labels: torch.Tensor, share: torch.Tensor, iteration: int) -> torch.Tensor:
        """Soft cross-entropy to sum_k a_k(y) softmax(T_k)."""
        settings = self.settings
        schedule = "cosine" if settings.student_cosine else "constant"
        self.learner.param_groups[0]["lr"] = settings.student_lr * decay(schedule, iteration, settings.iterations)
        with torch.no_grad():
            x = self.draw(z, labels)
            answers = torch.stack([member(x).softmax(-1) for member in self.folded])
            target = (share[..., None] * answers).sum(0)
        self.student.train()
        total = torch.zeros((), device=x.device)
        for _ in range(settings.student_steps):
            loss = -(target * self.student(x).log_softmax(-1)).sum(-1).mean()
            total += self.improve_student(loss, settings.student_clip)
        self.student.eval()
        return total

    def show(self) -> None:
        seen = torch.nonzero(self.counts.sum(0) > 0).flatten()
        labels = seen.repeat_interleave(4)
        with torch.no_grad():
            z = torch.randn((len(labels), self.settings.latent_dim), generator=self.ctx.generator("gallery")).to(
                self.ctx.device
            )
            x = self.draw(z, labels.to(self.ctx.device)).cpu()
        note = "Made by the generator for the class named below each; never seen by any client."
        self.ctx.show("Synthetic images", by_class(x, labels, self.task.classes, 4, note))
