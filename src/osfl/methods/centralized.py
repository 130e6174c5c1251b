"""Centralized — one model trained on everybody's images: an upper reference, which one-shot methods may not use."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from osfl.core.method import Context, Method
from osfl.core.types import Dataset, Exchange, Payload, Release, Shard, Simulated, digest_of
from osfl.ingredients.training.local import TRAINING_PRESETS, Training, classifier, local_model, training_problems


@dataclass(frozen=True)
class Settings(Training):
    pass


class Centralized(Method):
    Settings = Settings
    TASKS = ("multiclass", "multilabel")
    PRESETS = TRAINING_PRESETS

    def problems(self, clients: int) -> list[str]:
        return training_problems(self.settings, self.task, one="everybody's images train one model")

    def simulate(self, shards: Sequence[Shard], ctx: Context) -> Simulated:
        everyone = sorted(shards, key=lambda shard: shard.client)
        union = Shard(
            "everyone",
            pool([s.train for s in everyone]),
            pool([s.val for s in everyone]),
            digest_of([s.digest for s in everyone]),
        )
        images = {s.client: [Exchange(Payload({"images": s.train.images, "labels": s.train.labels}))] for s in everyone}
        return Simulated(Release(local_model(union, self.task, self.settings, ctx)), up=images)

    def build(self, payload: Payload) -> nn.Module:
        return classifier(payload, self.task)


def pool(parts: Sequence[Dataset]) -> Dataset:
    return Dataset(torch.cat([part.images for part in parts]), torch.cat([part.labels for part in parts]))
