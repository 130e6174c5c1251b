"""FedAvg, one round — clients train from a common start, the server averages their weights.

Paper: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
With one round and skewed labels it is near chance; that is the expected result and the reason for the other methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import nn

from osfl.ingredients.averaging import average
from osfl.ingredients.training import TRAINING_PRESETS, Training, classifier, local_model, training_problems
from osfl.models.build import build_model
from osfl.models.naming import contract_of
from osfl.protocol import Context, Contract, OneShot, Payload, Release, Shard, Upload


@dataclass(frozen=True)
class Settings(Training):
    weighting: Literal["samples", "uniform"] = "samples"  # Eq. 1 of the paper weights by sample count


class FedAvg(OneShot):
    Settings = Settings
    PRESETS = TRAINING_PRESETS

    def problems(self, clients: int) -> list[str]:
        mixed = ":" in self.settings.architecture
        return training_problems(self.settings) + [
            "setting 'architecture': averaging weights needs one architecture for all clients"
        ] * mixed

    def contract(self, architecture: str) -> Contract:
        return contract_of(build_model(architecture, self.task), "model")

    def client_phase(self, shard: Shard, ctx: Context) -> Payload:
        return local_model(shard, self.task, self.settings, ctx)

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        uniform = self.settings.weighting == "uniform"
        weights = [1.0 if uniform else upload.payload.facts["samples"] for upload in uploads]
        mean = average([upload.payload.tensors for upload in uploads], weights)
        return Release(Payload(mean, {"architecture": self.settings.architecture}))

    def build(self, payload: Payload) -> nn.Module:
        return classifier(payload, self.task)
