"""Signed uploads that are not what a client of the method sends: refused by the gate with the field, or used, or named; no
server phase ends in another way.

Mutants are derived from real uploads: a tensor or a fact less, values of zero, negative, huge, free dimensions of nothing.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.core.errors import OsflError, Rejected
from osfl.core.method import Context
from osfl.core.registry import is_reference, load, names
from osfl.core.types import Payload
from osfl.roles.coordinator import make_release, status
from osfl.rounds.folder import contracts_of, open_round, simulated_key
from osfl.runtime.machine import Machine
from osfl.runtime.payloads import to_raw
from osfl.runtime.workers import compute_threads
from osfl.simulate.checks import small_federation
from osfl.wire.bundle import pack

MUTATED = "client-02"
SETTINGS: Mapping[str, list[Mapping[str, Any]]] = {
    "falcon": [{"send": "sequences"}, {"send": "generator"}, {"server": "average"}],
    "fedcgs": [{}, {"by_class": True}],
    "fedpft": [{}, {"shape": "full"}],
    "onesum": [{}, {"by_class": True}, {"send": "smaller", "filters": 24}],
    "federated_factory": [{}, {"mode": "peer"}, {"factory": "vae"}, {"factory": "edm"}],
    "ensemble": [{"ensemble": "size"}, {"ensemble": "odds"}],
    "fedftg": [{}],
    "fedavg": [{}, {"weighting": "uniform"}],
}
METHODS = [name for name in names() if not is_reference(load(name))]
CASES = [(name, dict(changes)) for name in METHODS for changes in SETTINGS.get(name, [{}])]


def mutants(payload: Payload, contract: Mapping[str, Any]) -> Iterator[tuple[str, Payload]]:
    """A few of each kind: of tensors with alike names the first stands for the others."""
    tensors, facts = dict(payload.tensors), dict(payload.facts)
    for name in facts:
        yield f"without fact {name}", Payload(tensors, {key: value for key, value in facts.items() if key != name})
    for samples in (0, -1):
        yield f"samples {samples}", Payload(tensors, {**facts, "samples": samples})
    if "class_counts" in facts:
        classes = len(facts["class_counts"])
        yield "negative class counts", Payload(tensors, {**facts, "class_counts": [-7, *facts["class_counts"][1:]]})
        yield "class counts of nothing", Payload(tensors, {**facts, "class_counts": [0] * classes})
        yield "part of the class counts", Payload(tensors, {**facts, "class_counts": facts["class_counts"][1:]})
        yield "one class", Payload(tensors, {**facts, "class_counts": [7] + [0] * (classes - 1)})
        yield "claims the most", Payload(tensors, {**facts, "samples": 10**6, "class_counts": [10**6 // classes] * classes})
    else:
        yield "claims the most", Payload(tensors, {**facts, "samples": 10**6})
    for name in reporting(tensors):
        value = tensors[name]
        if not contract[name].required:
            yield f"without {name}", Payload({key: one for key, one in tensors.items() if key != name}, facts)
        for what, factor in (("zero", 0.0), ("negative", -1.0), ("huge", math.inf)):
            if value.is_floating_point():
                made = torch.full_like(value, torch.finfo(value.dtype).max) if factor == math.inf else value * factor
                yield f"{what} {name}", Payload({**tensors, name: made}, facts)
    for side in sorted({side for field in contract.values() for side in field.shape if isinstance(side, str)})[:2]:
        shorter = {name: emptied(value, contract[name].shape, side) for name, value in tensors.items()}
        yield f"nothing along {side}", Payload(shorter, facts)
    optional = {name: value for name, value in tensors.items() if contract[name].required}
    if len(optional) < len(tensors):
        yield "no optional tensor", Payload(optional, facts)


def reporting(tensors: Mapping[str, Any]) -> list[str]:
    """One tensor of each kind: first and last of a network, those of one class."""
    classes = sorted({name.split("/")[0] for name in tensors if name.startswith("class-")})
    plain = [name for name in tensors if not name.startswith("class-")]
    one = [name for name in tensors if classes and name.startswith(f"{classes[0]}/")]
    chosen = [*plain[:1], *plain[-2:], *(name for name in ("sequences", "labels", "statistics", "sums") if name in tensors)]
    return list(dict.fromkeys([*chosen, *one[:1], *one[-4:]]))


def emptied(value: torch.Tensor, shape: tuple[int | str, ...], side: str) -> torch.Tensor:
    for place, want in enumerate(shape):
        if want == side:
            value = value.narrow(place, 0, 0)
    return value


@functools.cache
def reported(name: str, changes: str) -> tuple[Any, Any, dict[str, Payload]]:
    """The plan, the method and what its clients send: computed once for all mutants."""
    federation = small_federation(name)
    plan = federation.plan
    plan = replace(plan, settings=replace(plan.settings, **json.loads(changes)))
    method = load(name)(plan.task, plan.settings)
    with compute_threads(1):
        ctx = Context(plan, torch.device("cpu"))
        return plan, method, {shard.client: method.client_phase(shard, ctx) for shard in federation.shards}


def outcome_of(name: str, changes: Mapping[str, Any], payload: Payload, folder: Path) -> str:
    """The field that the gate refuses, or "used", or who was named; anything else is raised."""
    plan, method, payloads = reported(name, json.dumps(dict(changes)))
    keys = {client: simulated_key(0, client) for client in (*plan.clients, "server")}
    enrolled = {client: keys[client].public_hex for client in plan.clients}
    with open_round(folder, plan, contracts_of(method), enrolled, keys["server"]) as fl_round:
        for client in plan.clients:
            sent = payload if client == MUTATED else payloads[client]
            bundle = pack("upload", client, plan.digest, to_raw(sent.tensors), dict(sent.facts), keys[client])
            try:
                fl_round.inbox.receive(bundle)
            except Rejected as no:
                assert no.client == client == MUTATED and no.field and no.fix
                return f"refused: {no.field}"
    try:
        make_release(folder, keys["server"], machine=Machine(workers=1))
    except OsflError as error:
        assert error.client == MUTATED and error.fix, error
        failed = status(folder).failed
        assert failed is not None and failed["client"] == MUTATED and "--exclude" in str(failed["fix"]), failed
        assert make_release(folder, keys["server"], machine=Machine(workers=1), without=[MUTATED])
        return f"named: {error.reason}"
    return "used"


@pytest.mark.parametrize(("name", "changes"), CASES, ids=[f"{n}-{'-'.join(map(str, c.values()))}" for n, c in CASES])
def test_no_signed_upload_ends_a_server_phase_in_a_traceback(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    _, method, payloads = reported(name, json.dumps(changes))
    contracts = contracts_of(method)
    payload = payloads[MUTATED]
    contract = contracts[payload.facts["architecture"] if "" not in contracts else ""]
    failures = []
    for number, (what, mutant) in enumerate(mutants(payload, contract)):
        try:
            found = outcome_of(name, changes, mutant, tmp_path / str(number))
            print(f"{what}: {found}")
        except Exception as error:  # all of them at once
            failures.append(f"{what}: {type(error).__name__}: {str(error)[:200]}")
    assert not failures, "\n".join(failures)


@pytest.mark.parametrize("name", ["fedcgs", "fedpft", "falcon", "federated_factory"])
def test_the_gate_asks_for_the_facts_that_a_method_needs(name: str) -> None:
    plan = small_federation(name).plan
    contract = next(iter(contracts_of(load(name)(plan.task, plan.settings)).values()))
    assert {field.needs for field in contract.values()} == {("samples", "class_counts")}
