"""Uploads of small federations, honest ones and lies."""

from __future__ import annotations

from dataclasses import replace

import torch

from osfl.core.method import Context, Method
from osfl.core.registry import load
from osfl.core.types import ClientId, Dataset, Payload, Shard
from osfl.runtime.workers import Workers
from osfl.simulate.simulation import Federation


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
