"""Server phases that read uploads one after the other: those of a thousand sites are never in memory together."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, overload

import pytest
import torch

from osfl.core.method import Context
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import Dataset, Payload, Plan, Shard, Task, Upload
from osfl.ingredients.training.one_upload import by_client
from osfl.runtime.payloads import payload_digest

SITES = ("a", "b", "c", "d", "e", "f")
TASK = Task("squares", ("x", "y"), (1, 8, 8))


class Read(Sequence[Upload]):
    """Uploads as a round folder gives them: each is made anew when it is asked for. Counts how many are alive at once."""

    def __init__(self, kept: Sequence[Upload]) -> None:
        self.kept, self.alive, self.most = kept, 0, 0

    def __len__(self) -> int:
        return len(self.kept)

    @overload
    def __getitem__(self, index: int) -> Upload: ...
    @overload
    def __getitem__(self, index: slice) -> list[Upload]: ...
    def __getitem__(self, index: int | slice) -> Upload | list[Upload]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        one = self.kept[index]
        payload = Payload({name: value.clone() for name, value in one.payload.tensors.items()}, one.payload.facts)
        largest = max(payload.tensors.values(), key=torch.Tensor.numel)
        self.alive += 1
        self.most = max(self.most, self.alive)
        weakref.finalize(largest, self._gone)
        return Upload(one.client, one.plan, payload)

    def _gone(self) -> None:
        self.alive -= 1


def shard(client: str) -> Shard:
    rng = torch.Generator().manual_seed(ord(client))
    images = torch.randint(0, 256, (30, 1, 8, 8), generator=rng, dtype=torch.uint8)
    data = Dataset(images, torch.arange(30) % 2)
    return Shard(client, data, data.subset(torch.arange(4)), client)


@pytest.mark.parametrize(
    ("method", "changes"),
    [("fedavg", {}), ("fedcgs", {"ridge": 0.1}), ("falcon", {"send": "generator"}), ("federated_factory", {"least": 3})],
)
def test_a_server_reads_one_upload_after_the_other(method: str, changes: dict[str, Any]) -> None:
    plan = Plan(TASK, method, resolve_settings(load(method), "smoke", changes), SITES)
    made, ctx = load(method)(TASK, plan.settings), Context(plan, torch.device("cpu"))
    kept = [Upload(client, plan.digest, made.client_phase(shard(client), ctx)) for client in SITES]
    uploads = Read(kept)
    found = made.server_phase(uploads, ctx)
    assert payload_digest(found.shared) == payload_digest(made.server_phase(kept, ctx).shared)
    assert uploads.most <= 3  # the next is read while variables still name the last, however many there are


def test_an_order_by_name_reads_nothing_ahead() -> None:
    uploads = Read([Upload(client, "", Payload({"x": torch.ones(2)})) for client in "cab"])
    ordered = by_client(uploads)
    assert [upload.client for upload in ordered] == ["a", "b", "c"] and len(ordered) == 3
    assert [upload.client for upload in ordered[1:]] == ["b", "c"]
    del ordered
    assert uploads.most <= 3
