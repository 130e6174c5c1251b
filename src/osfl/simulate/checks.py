"""Checks that every method must pass, as a public list: `for check in CHECKS.values(): check("my_method", tmp_path)`.

A new file in osfl/methods is checked at once by our tests; a method outside the package calls `check_method`. Each check
runs a whole round on three small clients in seconds, and raises an AssertionError that names what does not hold.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from osfl.core.method import Context, Method, quiet
from osfl.core.registry import is_reference, load
from osfl.core.result import Result
from osfl.core.types import Dataset, Release
from osfl.rounds.finished import load_model
from osfl.rounds.folder import contracts_of, existing_round, open_round, simulated_key
from osfl.rounds.forgetting import Finding, forget, verify
from osfl.rounds.forgetting.request import is_empty
from osfl.rounds.phases import computing, run_server_phase
from osfl.runtime.machine import Machine
from osfl.runtime.payloads import payload_digest, to_raw
from osfl.runtime.workers import compute_threads
from osfl.simulate.run import run_federation
from osfl.simulate.simulation import Federation, Simulation, prepare
from osfl.wire.bundle import pack

Check = Callable[[str, Path], None]
APART: Mapping[str, Mapping[str, object]] = {  # classes apart
    "fedcgs": {"by_class": True},
    "onesum": {"by_class": True},
    "falcon": {"send": "sequences"},
}


@lru_cache(maxsize=64)
def small_federation(
    method: str, partition: str = "dirichlet:0.5", clients: int | None = 3, seed: int = 0, samples: int = 120
) -> Federation:
    """Three clients with some forty images of 8 x 8 pixels each, unless `samples` asks for more."""
    return prepare(Simulation(method, "digits", clients, partition, "smoke", seed, samples=samples, image_size=8))


def _run(federation: Federation, out: Path, **options: Any) -> Result:
    return run_federation(federation, out, {"preset": "smoke", "command": ""}, **options)


def _digests(result: Result) -> tuple[str, str]:
    return result["release_digest"], result["models_digest"]


def runs_and_scores(method: str, folder: Path) -> None:
    """A run ends with finite scores, the bytes it counts are those of the files, and the finished model answers with one
    logit a class."""
    result = _run(small_federation(method), folder)
    files = {path.stem: path.stat().st_size for path in (folder / "inbox").glob("*.safetensors")}
    if result["costs"]["messages_per_client"] == 1 and not is_reference(_instance(small_federation(method))):
        assert result["costs"]["upload_bytes_by_client"] == files
    scores = result["scores"]["global"]
    assert all(value is not None and 0 <= value < float("inf") for value in scores.values()), scores  # type: ignore[operator]
    own = result["scores"]["personalized"]
    model, task = load_model(folder, result["clients"][0]["client"] if own else None)
    logits = model(torch.zeros(2, *task.image))
    assert logits.shape == (2, len(task.classes)) and bool(torch.isfinite(logits).all())


def repeats(method: str, folder: Path) -> None:
    """The same seed gives the same bytes; another seed gives others."""
    first = _run(small_federation(method), folder / "a")
    assert _digests(_run(small_federation(method), folder / "b")) == _digests(first)
    assert _digests(_run(small_federation(method, seed=1), folder / "c"))[1] != first["models_digest"]


def order_and_workers_do_not_matter(method: str, folder: Path) -> None:
    """Any order of clients and any number of workers give the same bytes."""
    federation = small_federation(method)
    first = _run(federation, folder / "a", machine=Machine(workers=1))
    backwards = replace(federation, shards=list(reversed(federation.shards)))
    assert _digests(_run(backwards, folder / "b", machine=Machine(workers=2))) == _digests(first)


class Interrupted(Exception):
    """Raised by the checks to stop a run at a chosen point."""


def resumes(method: str, folder: Path) -> None:
    """Stopped at every reported step in turn, each attempt goes on where the last one stopped, to the same bytes."""
    federation = small_federation(method)
    expected = _run(federation, folder / "whole")
    seen: list[tuple[str, int, int]] = []

    def stop_once(what: str, done: int, total: int) -> None:
        if (what, done, total) not in seen:
            seen.append((what, done, total))
            raise Interrupted

    for _ in range(200):
        try:
            result = _run(federation, folder / "parts", progress=stop_once, machine=Machine(workers=1))
        except Interrupted:
            continue
        assert _digests(result) == _digests(expected)
        return
    raise AssertionError(f"no end after 200 interruptions; the last ones: {seen[-3:]}")


def survives_hard_shards(method: str, folder: Path) -> None:
    """Clients with a single class, and a round of one client, both work."""
    _run(small_federation(method, "silos", None), folder / "silos")
    _run(small_federation(method, "iid", 1), folder / "one")


def forgets_exactly(method: str, folder: Path) -> None:
    """Each client in turn is forgotten in a real folder: the release is that of a round which the client never joined,
    with this plan and with a plan that lacks the client, and nothing of the client is left under the folder."""
    federation = small_federation(method)
    _run(federation, folder / "round")
    for client in federation.plan.clients:
        _forgets_one(federation, client, folder)
    left = [shard for shard in federation.shards if shard.client != "client-02"]
    without = replace(federation, shards=left, plan=replace(federation.plan, clients=tuple(s.client for s in left)))
    _run(without, folder / "other-plan")
    assert released(without, folder / "other-plan") == released(federation, folder / "without-client-02")
    _holds(verify(folder / "without-client-02"))


def _forgets_one(federation: Federation, client: str, folder: Path) -> None:
    forgotten = folder / f"without-{client}"
    shutil.copytree(folder / "round", forgotten)
    windows = windows_of(client, forgotten)
    certificate = forget(forgotten, clients=[client])
    if not certificate["release"]["after"]:  # a reference learns from images: the same command makes its release again
        _run(federation, forgotten)
    else:
        never = never_joined(federation, forgotten / "inbox", folder / f"never-{client}")
        assert certificate["release"]["after"] == never, f"without {client} it is another release than if it had never joined"
    assert not (found := files_with(windows, forgotten)), f"bytes of {client} are left in {found}"


def _holds(findings: Sequence[Finding]) -> None:
    assert all(finding.good for finding in findings), [finding for finding in findings if not finding.good]


def never_joined(federation: Federation, uploads: Path, folder: Path) -> str:
    """The release's digest in a new folder where only these uploads were delivered."""
    plan = federation.plan
    method = load(plan.method)(plan.task, plan.settings)
    enrolled = {client: simulated_key(plan.seed, client).public_hex for client in plan.clients}
    with open_round(folder, plan, contracts_of(method, plan), enrolled, simulated_key(plan.seed, "server")) as fl_round:
        for path in sorted(uploads.glob("*.safetensors")):
            fl_round.inbox.receive(path)
        with computing(plan, Machine(), quiet, fl_round.scratch) as ctx:
            run_server_phase(method, fl_round, ctx)
        published = fl_round.release()
    assert published is not None
    return published[1]


