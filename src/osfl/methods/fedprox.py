"""FedProx — multi-round FedAvg whose clients are held near the server's model.

Paper: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020. The local objective gains
(mu/2)·||w - w_server||², over parameters only, not BN buffers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from osfl.ingredients.training.local import Adjust
from osfl.ingredients.training.multi_round import MultiRound, Rounds, State, mean_model, parameters_of, part


@dataclass(frozen=True)
class Settings(Rounds):
    mu: float = 0.01  # pull towards the server's model; 0.01 for Dirichlet, 0.1 for single-class silos


class FedProx(MultiRound):
    Settings = Settings

    def problems(self, clients: int) -> list[str]:
        wrong = not 0 <= self.settings.mu < math.inf
        return super().problems(clients) + [f"setting 'mu': expected at least 0, got {self.settings.mu}"] * wrong

    def adjust(self, state: State, client: str, device: torch.device) -> Adjust | None:
        if not self.settings.mu:  # FedAvg, bit for bit
            return None
        server = {name: value.to(device) for name, value in part(state, "model").items()}

        def pull(model: nn.Module) -> None:
            for name, parameter in parameters_of(model).items():
                if parameter.grad is not None:
                    parameter.grad += self.settings.mu * (parameter.detach() - server[name])

        return pull

    def merge(self, state: State, clients: Mapping[str, State], samples: Mapping[str, int]) -> dict[str, torch.Tensor]:
        return mean_model(clients, samples)
