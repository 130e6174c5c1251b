"""What every method must pass, as a public list: `for check in CHECKS.values(): check("my_method", tmp_path)`.

A new file in osfl/methods is checked at once by our tests; a method outside the package calls `check_method`. Each check
runs the whole walk on three small clients in seconds, and says in an AssertionError what does not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from osfl.phases import Machine
from osfl.protocol import Context, Payload, Release, Upload
from osfl.registry import is_reference, load
from osfl.result import Result
from osfl.run import load_model, walk
from osfl.simulation import Federation, Simulation, prepare
from osfl.storage import payload_digest
from osfl.workers import compute_threads

Check = Callable[[str, Path], None]


@lru_cache(maxsize=64)
def small_federation(method: str, partition: str = "dirichlet:0.5", clients: int | None = 3, seed: int = 0) -> Federation:
    """Three clients with some forty images of 8 x 8 pixels each."""
    return prepare(Simulation(method, "digits", clients, partition, "smoke", seed, samples=120, image_size=8))


def _walk(federation: Federation, out: Path, **options: Any) -> Result:
    return walk(federation, out, {"preset": "smoke", "command": ""}, **options)


def _digests(result: Result) -> tuple[str, str]:
    return result["release_digest"], result["models_digest"]


def runs_and_scores(method: str, folder: Path) -> None:
    """The walk ends with finite scores, and the finished model answers with one logit a class."""
    result = _walk(small_federation(method), folder)
    scores = result["scores"]["global"]
    assert all(value is not None and 0 <= value < float("inf") for value in scores.values()), scores  # type: ignore[operator]
    own = result["scores"]["personalized"]
    model, task = load_model(folder, result["clients"][0]["client"] if own else None)
    logits = model(torch.zeros(2, *task.image))
    assert logits.shape == (2, len(task.classes)) and bool(torch.isfinite(logits).all())


def repeats(method: str, folder: Path) -> None:
    """The same seed gives the same bytes; another seed gives others."""
    first = _walk(small_federation(method), folder / "a")
    assert _digests(_walk(small_federation(method), folder / "b")) == _digests(first)
    assert _digests(_walk(small_federation(method, seed=1), folder / "c"))[1] != first["models_digest"]


def order_and_workers_do_not_matter(method: str, folder: Path) -> None:
    """Any order of clients and any number of workers give the same bytes."""
    federation = small_federation(method)
    first = _walk(federation, folder / "a", machine=Machine(workers=1))
    backwards = replace(federation, shards=list(reversed(federation.shards)))
    assert _digests(_walk(backwards, folder / "b", machine=Machine(workers=2))) == _digests(first)


class Interrupted(Exception):
    """Raised by the checks to stop a walk at a chosen point."""


def resumes(method: str, folder: Path) -> None:
    """Stopped at every reported step in turn, each attempt goes on where the last one stopped, to the same bytes."""
    federation = small_federation(method)
    expected = _walk(federation, folder / "whole")
    seen: list[tuple[str, int, int]] = []

    def stop_once(what: str, done: int, total: int) -> None:
        if (what, done, total) not in seen:
            seen.append((what, done, total))
            raise Interrupted

    for _ in range(200):
        try:
            result = _walk(federation, folder / "parts", progress=stop_once, machine=Machine(workers=1))
        except Interrupted:
            continue
        assert _digests(result) == _digests(expected)
        return
    raise AssertionError(f"no end after 200 interruptions; the last ones: {seen[-3:]}")


def survives_hard_shards(method: str, folder: Path) -> None:
    """Clients with a single class, and a round of one client, both work."""
    _walk(small_federation(method, "silos", None), folder / "silos")
    _walk(small_federation(method, "iid", 1), folder / "one")


def forgets_exactly(method: str, folder: Path) -> None:
    """Without a client, the release equals that of a round which the client never joined."""
    with compute_threads(1):
        _forgets_exactly(method, folder)


def _forgets_exactly(method: str, folder: Path) -> None:
    federation = small_federation(method)
    stays = [shard for shard in federation.shards if shard.client != "client-02"]
    never = replace(
        federation, shards=stays, plan=replace(federation.plan, clients=tuple(shard.client for shard in stays))
    )
    instance = load(method)(federation.plan.task, federation.plan.settings)
    if is_reference(instance):
        expected = instance.simulate(stays, _context(federation, folder / "x")).release
        assert _release_digest(instance.simulate(stays, _context(never, folder / "y")).release) == _release_digest(expected)
        return
    everyone = [_upload(instance, shard, federation, folder) for shard in federation.shards]
    left = [upload for upload in everyone if upload.client != "client-02"]
    forgotten = instance.server_phase(left, _context(federation, folder / "x"))
    joined = [_upload(instance, shard, never, folder) for shard in stays]
    assert _release_digest(forgotten) == _release_digest(instance.server_phase(joined, _context(never, folder / "y")))


def server_sees_uploads_only(method: str, folder: Path) -> None:
    """What a client sends is named tensors that follow the contract; no raw sample is among them (the walk refuses those)."""
    federation = small_federation(method)
    instance = load(method)(federation.plan.task, federation.plan.settings)
    if is_reference(instance):
        return
    payload = instance.client_phase(federation.shards[0], _context(federation, folder / "x"))
    contract = instance.contract(payload.facts.get("architecture", ""))
    required = {name for name, field in contract.items() if field.required}
    assert required <= set(payload.tensors) <= set(contract)


def _context(federation: Federation, scratch: Path) -> Context:
    return Context(federation.plan, torch.device("cpu"), scratch=scratch)


def _upload(instance: Any, shard: Any, federation: Federation, folder: Path) -> Upload:
    payload: Payload = instance.client_phase(shard, _context(federation, folder / shard.client))
    return Upload(shard.client, federation.plan.digest, payload)


def _release_digest(release: Release) -> list[str]:
    personal = [payload_digest(release.personal[client]) for client in sorted(release.personal)]
    return [payload_digest(release.shared), *personal]


CHECKS: Mapping[str, Check] = {
    check.__name__: check
    for check in (
        runs_and_scores, repeats, order_and_workers_do_not_matter, resumes, survives_hard_shards, forgets_exactly,
        server_sees_uploads_only,
    )
}  # fmt: skip


def check_method(method: str, folder: Path) -> None:
    """All checks, one after the other; the first that fails raises."""
    for name, check in CHECKS.items():
        check(method, folder / name)
