"""SCAFFOLD — multi-round learning with control variates that correct client drift.

Paper: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020, option II.
A step is w <- w - lr (g - c_i + c); each message holds the model and a control variate, twice FedAvg's bytes.
"""

from __future__ import annotations

import math
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
    momentum: float = 0.0  # the control variate formula assumes plain SGD
    lr_floor: float = 1e-4  # smallest lr in the division of c_i's update


class Scaffold(MultiRound):
    Settings = Settings
    PRESETS = MultiRound.PRESETS

    def problems(self, clients: int) -> list[str]:
        found = super().problems(clients)
        if not 0 < self.settings.lr_floor < math.inf:
            found.append(f"setting 'lr_floor': expected above 0, got {self.settings.lr_floor}")
        if self.settings.optimizer != "sgd":
            found.append(f"setting 'optimizer': SCAFFOLD's control variates assume 'sgd', got {self.settings.optimizer!r}")
        return found

    def start(self, shards: Sequence[Shard], model: State) -> dict[str, torch.Tensor]:
        parameters = parameters_of(build_model(self.settings.architecture, self.task))
        owners = ["control", *(f"{shard.client}/control" for shard in shards)]
        return {f"{owner}/{name}": torch.zeros_like(model[name]) for owner in owners for name in parameters}

    def adjust(self, state: State, client: str, device: torch.device) -> Adjust:
        drift = {name: (value - state[f"{client}/{name}"]).to(device) for name, value in part(state, "control").items()}

        def correct(model: nn.Module) -> None:
            for name, parameter in parameters_of(model).items():
                if parameter.grad is not None:
                    parameter.grad += drift[f"control/{name}"]

        return correct

    def after(self, state: State, client: str, trained: State, steps: int, lr: float) -> dict[str, torch.Tensor]:
        """c_i+ = c_i - c + (w_server - w_i) / (K lr)."""
        scale = 1.0 / (steps * max(lr, self.settings.lr_floor))
        return {
            f"{client}/{control}": state[f"{client}/{control}"] - server + (state[name] - trained[name]) * scale
            for control, server in part(state, "control").items()
            for name in [control.removeprefix("control/")]
        }

    def merge(self, state: State, clients: Mapping[str, State], samples: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """w = mean of w_i and, at full participation, c = mean of c_i."""
        merged = mean_model(clients, dict.fromkeys(clients, 1.0))
        own = {name: tensor for client in clients for name, tensor in part(clients[client], client).items()}
        control = {
            name: torch.stack([own[f"{client}/{name}"].double() for client in sorted(clients)]).mean(0).float()
            for name in part(state, "control")
        }
        return {**merged, **own, **control}

    def message(self, state: State) -> dict[str, torch.Tensor]:
        return {**part(state, "model"), **part(state, "control")}
