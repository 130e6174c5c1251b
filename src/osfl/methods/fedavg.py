"""FedAvg, one round — clients train from a common start, the server averages their weights.

Paper: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017.
With one round and skewed labels it is near chance; that is the expected result and the reason for the other methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from osfl.core.method import Context
from osfl.core.types import Payload, Release, Upload
from osfl.ingredients.statistics.averaging import average
from osfl.ingredients.statistics.claimed_counts import sizes_of
from osfl.ingredients.training.local import Training, training_problems
from osfl.ingredients.training.model_method import ModelMethod


@dataclass(frozen=True)
class Settings(Training):
    weighting: Literal["samples", "uniform"] = "samples"  # Eq. 1 of the paper weights by sample count


class FedAvg(ModelMethod):
    Settings = Settings

    def problems(self, clients: int) -> list[str]:
        return training_problems(self.settings, self.task, one="averaging weights needs one architecture for all clients")

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        uniform = self.settings.weighting == "uniform"
        weights = [1.0] * len(uploads) if uniform else sizes_of(uploads, ctx.plan.limits.share).tolist()
        mean = average([upload.payload.tensors for upload in uploads], weights)
        return Release(Payload(mean, {"architecture": self.settings.architecture}))
