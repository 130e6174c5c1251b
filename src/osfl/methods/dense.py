"""DENSE — new generators each epoch make images on which teacher and student disagree; the student learns from all of them.

Paper: Zhang et al., "DENSE: Data-Free One-Shot Federated Learning", NeurIPS 2022, https://arxiv.org/abs/2112.12371.
The generator's loss CE + lambda_1 R_BN + lambda_2 L_div is `objective`; L_div is `masked_divergence`; the distillation is
`Workshop.study`.
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
from osfl.ingredients.ensembles.ensemble import COUNTED
from osfl.ingredients.generators.synthesis import (
    Seen,
    Synthesis,
    Workshop,
    in_stages,
    masked_divergence,
    shortened_synthesis,
    synthesis_problems,
    synthesis_work,
    work_key,
)
from osfl.ingredients.statistics.site_prior import OneClassifier, SitePrior
from osfl.ingredients.training.local import CPU_TRAINING, SMOKE_TRAINING, Training
from osfl.ingredients.training.model_method import ModelMethod


@dataclass(frozen=True)
class Settings(SitePrior, Synthesis, Training):
    lr: float = 0.01  # of the clients
    schedule: Literal["steps", "cosine", "constant"] = "constant"  # of the clients
    cross_entropy: float = 1.0  # weight of the label term in the generator's loss


CPU = {
    **CPU_TRAINING,
    "ensemble": "class_count",
    "init": "average",
    "server_epochs": 8,
    "generators": 2,
    "generator_steps": 28,
    "generator_lr": 0.01,
    "generator_width": 32,
    "synthesis_batch": 64,
    "shift": 0,
    "bn": 0.3,
    "passes": 6,
    "student_batch": 64,
    "student_lr": 0.02,
    "student_decay": 1e-4,
    "student_cosine": True,
    "student_clip": 10.0,
    "temperature": 4.0,
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


class Dense(OneClassifier, ModelMethod):
    Settings = Settings
    COMBINES = True
    PRIVATE = {**ModelMethod.PRIVATE, "ensemble": "logits"}  # noqa: RUF012
    PRESETS: ClassVar[Presets] = {"paper": {}, "cpu": CPU, "smoke": SMOKE}
    DEVIATIONS = (
        "the BN term covers all BN layers of all clients, with clients in evaluation mode, as in the paper (the public "
        "code finds no layers)",
        "the random crop and mirror before the networks is one for the whole batch, not one an image",
        "clients train with weight decay unless it is set to 0 (none was published)",
        "inputs are in [-1, 1] (the code: in [0, 1])",
        "teacher answers to the pool are computed once an image, so the student sees images as they were stored",
    )

    def problems(self, clients: int) -> list[str]:
        return super().problems(clients) + synthesis_problems(self.settings, self.architectures())

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

        def run(before: Payload, epochs: range) -> Payload:
            shop.restore(before)
            for epoch in epochs:
                shop.turn(epoch, lambda images: shop.grow(images, self.objective), shop.study)
            return shop.payload()

        count = len(turns(self.settings))
        shop.restore(in_stages(ctx, work_key("dense", uploads, self, ctx), count, Payload({}), run))
        shop.show()
        return Release(shop.release())

    def objective(self, seen: Seen) -> torch.Tensor:
        """CE(E(x), y) + lambda_1 R_BN + lambda_2 L_div."""
        settings: Settings = self.settings
        loss = settings.cross_entropy * functional.cross_entropy(seen.teacher, seen.labels) + settings.bn * seen.bn
        return loss + settings.adversarial * masked_divergence(seen.teacher, seen.student)
