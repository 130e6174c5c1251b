"""Local only — each client trains on its own images and sends nothing; the baseline that every method should beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from osfl.core.method import Context, Method, Phase
from osfl.core.types import ClientId, Contract, Payload, Release, Shard, Upload
from osfl.ingredients.training.local import TRAINING_PRESETS, Training, classifier, local_model, training_problems


@dataclass(frozen=True)
class Settings(Training):
    pass


class LocalOnly(Method):
    Settings = Settings
    TASKS = ("multiclass", "multilabel")
    PRESETS = TRAINING_PRESETS

    def problems(self, clients: int) -> list[str]:
        return training_problems(self.settings, self.task)

    def architectures(self) -> Sequence[str]:
        return ("",)

    def contract(self, architecture: str) -> Contract:
        return {}

    def client_phase(self, shard: Shard, ctx: Context) -> Payload:
        return Payload({})

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        return Release(Payload({}))

    def work(self, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
        return (1, images, images * self.settings.epochs) if phase == "personalize" else (1,)

    def personalize(self, release: Release, shard: Shard, ctx: Context) -> Payload:
        return local_model(shard, self.task, self.settings, ctx)

    def build(self, payload: Payload) -> nn.Module:
        return classifier(payload, self.task)
