"""Server phases that read uploads one after the other: those of a thousand sites are never in memory together."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, overload

import pytest
import torch
from torch import nn

from osfl.core.method import Context
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import Dataset, Payload, Plan, Release, Shard, Task, Upload
from osfl.ingredients.ensembles.paging import Networks
from osfl.ingredients.training.model_method import ModelMethod
from osfl.ingredients.training.one_upload import by_client
from osfl.models.build import build_model
from osfl.models.naming import named
from osfl.runtime.memory import budget
from osfl.runtime.meter import peak_memory, reset_peak_memory
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


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("deepinversion", {"invert": "clients", "ask_again": True, "architecture": "cnn-w4"}),
        ("fedisca", {"invert": "clients", "architecture": "cnn-w4"}),
        ("fedbicross", {"architecture": "cnn-w4", "clusters": 4}),
        ("fedmitr", {"architecture": "vit-p4-w8-d1-h2"}),
    ],
)
def test_networks_beyond_the_memory_are_built_again_to_the_same_release(
    method: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither uploads nor networks of all sites are in memory together where the limit says so."""
    plan = Plan(TASK, method, resolve_settings(load(method), "smoke", changes), SITES)
    made, ctx = load(method)(TASK, plan.settings), Context(plan, torch.device("cpu"))
    kept = [Upload(client, plan.digest, made.client_phase(shard(client), ctx)) for client in SITES]
    whole = made.server_phase(kept, ctx)
    alive = Counted(monkeypatch)
    uploads = Read(kept)
    with budget(1):
        found = made.server_phase(uploads, ctx)
    assert digests(found) == digests(whole)
    assert uploads.most <= 4
    assert 0 < alive.most <= 4, "the one that works, the one before it, and those of the pages between them"


def digests(release: Release) -> list[str]:
    return [payload_digest(part) for part in (release.shared, *release.personal.values())]


class Counted:
    """How many networks that were built from uploads are alive at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.alive = self.most = 0
        build = ModelMethod.build

        def counted(method: ModelMethod, payload: Payload) -> nn.Module:
            model = build(method, payload)
            self.alive += 1
            self.most = max(self.most, self.alive)
            weakref.finalize(model, self._gone)
            return model

        monkeypatch.setattr(ModelMethod, "build", counted)

    def _gone(self) -> None:
        self.alive -= 1


def test_what_was_asked_for_last_stays_within_the_limit() -> None:
    built: list[int] = []

    def make(place: int) -> nn.Module:
        built.append(place)
        return nn.Linear(10, 1, bias=False)  # 40 bytes

    members = Networks(4, make, 80)
    assert len(members) == 4 and members[1] is members[1] and members[-3] is members[1]
    assert len(list(members)) == 4 and built == [1, 0, 2, 3]  # 1 was still there when it was its turn
    members[3], members[2], members[0]
    assert built == [1, 0, 2, 3, 0]
    with pytest.raises(IndexError):
        members[4]
    assert len(members[2:]) == 2 and members[2:][1] is not members[2] and built == [1, 0, 2, 3, 0, 3, 2]


def test_memory_of_an_inversion_of_two_hundred_networks() -> None:
    """The server holds networks of 0.7 MB each; two hundred of them take what ten do, with the same limit."""
    settings = resolve_settings(
        load("deepinversion"), "smoke", {"invert": "clients", "architecture": "cnn-w40", "images": 2, "steps": 1, "rounds": 1}
    )
    peaks = []
    for sites in (10, 200):
        plan = Plan(TASK, "deepinversion", settings, tuple(f"site-{number:03}" for number in range(sites)))
        made = load("deepinversion")(TASK, settings)
        one = named(build_model("cnn-w40", TASK, torch.Generator().manual_seed(0)), "model")
        facts = {"architecture": "cnn-w40", "samples": 4, "class_counts": [2, 2]}
        uploads = Read([Upload(client, "", Payload(one, facts)) for client in plan.clients])
        reset_peak_memory()
        before = peak_memory()
        with budget(20 << 20):
            made.server_phase(uploads, Context(plan, torch.device("cpu")))
        peaks.append(peak_memory() - before)
    size = sum(tensor.nbytes for tensor in one.values())
    assert 190 * size > 100 << 20, "what all would take, and their uploads as much again"
    assert peaks[1] - peaks[0] < 60 << 20, peaks
