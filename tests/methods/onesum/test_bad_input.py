"""OneSum and odd sites: tiny, one-sided, constant or broken ones, and terms that are refused before they are sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import pytest
import torch

import osfl.methods.onesum as onesum
from osfl.core.errors import Rejected, RoundError, TrainingError, UploadBlocked
from osfl.core.method import Context, add_up
from osfl.core.types import Limits, Payload, Shard, Upload
from osfl.data.source import together
from osfl.ingredients.statistics.public_map import LEVELS
from osfl.methods.onesum import OneSum
from osfl.rounds.folder import contracts_of, simulated_key
from osfl.rounds.phases import run_client_phase
from osfl.runtime.payloads import payload_digest, to_raw
from osfl.runtime.workers import Workers
from osfl.simulate.checks import small_federation
from osfl.wire.bundle import pack
from osfl.wire.gate import AcceptancePolicy, accept
from tests.methods.onesum.test_onesum import ENCODER, ctx, method, only, pooled_shard, released, spoiled, uploads, whole


def send(one: OneSum, shard: Shard, context: Context) -> bytes:
    return run_client_phase(one, shard, context.plan, contracts_of(one), simulated_key(0, shard.client), context, real=False)[0]


@pytest.mark.parametrize("counts", [{3: 1}, {3: 12}, {0: 3, 1: 3}], ids=str)
@pytest.mark.parametrize("filters", [4, 24])
def test_tiny_sites_join_a_round(counts: dict[int, int], filters: int) -> None:
    """One image, one class, fewer images than dimensions: finite answers, and the others' classes are not lost."""
    federation = small_federation("onesum")
    one = method(federation, filters=filters)
    tiny = replace(only(pooled_shard(), counts), client="tiny")
    assert one.width() > len(tiny.train)
    for shards in ([tiny, *federation.shards], [tiny]):
        if shards == [tiny] and max(counts.values()) < 3:
            continue
        release = released(replace(federation, shards=shards), filters=filters)
        assert bool(one.build(release.shared)(torch.rand(4, 1, 8, 8) * 2 - 1).isfinite().all())


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ("not positive semidefinite", "gram"),
        ("moments beyond the bound", "gram"),
        ("sums beyond the bound", "sums"),
        ("sums of a class without images", "sums"),
        ("fewer images than the sums have", "gram"),
        ("more images than the plan allows", "counts"),
        ("other features", "facts.features"),
    ],
)
def test_a_term_that_no_images_can_have_does_not_leave_the_site(how: str, field: str) -> None:
    class Spoiling(OneSum):
        def client_phase(self, shard: Shard, ctx: Context) -> Payload:
            return spoiled(super().client_phase(shard, ctx), how)

    federation = small_federation("onesum")
    good = method(federation, least=1)
    shard, context = only(pooled_shard(), {0: 8, 1: 8, 2: 8}), ctx(federation)
    assert send(good, shard, context)
    with pytest.raises(UploadBlocked, match="the server would refuse it") as caught:
        send(Spoiling(good.task, good.settings), shard, context)
    assert (caught.value.client, caught.value.field) == (shard.client, field)


@pytest.mark.parametrize(
    ("name", "spoil", "message"),
    [
        ("counts", lambda t: t - 1000, "out of range"),
        ("counts", lambda t: t + (1 << 40), "out of range"),
        ("gram", lambda t: t[:-1], "shape"),
        ("sums", lambda t: t.double(), "dtype"),
        ("factor", lambda t: torch.full_like(t, float("nan")), "not finite"),
    ],
)
def test_the_gate_refuses_what_it_can_see(name: str, spoil: Callable[[torch.Tensor], torch.Tensor], message: str) -> None:
    """Counts below zero or beyond reason, other shapes and kinds of numbers, NaN; what they mean is for the server to see."""
    federation = small_federation("onesum")
    one = method(federation, least=1, filters=24, send="smaller" if name == "factor" else "triangle")
    shard, key = only(pooled_shard(), {0: 8, 1: 8, 2: 8}), simulated_key(0, "client-01")
    payload = one.client_phase(shard, ctx(federation))
    policy = AcceptancePolicy("0" * 64, {"client-01": key.public_hex}, contracts_of(one), 10)

    def bundle(tensors: Mapping[str, torch.Tensor]) -> bytes:
        return pack("upload", "client-01", "0" * 64, to_raw(tensors), dict(payload.facts), key)

    assert accept(bundle(payload.tensors), policy).client == "client-01"
    with pytest.raises(Rejected, match=message) as caught:
        accept(bundle({**payload.tensors, name: spoil(payload.tensors[name])}), policy)
    assert caught.value.client == "client-01" and name in str(caught.value)