def windows_of(client: str, folder: Path) -> list[bytes]:
    """Slices of what the client sent, or of its model, that nobody else sent; constants are everybody's.

    References keep neither: all that was learned from a client is in their release, which is compared.
    """
    own = [folder / kind / f"{client}.safetensors" for kind in ("inbox", "models")]
    others = b"".join(path.read_bytes() for path in (folder / "inbox").glob("*.safetensors") if path not in own)
    bodies = [_body(path) for path in own if path.exists()]
    slices = [body[start : start + 32] for body in bodies for start in range(0, len(body) - 31, 32)]
    telling = [window for window in slices if len(set(window)) >= 12]
    return [window for window in telling[:: max(1, len(telling) // 256)] if window not in others]


def _body(path: Path) -> bytes:
    """A safetensors file without its header."""
    data = path.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


def files_with(windows: Sequence[bytes], folder: Path) -> list[str]:
    """Where under a folder any of these bytes are, found by looking at every byte."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return [str(path.relative_to(folder)) for path in files if any(window in path.read_bytes() for window in windows)]


def released(federation: Federation, folder: Path) -> list[str]:
    with existing_round(folder, federation.plan) as fl_round:
        published = fl_round.release()
    assert published is not None
    return _release_digest(published[0])


def forgets_classes(method: str, folder: Path) -> None:
    """Where uploads can be taken apart by class: without a class, the release is that of clients who never sent it."""
    federation = small_federation(method)
    apart = replace(federation.plan.settings, **APART.get(method, {}))
    federation = replace(federation, plan=replace(federation.plan, settings=apart))
    instance = _instance(federation)
    if not instance.separable():
        return
    _run(federation, folder / "round")
    label, client = _shared_class(federation)
    name = federation.plan.task.classes[label]
    for number, clients in enumerate(([], [client])):  # of everybody, then a single cell
        forgotten = folder / f"without-{number}"
        shutil.copytree(folder / "round", forgotten)
        never_sent = folder / f"sent-{number}"
        send_without(instance, federation, clients or federation.plan.clients, label, forgotten, never_sent)
        certificate = forget(forgotten, clients=clients, class_name=name)
        never = never_joined(federation, never_sent, folder / f"never-{number}")
        assert certificate["release"]["after"] == never, "without a class it is another release than if it was never sent"
        _holds(verify(forgotten))
    if not instance.inseparable:
        _never_had_it(instance, federation, client, label, folder)


def _shared_class(federation: Federation) -> tuple[int, str]:
    """A class that two clients hold, and the one of them who holds most others: something is left of its upload."""
    counts, classes = federation.counts, len(federation.plan.task.classes)
    holders = {label: [c for c in sorted(counts) if counts[c][label] >= 4] for label in range(classes)}
    label = max(holders, key=lambda label: len(holders[label]))
    return label, max(holders[label], key=lambda client: sum(n > 0 for n in counts[client]))


def send_without(
    instance: Method, federation: Federation, clients: Sequence[str], label: int, fl_round: Path, folder: Path
) -> None:
    """The uploads that these clients would have sent without the class, signed by themselves; the others' as they are."""
    folder.mkdir(parents=True)
    plan = federation.plan
    with existing_round(fl_round, plan) as opened:
        uploads, _ = opened.uploads()
    for upload in uploads:
        payload = instance.without_class(upload.payload, label) if upload.client in clients else upload.payload
        if not is_empty(payload):
            key = simulated_key(plan.seed, upload.client)
            bundle = pack("upload", upload.client, plan.digest, to_raw(payload.tensors), dict(payload.facts), key)
            (folder / f"{upload.client}.safetensors").write_bytes(bundle)


def _never_had_it(instance: Method, federation: Federation, client: str, label: int, folder: Path) -> None:
    """What is left of an upload is what a client without these images uploads."""
    shard = next(shard for shard in federation.shards if shard.client == client)
    poorer = replace(shard, train=_subset(shard.train, label), val=_subset(shard.val, label), digest=f"{shard.digest} without")
    with compute_threads(1):
        sent = instance.client_phase(shard, _context(federation, folder / "rich"))
        never = instance.client_phase(poorer, _context(federation, folder / "poor"))
    assert payload_digest(instance.without_class(sent, label)) == payload_digest(never)


def _subset(data: Dataset, label: int) -> Dataset:
    return data.subset((data.labels != label).nonzero().flatten())


def server_sees_uploads_only(method: str, folder: Path) -> None:
    """What a client sends is named tensors that follow the contract; no raw sample is among them (the egress check)."""
    federation = small_federation(method)
    instance = _instance(federation)
    if is_reference(instance):
        return
    payload = instance.client_phase(federation.shards[0], _context(federation, folder / "x"))
    contract = instance.contract(payload.facts.get("architecture", ""))
    required = {name for name, field in contract.items() if field.required}
    assert required <= set(payload.tensors) <= set(contract)


def _instance(federation: Federation) -> Method:
    return load(federation.plan.method)(federation.plan.task, federation.plan.settings)


def _context(federation: Federation, scratch: Path) -> Context:
    return Context(federation.plan, torch.device("cpu"), scratch=scratch)


def _release_digest(release: Release) -> list[str]:
    personal = [payload_digest(release.personal[client]) for client in sorted(release.personal)]
    return [payload_digest(release.shared), *personal]


CHECKS: Mapping[str, Check] = {
    check.__name__: check
    for check in (
        runs_and_scores,
        repeats,
        order_and_workers_do_not_matter,
        resumes,
        survives_hard_shards,
        forgets_exactly,
        forgets_classes,
        server_sees_uploads_only,
    )
}


def check_method(method: str, folder: Path) -> None:
    """All checks, one after the other; the first that fails raises."""
    for name, check in CHECKS.items():
        check(method, folder / name)
