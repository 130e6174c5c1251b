"""Many rounds instead of one: the loop that FedAvg, FedProx, SCAFFOLD and FedDyn share, with a checkpoint after each round.

They are references in simulation: what one-shot methods are measured against, with every byte they would send counted.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import nn

from osfl.core.method import Context, Method
from osfl.core.types import Exchange, Payload, Presets, Release, Shard, Simulated
from osfl.ingredients.statistics.averaging import average
from osfl.ingredients.training.local import (
    CPU_TRAINING,
    SMOKE_TRAINING,
    Adjust,
    Training,
    classifier,
    decay,
    first_model,
    fit,
    training_problems,
)
from osfl.models.build import build_model
from osfl.models.naming import load_named, named
from osfl.runtime.meter import Meter, book, measure
from osfl.runtime.payloads import load_payload, save_payload

State: TypeAlias = Mapping[str, torch.Tensor]  # "model/…", and what an algorithm adds: "control/…", "client-01/h/…"


@dataclass(frozen=True)
class Rounds(Training):
    """Defaults: the multi-round baselines of FederatedFactory (200 rounds of 5 epochs, all clients)."""

    rounds: int = 200  # communication rounds
    epochs: int = 5  # local epochs a round
    lr: float = 0.1
    weight_decay: float = 1e-4
    schedule: Literal["steps", "cosine", "constant"] = "cosine"  # over the rounds; constant within a round
    clip: float = 5.0


ROUNDS_PRESETS: Mapping[str, Mapping[str, object]] = {
    "paper": {},
    "cpu": {**CPU_TRAINING, "rounds": 10, "epochs": 2},
    "smoke": {**SMOKE_TRAINING, "rounds": 2, "epochs": 1},
}


CHECKPOINT = "rounds.safetensors"


@dataclass(frozen=True)
class _Progress:
    """Where the loop stands; kept after every round, so that a killed run goes on from there."""

    rounds: int
    state: State
    seconds: float = 0.0  # of the clients
    flops: float = 0.0
    server_seconds: float = 0.0

    def keep(self, ctx: Context) -> None:
        if ctx.scratch:
            facts = {"rounds": self.rounds, "seconds": self.seconds, "flops": self.flops, "server_seconds": self.server_seconds}
            save_payload(ctx.scratch / CHECKPOINT, Payload(self.state, facts))


class MultiRound(Method):
    """One algorithm defines how gradients are corrected (`adjust`), what a client adds (`after`) and how the server merges."""

    PRESETS: ClassVar[Presets] = ROUNDS_PRESETS
    TASKS = ("multiclass", "multilabel")
    DEVIATIONS: ClassVar[Sequence[str]] = ("runs in simulation only: each client uploads once in every round, not once",)

    def problems(self, clients: int) -> list[str]:
        few = self.settings.rounds < 1
        found = training_problems(self.settings, self.task, one="many rounds average one model")
        return found + [f"setting 'rounds': expected at least 1, got {self.settings.rounds}"] * few

    def start(self, shards: Sequence[Shard], model: State) -> dict[str, torch.Tensor]:
        """Extra state at the beginning, beside the model."""
        return {}

    def adjust(self, state: State, client: str, device: torch.device) -> Adjust | None:
        """Correction of the gradients at this client, which trains on this device; None = plain SGD. What a correction reads of
        the state moves to the device once: a copy at each step would make a GPU wait."""
        return None

    def after(self, state: State, client: str, trained: State, steps: int, lr: float) -> dict[str, torch.Tensor]:
        """What the client keeps or sends besides its model."""
        return {}

    @abstractmethod
    def merge(self, state: State, clients: Mapping[str, State], samples: Mapping[str, int]) -> dict[str, torch.Tensor]:
        """The server's next state from what the clients sent."""

    def message(self, state: State) -> dict[str, torch.Tensor]:
        """What one message holds, either way: the model, and for some algorithms a second set of numbers."""
        return part(state, "model")

    # --- the loop ---

    def simulate(self, shards: Sequence[Shard], ctx: Context) -> Simulated:
        shards = sorted(shards, key=lambda shard: shard.client)
        progress = self._resume(shards, ctx)
        ctx.progress("rounds", progress.rounds, self.settings.rounds)
        while progress.rounds < self.settings.rounds:
            progress = self._one_round(progress, shards, ctx)
            progress.keep(ctx)
            ctx.milestone(progress.rounds, self.settings.rounds, lambda state=progress.state: self._release(state))  # type: ignore[misc]
            ctx.progress("rounds", progress.rounds, self.settings.rounds)
        state = progress.state
        exchange = [Exchange(Payload(self.message(state)), self.settings.rounds)]
        everyone = {shard.client: exchange for shard in shards}
        return Simulated(Release(self._release(state)), everyone, everyone, progress.seconds, progress.flops)

    def _release(self, state: State) -> Payload:
        return Payload(part(state, "model"), {"architecture": self.settings.architecture})

    def _one_round(self, before: _Progress, shards: Sequence[Shard], ctx: Context) -> _Progress:
        start = time.perf_counter()
        replies = ctx.map(lambda shard: self._local(shard, before.state, before.rounds, ctx), shards)
        book(start - time.perf_counter())  # the clients' time, not the server's
        sent = {shard.client: reply for shard, (reply, _) in zip(shards, replies, strict=True)}
        with measure() as merging:
            state = self.merge(before.state, sent, {shard.client: len(shard.train) for shard in shards})
        seconds = before.seconds + sum(meter.seconds for _, meter in replies)
        flops = before.flops + sum(meter.flops for _, meter in replies)
        return _Progress(before.rounds + 1, state, seconds, flops, before.server_seconds + merging.seconds)

    def _local(self, shard: Shard, state: State, number: int, ctx: Context) -> tuple[dict[str, torch.Tensor], Meter]:
        model = build_model(self.settings.architecture, self.task)
        load_named(model, state, "model")
        lr = self.settings.lr * decay(self.settings.schedule, number, self.settings.rounds)
        recipe = replace(self.settings, lr=lr, schedule="constant")
        rng = ctx.generator("round", number, shard.client)
        with measure() as meter:
            device = ctx.for_client(shard.client).device
            adjust = self.adjust(state, shard.client, device)
            steps = fit(model, shard.train, recipe, rng, device=device, adjust=adjust)
        trained = named(model, "model")
        return {**trained, **self.after(state, shard.client, trained, steps, lr)}, meter

    def _resume(self, shards: Sequence[Shard], ctx: Context) -> _Progress:
        kept = load_payload(ctx.scratch / CHECKPOINT) if ctx.scratch else None
        if kept is not None:
            done = _Progress(state=kept.tensors, **kept.facts)
            book(done.server_seconds)  # spent before the interruption
            return done
        architecture = self.settings.architecture
        begun = first_model(self.settings, architecture, self.task, ctx.generator("init", architecture))
        model = named(begun, "model")
        return _Progress(0, {**model, **self.start(shards, model)})

    def build(self, payload: Payload) -> nn.Module:
        return classifier(payload, self.task)


def part(state: State, prefix: str) -> dict[str, torch.Tensor]:
    """The tensors under one prefix, with their full names."""
    return {name: tensor for name, tensor in state.items() if name.startswith(f"{prefix}/")}


def mean_model(clients: Mapping[str, State], weights: Mapping[str, float]) -> dict[str, torch.Tensor]:
    """Weighted mean of the clients' models."""
    names = sorted(clients)
    return average([part(clients[name], "model") for name in names], [weights[name] for name in names])


def parameters_of(model: nn.Module) -> Mapping[str, nn.Parameter]:
    """Trainable parameters by their name on the wire; corrections apply to these, never to BN buffers."""
    return {f"model/{name}": parameter for name, parameter in model.named_parameters()}
