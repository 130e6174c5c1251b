"""FedDyn — multi-round learning with a dynamic regularizer that aligns local and global optima.

Paper: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021. The local problem is
L_k(w) - <h_k, w> + (a/2)·||w - w_server||²; then h_k <- h_k - a (w_k - w_server), and the server keeps the mean h.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from osfl.core.types import Shard
from osfl.ingredients.training.local import Adjust
from osfl.ingredients.training.multi_round import MultiRound, Rounds, State, mean_model, parameters_of, part
from osfl.models.build import build_model


@dataclass(frozen=True)
class Settings(Rounds):
    alpha: float = 0.01  # strength a of the regularizer; FedFTG uses 0.01, FederatedFactory 0.001


class FedDyn(MultiRound):
    Settings = Settings
    DEVIATIONS = (
        *MultiRound.DEVIATIONS,
        "regularizes ||w - w_server||² as in the paper; FederatedFactory's baseline code regularizes ||w||²",
    )

    def problems(self, clients: int) -> list[str]:
        wrong = self.settings.alpha <= 0
        return super().problems(clients) + [f"setting 'alpha': expected above 0, got {self.settings.alpha}"] * wrong

    def start(self, shards: Sequence[Shard], model: State) -> dict[str, torch.Tensor]:
        parameters = parameters_of(build_model(self.settings.architecture, self.task))
        owners = ["h", *(f"{shard.client}/h" for shard in shards)]
        return {f"{owner}/{name}": torch.zeros_like(model[name]) for owner in owners for name in parameters}

    def adjust(self, state: State, client: str, device: torch.device) -> Adjust:
        server = {name: value.to(device) for name, value in part(state, "model").items()}
        own = {name: value.to(device) for name, value in part(state, client).items()}

        def correct(model: nn.Module) -> None:
            for name, parameter in parameters_of(model).items():
                if parameter.grad is not None:
                    pull = self.settings.alpha * (parameter.detach() - server[name])
                    parameter.grad += pull - own[f"{client}/h/{name}"]

        return correct

    def after(self, state: State, client: str, trained: State, steps: int, lr: float) -> dict[str, torch.Tensor]:
        return {
            f"{client}/{h}": state[f"{client}/{h}"] - self.settings.alpha * (trained[name] - state[name])
            for h in part(state, "h")
            for name in [h.removeprefix("h/")]
        }

    def merge(self, state: State, clients: Mapping[str, State], samples: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """h <- h - a·mean(w_k - w_server), w_server <- mean(w_k) - h/a; the mean is uniform, as in the paper."""
        mean = mean_model(clients, dict.fromkeys(clients, 1.0))
        own = {name: tensor for client in clients for name, tensor in part(clients[client], client).items()}
        h = {}
        for name, before in part(state, "h").items():
            target = name.removeprefix("h/")
            h[name] = before - self.settings.alpha * (mean[target] - state[target])
            mean[target] = mean[target] - h[name] / self.settings.alpha
        return {**mean, **own, **h}
