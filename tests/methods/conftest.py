"""Small federations for the equations of single methods."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from osfl.core.method import Context
from osfl.core.types import Dataset, Plan, Shard, Task

TASK = Task("toy", ("a", "b", "c"), (1, 8, 8))


def shard(client: str, n: int = 24, seed: int = 0) -> Shard:
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 3
    images = torch.randint(0, 256, (n, 1, 8, 8), generator=rng, dtype=torch.uint8)
    images[:, :, :4, :4] = (labels * 100).to(torch.uint8)[:, None, None, None]
    data = Dataset(images, labels)
    return Shard(client, data, data.subset(torch.arange(0)), f"{client}-{seed}-{n}")


def context(settings: object, clients: Sequence[str], seed: int = 0) -> Context:
    return Context(Plan(TASK, "fedavg", settings, tuple(clients), seed=seed), torch.device("cpu"))


@pytest.fixture
def task() -> Task:
    return TASK