def test_features_that_are_not_numbers_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = small_federation("onesum")
    one, shard = method(federation, **ENCODER), federation.shards[0]

    def broken(self: OneSum, *args: Any) -> torch.Tensor:
        tokens = torch.zeros(len(shard.train), 1, one.width())
        tokens[2] = float("nan")
        return tokens

    monkeypatch.setattr(OneSum, "encoded", broken)
    with pytest.raises(TrainingError, match="not numbers") as caught:
        one.client_phase(replace(shard, train=shard.train), ctx(federation))
    assert (caught.value.client, caught.value.field) == (shard.client, "encoder")


def at_the_bound(one: OneSum, client: str, images: int, context: Context) -> Upload:
    """So many images of one class, each with all features at the bound."""
    classes, d = len(one.task.classes), one.width()
    counts, sums = torch.zeros(classes, dtype=torch.int64), torch.zeros(classes, d, dtype=torch.int64)
    counts[0], sums[0] = images, images * one.settings.copies() * LEVELS
    gram = torch.full((d * (d + 1) // 2,), images * one.settings.copies() * LEVELS**2)
    return Upload(client, "", Payload({"counts": counts, "sums": sums, "gram": gram}, {"features": one._digest(context)}))


@pytest.mark.parametrize("symmetry", ["none", "square"])
def test_sums_at_the_bound_do_not_overflow(symmetry: str) -> None:
    """Sites with as many images as the plan allows, all at the bound: beyond what float64 adds exactly, and still exact."""
    federation, most = small_federation("onesum"), Limits().samples
    one = method(federation, symmetry=symmetry)
    full = [at_the_bound(one, f"s{i}", most - i, ctx(federation)) for i in range(30)]
    total, back = (add_up(one, some, ctx(federation)) for some in (full, full[::-1]))
    images = sum(most - i for i in range(30)) * one.settings.copies()
    assert sum(total.images.values()) * one.settings.copies() == images
    assert set(total.tensors["gram"].tolist()) == {images * LEVELS**2} and images * LEVELS**2 > 2**53
    assert all(torch.equal(value, back.tensors[name]) for name, value in total.tensors.items())
    with pytest.raises(RoundError, match="more images than the plan allows"):
        one.server_phase([at_the_bound(one, "s", most + 1, ctx(federation))], ctx(federation))


def test_more_images_than_sums_can_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    federation = small_federation("onesum")
    one, shard = method(federation, symmetry="flip"), federation.shards[0]
    kept = int(one.client_phase(shard, ctx(federation)).tensors["counts"].sum())
    monkeypatch.setattr(onesum, "_EXACT", 2 * kept * LEVELS**2)
    one.client_phase(shard, ctx(federation))
    monkeypatch.setattr(onesum, "_EXACT", 2 * kept * LEVELS**2 - 1)
    with pytest.raises(TrainingError, match="more images than its sums can hold") as caught:
        one.client_phase(shard, ctx(federation))
    assert caught.value.client == shard.client
    most = (2**63 - 1) // (2 * LEVELS**2)
    one._check_overflow(most)
    with pytest.raises(RoundError, match="all sites together"):
        one._check_overflow(most + 1)


# --- exact, whatever the order; and one at a time ----------------------------------------------------------------------------


class Counted(Sequence[Upload]):
    """Uploads that are made when they are asked for, and how often that was."""

    def __init__(self, made: Sequence[Upload]) -> None:
        self.made, self.opened = made, [0] * len(made)

    def __len__(self) -> int:
        return len(self.made)

    @overload
    def __getitem__(self, index: int) -> Upload: ...
    @overload
    def __getitem__(self, index: slice) -> list[Upload]: ...
    def __getitem__(self, index: int | slice) -> Upload | list[Upload]:
        assert isinstance(index, int)
        self.opened[index] += index < len(self.made)
        return self.made[index]


def test_order_and_workers_change_no_bit() -> None:
    federation = whole("dirichlet:0.5", 5, 0)
    one = method(federation)
    alone = uploads(one, federation)
    parallel = [Upload(s.client, "", one.client_phase(s, ctx(federation, map=Workers(2).map))) for s in federation.shards]
    assert all(payload_digest(a.payload) == payload_digest(b.payload) for a, b in zip(alone, parallel, strict=True))
    found = {
        payload_digest(one.server_phase(order, ctx(federation)).shared)
        for order in (alone, alone[::-1], parallel[2:] + parallel[:2])
    }
    assert len(found) == 1


def test_uploads_are_opened_once_and_those_above_the_cap_twice() -> None:
    federation = whole("silos", None, 0)
    one, first = method(federation), federation.shards[0]
    large = replace(first, train=together([first.train] * 40))
    sent = uploads(one, replace(federation, shards=[large, *federation.shards[1:]]))
    counted = Counted(sent)
    one.server_phase(counted, ctx(federation))
    assert counted.opened == [1] * len(sent)
    capped, counted = Context(replace(federation.plan, seed=0), torch.device("cpu")), Counted(sent)
    one.server_phase(counted, capped)
    assert counted.opened == [2, *[1] * (len(sent) - 1)]
