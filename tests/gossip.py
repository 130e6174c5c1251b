"""The smallest method that only passes uploads on, for tests of topologies: each client averages them with its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint

import pytest

from osfl.core import registry
from osfl.core.method import Context, relayed
from osfl.core.types import ClientId, Payload, Release, Shard, Upload
from osfl.ingredients.statistics.averaging import average
from osfl.ingredients.training.local import Training, local_model
from osfl.ingredients.training.model_method import ModelMethod


@dataclass(frozen=True)
class Settings(Training):
    pass


class Gossip(ModelMethod):
    Settings = Settings

    def client_phase(self, shard: Shard, ctx: Context) -> Payload:
        return self._own(shard, ctx)

    def _own(self, shard: Shard, ctx: Context) -> Payload:
        return ctx.previous or local_model(shard, self.task, self.settings, ctx)

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        return relayed(self, uploads, ctx)

    def relay(self, client: ClientId, uploads: Sequence[Upload], ctx: Context) -> Payload:
        tensors = {f"{u.client}/{name}": tensor for u in uploads for name, tensor in u.payload.tensors.items()}
        return Payload(tensors, {"received": [u.client for u in uploads]})

    def personalize(self, release: Release, shard: Shard, ctx: Context) -> Payload:
        part, own = release.for_client(shard.client), self._own(shard, ctx)
        models = [own.tensors]
        for client in part.facts.get("received", []):
            models.append({name: part.tensors[f"{client}/{name}"] for name in own.tensors})
        return Payload(average(models, [1.0] * len(models)), own.facts)


def enter(patch: pytest.MonkeyPatch) -> None:
    """Make it known as `gossip`, as an installed package would."""
    patch.setattr(registry, "_outside", lambda: {"gossip": EntryPoint("gossip", "tests.gossip:Gossip", registry.GROUP)})
