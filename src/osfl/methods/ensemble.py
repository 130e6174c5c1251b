"""Ensemble — every client's model answers, and the answers are combined; the upper reference of distillation methods.

Nothing is trained at the server: it passes all models on, so the download grows with the number of clients.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from osfl.ingredients.ensembles import Ensemble
from osfl.ingredients.training import TRAINING_PRESETS, Training, classifier, local_model, training_problems
from osfl.models.build import architectures_in, build_model
from osfl.models.naming import contract_of
from osfl.protocol import Context, Contract, OneShot, Payload, Release, Shard, Upload


@dataclass(frozen=True)
class Settings(Training):
    # Under label skew the choice matters more than anything else: averaging probabilities beats logits by several points,
    # and weighting each client per class by how much of that class it has seen by tens of points.
    combine: Literal["logits", "probabilities", "size", "class_count"] = "logits"  # what is averaged, and how weighted


class EnsembleOfClients(OneShot):
    Settings = Settings
    PRESETS = TRAINING_PRESETS

    def problems(self, clients: int) -> list[str]:
        return training_problems(self.settings)

    def architectures(self) -> Sequence[str]:
        return architectures_in(self.settings.architecture)

    def contract(self, architecture: str) -> Contract:
        return contract_of(build_model(architecture, self.task), "model")

    def client_phase(self, shard: Shard, ctx: Context) -> Payload:
        payload = local_model(shard, self.task, self.settings, ctx)
        if self.settings.combine != "class_count":
            return payload
        counts = torch.bincount(shard.train.labels, minlength=len(self.task.classes)).tolist()
        return Payload(payload.tensors, {**payload.facts, "class_counts": counts})

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        tensors = {f"{u.client}/{name}": tensor for u in uploads for name, tensor in u.payload.tensors.items()}
        return Release(Payload(tensors, {"members": {u.client: dict(u.payload.facts) for u in uploads}}))

    def build(self, payload: Payload) -> nn.Module:
        members = payload.facts["members"]
        models = [classifier(Payload(payload.tensors, members[c]), self.task, f"{c}/model") for c in sorted(members)]
        return Ensemble(models, self.settings.combine, _weights(members, self.settings.combine))


def _weights(members: dict[str, dict[str, object]], combine: str) -> torch.Tensor | None:
    """(members,) by sample count, (members, classes) by class count, or None for a plain mean."""
    fact = {"size": "samples", "class_count": "class_counts"}.get(combine)
    return torch.tensor([members[c][fact] for c in sorted(members)], dtype=torch.float32) if fact else None
