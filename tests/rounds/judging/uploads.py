"""Uploads of small federations, honest ones and lies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from osfl.core.method import Context, Method
from osfl.core.registry import load
from osfl.core.types import ClientId, Dataset, Payload, Shard
from osfl.roles import coordinator
from osfl.rounds.folder import simulated_key
from osfl.runtime.payloads import to_raw
from osfl.runtime.workers import Workers, compute_threads
from osfl.simulate.checks import small_federation
from osfl.simulate.simulation import Federation
from osfl.wire.bundle import pack


def sent(federation: Federation) -> tuple[Method, Context, dict[ClientId, Payload]]:
    """The method, what it computes with, and what every site sends."""
    method = load(federation.plan.method)(federation.plan.task, federation.plan.settings)
    ctx = Context(federation.plan, torch.device("cpu"), map=Workers(1).map)
    return method, ctx, {shard.client: method.client_phase(shard, ctx) for shard in federation.shards}


def lying(method: Method, federation: Federation, client: ClientId) -> Payload:
    """What the site sends that calls every class by the next one's name."""
    ctx, classes = Context(federation.plan, torch.device("cpu"), map=Workers(1).map), len(federation.plan.task.classes)
    shard = next(shard for shard in federation.shards if shard.client == client)
    return method.client_phase(_renamed(shard, classes), ctx)


def _renamed(shard: Shard, classes: int) -> Shard:
    train, val = (Dataset(part.images, (part.labels + 1) % classes) for part in (shard.train, shard.val))
    return replace(shard, train=train, val=val, digest=f"{shard.digest} renamed")


def lying_round(folder: Path, liar: ClientId) -> Path:
    """A real round of five sites that have all delivered; one calls every class by another name."""
    federation = small_federation("onesum", "iid", 5, samples=600)
    plan, key = federation.plan, simulated_key(federation.plan.seed, "server")
    keys = {client: simulated_key(plan.seed, client) for client in plan.clients}
    coordinator.open_new(folder, plan, {client: one.public_hex for client, one in keys.items()}, key.public_hex)
    with compute_threads(1):
        method, _, honest = sent(federation)
        payloads = {**honest, liar: lying(method, federation, liar)}
    for client, payload in payloads.items():
        bundle = pack("upload", client, plan.digest, to_raw(payload.tensors), dict(payload.facts), keys[client])
        coordinator.receive(folder, bundle)
    return folder
