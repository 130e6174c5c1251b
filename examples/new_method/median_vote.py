"""Median vote — the server passes all models on, and each class gets the median of the clients' probabilities."""

from collections.abc import Sequence

import torch
from torch import nn

from osfl.core.method import Context, Method
from osfl.core.types import Contract, Payload, Release, Shard, Upload
from osfl.ingredients.training.local import TRAINING_PRESETS, Training, classifier, local_model
from osfl.models.build import build_model
from osfl.models.naming import contract_of


class Median(nn.Module):
    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([member(x).softmax(-1) for member in self.members]).quantile(0.5, dim=0).clamp_min(1e-6).log()


class MedianVote(Method):
    Settings = Training
    PRESETS = TRAINING_PRESETS

    def contract(self, architecture: str) -> Contract:
        return contract_of(build_model(architecture, self.task), "model")

    def client_phase(self, shard: Shard, ctx: Context) -> Payload:
        return local_model(shard, self.task, self.settings, ctx)

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        tensors = {f"{u.client}/{name}": tensor for u in uploads for name, tensor in u.payload.tensors.items()}
        return Release(Payload(tensors, {"members": {u.client: dict(u.payload.facts) for u in uploads}}))

    def build(self, payload: Payload) -> nn.Module:
        members = payload.facts["members"]
        return Median([classifier(Payload(payload.tensors, members[c]), self.task, f"{c}/model") for c in sorted(members)])
