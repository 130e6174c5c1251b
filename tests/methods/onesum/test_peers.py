"""OneSum without a server: neighbors pass terms on, and nobody is counted twice, however often they meet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from osfl.core.errors import RoundError, TrainingError
from osfl.core.method import Context
from osfl.core.settings import resolve_settings
from osfl.core.topology import all_encounters, neighbors, parse_topology
from osfl.core.types import Payload, Plan, Release, Upload
from osfl.methods.onesum import OneSum
from osfl.runtime.payloads import payload_digest
from osfl.simulate.checks import small_federation
from osfl.simulate.run import run_federation
from osfl.simulate.simulation import Federation, Simulation, prepare


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


def method(federation: Federation, **changes: object) -> OneSum:
    return OneSum(federation.plan.task, resolve_settings(OneSum, "smoke", changes))


def encounter(one: OneSum, federation: Federation, plan: Plan, before: dict[str, Payload]) -> dict[str, Payload]:
    """One exchange of everybody; what each keeps of it, by client."""
    sent, release = [], Release(Payload({}))
    for shard in federation.shards:
        own = Context(plan, torch.device("cpu"), previous=before.get(shard.client))
        sent.append(Upload(shard.client, "", one.client_phase(shard, own)))
    release = one.server_phase(sent, Context(plan, torch.device("cpu")))
    kept = {}
    for shard in federation.shards:
        own = Context(plan, torch.device("cpu"), previous=before.get(shard.client))
        kept[shard.client] = one.personalize(release, shard, own)
    return kept


def in_topology(federation: Federation, text: str, times: int = 1) -> list[Plan]:
    return list(all_encounters(replace(federation.plan, topology=parse_topology(text, times))))


def head(payload: Payload) -> Payload:
    return Payload({name: value for name, value in payload.tensors.items() if name.startswith(("head/", "map/"))})


def test_in_a_mesh_every_peer_has_the_server_s_model_to_the_last_bit() -> None:
    federation = small_federation("onesum")
    plan = replace(federation.plan, limits=replace(federation.plan.limits, share=1.0))
    one = method(federation)
    ctx = Context(plan, torch.device("cpu"))
    served = one.server_phase([Upload(s.client, "", one.client_phase(s, ctx)) for s in federation.shards], ctx)
    kept = encounter(one, federation, in_topology(federation, "mesh")[0], {})
    assert {payload_digest(head(payload)) for payload in kept.values()} == {payload_digest(head(served.shared))}


def test_who_is_exchanged_again_is_not_counted_again() -> None:
    """Three encounters in a ring are with the same two neighbors."""
    federation = prepare(Simulation("onesum", "digits", 5, "iid", "smoke", 0, samples=150, image_size=8))
    one, kept, digests = method(federation), dict[str, Payload](), []
    for plan in in_topology(federation, "ring", 3):
        kept = encounter(one, federation, plan, kept)
        digests.append({client: payload_digest(payload) for client, payload in kept.items()})
    assert digests[0] == digests[1] == digests[2]
    first = federation.shards[0].client
    assert sorted(kept[first].facts["summed"]) == sorted([first, *neighbors(in_topology(federation, "ring")[0], first)])


def test_later_encounters_add_new_neighbors_once() -> None:
    federation = prepare(Simulation("onesum", "digits", 6, "iid", "smoke", 0, samples=180, image_size=8))
    one, kept = method(federation), dict[str, Payload]()
    counts = {s.client: one.client_phase(s, Context(federation.plan, torch.device("cpu"))) for s in federation.shards}
    exchanged: dict[str, set[str]] = {s.client: {s.client} for s in federation.shards}
    for plan in in_topology(federation, "random:2", 3):
        kept = encounter(one, federation, plan, kept)
        for client, names in exchanged.items():
            names |= set(neighbors(plan, client))
            assert set(kept[client].facts["summed"]) == names and len(kept[client].facts["summed"]) == len(names)
            expected = torch.stack([counts[name].tensors["counts"] for name in sorted(names)]).sum(0)
            assert torch.equal(kept[client].tensors["summed/counts"], expected.double())
    assert any(len(names) > 3 for names in exchanged.values())


def test_terms_are_passed_on_and_not_sums() -> None:
    federation = small_federation("onesum")
    one, plan = method(federation), in_topology(federation, "mesh")[0]
    ctx = Context(plan, torch.device("cpu"))
    sent = [Upload(s.client, "", one.client_phase(s, ctx)) for s in federation.shards]
    release = one.server_phase(sent, ctx)
    assert not release.shared.tensors
    got = release.for_client(sent[0].client)
    assert set(got.facts["members"]) == {upload.client for upload in sent[1:]}
    for upload in sent[1:]:
        assert torch.equal(got.tensors[f"{upload.client}/gram"], upload.payload.tensors["gram"])


def test_a_neighbor_s_impossible_term_is_refused_by_name() -> None:
    federation = small_federation("onesum")
    one, plan = method(federation), in_topology(federation, "mesh")[0]
    ctx, shard = Context(plan, torch.device("cpu")), federation.shards[0]
    liar = federation.shards[1].client
    payload = one.client_phase(federation.shards[1], ctx)
    broken = Payload({**payload.tensors, "gram": -payload.tensors["gram"]}, payload.facts)
    given = Release(Payload({}), {shard.client: one.relay(shard.client, [Upload(liar, "", broken)], ctx)})
    with pytest.raises(RoundError) as caught:
        one.personalize(given, shard, ctx)
    assert (caught.value.client, caught.value.field) == (liar, "gram")


def test_a_site_alone_answers_from_its_own_term_and_a_covariance_a_class_is_refused() -> None:
    federation = small_federation("onesum")
    plan, shard = in_topology(federation, "mesh")[0], federation.shards[0]
    ctx = Context(plan, torch.device("cpu"))
    alone = Release(Payload({}), {shard.client: method(federation).relay(shard.client, [], ctx)})
    own = method(federation).personalize(alone, shard, ctx)
    assert own.facts["summed"] == [shard.client]
    with pytest.raises(TrainingError, match="peers keep one second moment"):
        method(federation, head="qda", by_class=True).personalize(alone, shard, ctx)


def test_peers_run_as_a_simulation(tmp_path: Path) -> None:
    federation = prepare(
        Simulation(
            "onesum",
            "digits",
            4,
            "iid",
            "smoke",
            0,
            {"prior": "site"},
            samples=160,
            image_size=8,
            topology=parse_topology("random:2", 2),
        )
    )
    result = run_federation(federation, tmp_path / "run", {})
    assert [one["encounter"] for one in result["encounters"]] == [1, 2]
    assert result["scores"]["clients"]["own"]["mean"] > 0.3
