"""FedAvg over many rounds — the ordinary federated learning that one-shot methods compete with.

Paper: McMahan et al., AISTATS 2017; settings as in FederatedFactory's baselines.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from osfl.ingredients.training.multi_round import MultiRound, Rounds, State, mean_model


@dataclass(frozen=True)
class Settings(Rounds):
    weighting: Literal["samples", "uniform"] = "samples"  # samples: by the number of images; uniform: all clients alike


class FedAvgRounds(MultiRound):
    Settings = Settings

    def merge(self, state: State, clients: Mapping[str, State], samples: Mapping[str, int]) -> dict[str, torch.Tensor]:
        return mean_model(clients, samples if self.settings.weighting == "samples" else dict.fromkeys(clients, 1.0))
