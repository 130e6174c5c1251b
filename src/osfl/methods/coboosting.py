"""Co-Boosting — a generator makes images that are hard for the ensemble; its weights are learned on them, in turns.

Paper: Dai et al., "Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting", ICLR 2024,
https://arxiv.org/abs/2402.15070. Hard-sample weighting is `hard_samples`, diversified samples are `perturbed`, and the
ensemble's weights take `weight_step`. The loop around them is DENSE's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch.nn import functional

from osfl.core.method import Context, Phase
from osfl.core.types import ClientId, Payload, Presets, Release, Upload
from osfl.ingredients.distillation.order import turns
from osfl.ingredients.distillation.student import kd_loss
from osfl.ingredients.ensembles.ensemble import COUNTED
from osfl.ingredients.ensembles.odds import odds
from osfl.ingredients.generators.synthesis import (
    Batch,
    Seen,
    Synthesis,
    Teacher,
    Workshop,
    in_stages,
    out_of_range,
    shortened_synthesis,
    synthesis_problems,
    synthesis_work,
    work_key,
)
from osfl.ingredients.statistics.site_prior import OneClassifier, SitePrior
from osfl.ingredients.training.local import CPU_TRAINING, SMOKE_TRAINING, Training, batches
from osfl.ingredients.training.model_method import ModelMethod
from osfl.runtime.precision import gradients


@dataclass(frozen=True)
class Settings(SitePrior, Synthesis, Training):
    lr: float = 0.01  # of the clients
    schedule: Literal["steps", "cosine", "constant"] = "constant"  # of the clients
    bn: float = 0.0  # weight of the BN statistics, mean over clients
    adversarial: float = 1.0  # weight of -KL between ensemble and student, at temperature 3
    temperature: float = 4.0  # of distillation
    student_decay: float = 1e-4  # weight decay of the student
    student_cosine: bool = True  # bring the student's learning rate to zero over the epochs
    student_clip: float = 10.0  # largest gradient norm of the student; 0 = do not clip
    generator_clip: float = 10.0  # largest gradient norm of the generator; 0 = do not clip
    hardness: float = 1.0  # hs: samples weigh (1 - p_y)^hs; 0 = all the same
    epsilon: float = 8 / 255  # of the perturbation, in units of [-1, 1]; 0 = none
    weight_lr: float = 0.0  # mu of the ensemble's weights; 0 = 0.1 / clients, as the paper has 0.01 for ten


CPU = {
    **CPU_TRAINING,
    "ensemble": "odds",
    "init": "average",
    "server_epochs": 8,
    "generators": 2,
    "generator_steps": 28,
    "generator_lr": 0.01,
    "generator_width": 32,
    "synthesis_batch": 64,
    "shift": 0,
    "bn": 0.3,
    "adversarial": 0.1,
    "passes": 3,
    "student_batch": 64,
    "student_lr": 0.02,
    "hard": 1.0,
}
SMOKE = {
    **SMOKE_TRAINING,
    "server_epochs": 2,
    "generator_steps": 2,
    "generator_width": 8,
    "latent_dim": 16,
    "synthesis_batch": 16,
    "student_batch": 16,
    "generators": 2,
    "shift": 1,
}


class CoBoosting(OneClassifier, ModelMethod):
    Settings = Settings
    PRIVATE = {**ModelMethod.PRIVATE, "ensemble": "logits"}  # noqa: RUF012
    PRESETS: ClassVar[Presets] = {"paper": {}, "cpu": CPU, "smoke": SMOKE}
    DEVIATIONS = (
        "the random crop and mirror before the networks is one for the whole batch, not one an image",
        "client answers to the stored pool are computed once an image, for the steps on the ensemble's weights",
        "clients train with weight decay unless it is set to 0 (none was published)",
        "epsilon is in units of inputs in [-1, 1] (the code: of standardized inputs)",
        "an ensemble weight step that would silence every client is not taken",
    )

    def problems(self, clients: int) -> list[str]:
        found = super().problems(clients) + synthesis_problems(self.settings, self.architectures())
        return found + out_of_range(self.settings, (), ("generator_clip", "hardness", "epsilon", "weight_lr"), ())

    def needs_counts(self) -> bool:
        return bool(self.settings.ensemble in COUNTED)

    def shortened(self) -> Mapping[str, tuple[object, object]]:
        return {**super().shortened(), **shortened_synthesis(self.settings)}

    def keeps(self) -> Sequence[str]:
        return () if self.settings.pool_batches else ("server_epochs",)

    def work(self, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
        return synthesis_work(self.settings) if phase == "server" else super().work(phase, images, clients)

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        shop = Workshop(self, uploads, ctx)
        voices = Voices(shop, uploads)

        def grow(epoch: int) -> None:
            shop.grow(epoch, self.objective, self.settings.generator_clip)
            if epoch:
                voices.learn(epoch)

        def study(epoch: int) -> None:
            shop.study(epoch, lambda batch: perturbed(batch, shop.folded, self.settings.epsilon), self._directions)

        def run(before: Payload, epochs: range) -> Payload:
            shop.restore(before)
            voices.restore(before)
            for epoch in epochs:
                shop.turn(epoch, grow, study)
            return shop.payload(weights=voices.weights, history=voices.history)

        done = in_stages(ctx, work_key("coboosting 2", uploads, self, ctx), len(turns(self.settings)), Payload({}), run)
        shop.restore(done)
        voices.restore(done)
        shop.show()
        voices.show(ctx)
        return Release(shop.release())

    def _directions(self, count: int, rng: torch.Generator) -> list[torch.Tensor]:
        """u of `perturbed`, from 0 to 1, for so many images."""
        return [torch.rand((count, len(self.task.classes)), generator=rng)] if self.settings.epsilon else []

    def objective(self, seen: Seen) -> torch.Tensor:
        """(1 - p_y)^hs CE - adv KL_3(E_w || S) + bn R_BN / N."""
        settings: Settings = self.settings
        loss = hard_samples(seen.teacher, seen.labels, settings.hardness) + settings.bn * seen.bn
        return loss - settings.adversarial * kd_loss(seen.teacher, seen.student, 3.0)


def hard_samples(teacher: torch.Tensor, labels: torch.Tensor, hardness: float) -> torch.Tensor:
    """Cross-entropy in which a sample weighs (1 - p_y)^hs: what the ensemble already takes for its class counts little."""
    losses = functional.cross_entropy(teacher, labels, reduction="none")
    weights = (1 - teacher.detach().softmax(-1).gather(1, labels[:, None]).squeeze(1)).clamp_min(0) ** hardness
    return (weights * losses).mean()


def perturbed(batch: Batch, teacher: Teacher, epsilon: float) -> tuple[torch.Tensor, torch.Tensor]:
    """x + eps sign(grad_x sum(u softmax(E_w(x) / 4))), u uniform in (-1, 1) a sample and class, and the output of E_w on it."""
    if not epsilon:
        return batch.inputs, teacher.combined(batch.logits)
    x = batch.inputs.clone().requires_grad_()
    answer = teacher.combined(teacher(x)[0])
    direction = batch.drawn[0] * 2 - 1
    (gradient,) = gradients((direction * (answer / 4).softmax(-1)).sum(), x)
    with torch.no_grad():
        moved = (x + epsilon * gradient.sign()).detach()
        return moved, teacher.combined(teacher(moved)[0])


# --- the ensemble's weights --------------------------------------------------------------------------------------------


def vote(logits: torch.Tensor, weights: torch.Tensor, mode: str, base: torch.Tensor, share: float = 1.0) -> torch.Tensor:
    """E_w of members' logits (clients, batch, classes), with gradients to w; `base` are the votes that w scales."""
    votes = weights.view(-1, 1) * (base if base.ndim == 2 else base.view(-1, 1))  # (clients, 1 or classes)
    if mode == "logits":
        return (votes[:, None] * logits).sum(0) / votes.sum()
    if mode == "odds":
        return odds(logits, base, weights, share)
    shares = votes / votes.sum(0, keepdim=True).clamp_min(1e-12)
    mixed = (shares[:, None] * logits.softmax(-1)).sum(0)
    return (mixed / mixed.sum(-1, keepdim=True)).clamp_min(1e-12).log()


def weight_step(weights: torch.Tensor, gradient: torch.Tensor, size: float) -> torch.Tensor:
    """w <- clip(w - size sign(dCE/dw), 0, 1)."""
    return (weights - size * gradient.sign()).clamp(0, 1)


class Voices:
    """How much each client counts in the ensemble: starts equal, and follows the sign of the gradient on the pool."""

    def __init__(self, shop: Workshop, uploads: Sequence[Upload]) -> None:
        self.shop, self.clients = shop, [upload.client for upload in uploads]
        self.base = shop.folded.weights.float()
        self.weights = torch.full((len(uploads),), 1 / len(uploads))
        self.history = self.weights[None].clone()  # (epochs, clients)
        self.size = shop.settings.weight_lr or 0.1 / len(uploads)

    def restore(self, payload: Payload) -> None:
        if payload.tensors:
            self.weights, self.history = payload.tensors["weights"], payload.tensors["history"]
            self._report()

    def learn(self, epoch: int) -> None:
        """One step a mini-batch of the stored pool, on the answers that were kept."""
        shop, size = self.shop, self.size * 0.99**epoch
        for index in batches(len(shop.images), shop.settings.student_batch, shop.ctx.generator("weights", epoch)):
            weights = self.weights.clone().requires_grad_()
            answer = vote(shop.logits[:, index], weights, shop.settings.ensemble, self.base, shop.folded.share)
            (gradient,) = torch.autograd.grad(functional.cross_entropy(answer, shop.labels[index]), weights)
            after = weight_step(self.weights, gradient, size)
            if self._any_positive(after):
                self.weights = after
        self.history = torch.cat([self.history, self.weights[None]])
        self._report()

    def _any_positive(self, weights: torch.Tensor) -> bool:
        """For each class that anyone has votes for, somebody with votes keeps some weight."""
        base = self.base if self.base.ndim == 2 else self.base[:, None]
        had = base.sum(0) > 0
        return bool(((weights[:, None] * base).sum(0) > 0)[had].all())

    def _report(self) -> None:
        """All teachers of the workshop vote with the new weights from now on; odds keep the class counts as they are."""
        votes = self.weights
        if self.shop.settings.ensemble != "odds":
            base = self.base if self.base.ndim == 2 else self.base[:, None]
            scaled = (self.weights[:, None] * base).double()
            votes = scaled if self.base.ndim == 2 else scaled[:, 0]
        for teacher in [*self.shop.teachers, self.shop.folded]:
            teacher.weigh(votes)

    def show(self, ctx: Context) -> None:
        series: dict[str, object] = {name: self.history[:, i].tolist() for i, name in enumerate(self.clients)}
        figure = {
            "kind": "lines",
            "x": list(range(len(self.history))),
            "series": series,
            "x_label": "epoch",
            "y_label": "weight",
            "note": "How much each client counts in the ensemble.",
        }
        ctx.show("Ensemble weights", figure)
