"""Uploads of a round are read one at a time, checked each time, and not kept."""

from __future__ import annotations

import errno
import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from osfl.core.errors import RoundError
from osfl.core.method import quiet
from osfl.core.types import Upload
from osfl.methods.fedcgs import FedCGS
from osfl.rounds import folder
from osfl.rounds.folder import Stored, existing_round
from osfl.rounds.phases import computing
from osfl.runtime.atomic import replace_atomically
from osfl.runtime.machine import Machine
from osfl.runtime.payloads import payload_digest
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation, prepare
from osfl.wire.bundle import Bundle
from osfl.wire.inbox import Inbox

SMALL = Simulation("fedcgs", "digits", 12, "iid", "smoke", samples=600, image_size=8)
SMALL_CLIENTS = [f"client-{number:02d}" for number in range(1, 13)]


@contextmanager
def stored(folder: Path) -> Iterator[Stored]:
    run(SMALL, folder)
    with existing_round(folder, prepare(SMALL).plan) as fl_round:
        uploads, origin = fl_round.uploads()
        assert isinstance(uploads, Stored) and list(origin) == sorted(SMALL_CLIENTS)
        yield uploads


def test_an_opening_that_failed_leaves_nothing_of_it_in_another_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is agreed before plan.json is there: a disk that is full just then keeps another contract and other keys."""
    real = replace_atomically

    def full(path: Path, data: bytes) -> None:
        if path.name == "plan.json":
            raise OSError(errno.ENOSPC, "No space left on device")
        real(path, data)

    with monkeypatch.context() as patched, pytest.raises(OSError):
        patched.setattr(folder, "replace_atomically", full)
        run(replace(SMALL, method="fedavg", seed=1), tmp_path)
    assert (tmp_path / "contract.json").exists() and not (tmp_path / "plan.json").exists()
    assert run(SMALL, tmp_path)["method"] == "fedcgs"


def test_uploads_are_a_sequence_and_nobody_keeps_them(tmp_path: Path) -> None:
    with stored(tmp_path) as uploads:
        assert len(uploads) == 12 and [u.client for u in uploads] == SMALL_CLIENTS
        assert uploads[-1].client == "client-12" and [u.client for u in uploads[1:3]] == ["client-02", "client-03"]
        first = uploads[0]
        assert uploads[0] is first  # still held, so not read again
        gone = weakref.ref(first)
        del first
        gc.collect()
        assert gone() is None


def test_who_asks_again_for_facts_reads_nothing_and_tensors_are_checked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[str] = []
    bundle = Inbox.bundle

    def watched(self: Inbox, client: str) -> Bundle:
        read.append(client)
        return bundle(self, client)

    monkeypatch.setattr(Inbox, "bundle", watched)
    with stored(tmp_path) as uploads:
        whole = [(u.client, u.plan, dict(u.payload.facts), payload_digest(u.payload)) for u in uploads]
        assert read[-12:] == SMALL_CLIENTS
        read.clear()
        assert [(u.client, u.plan, dict(u.payload.facts)) for u in uploads] == [one[:3] for one in whole]
        assert not read
        assert [payload_digest(u.payload) for u in uploads] == [one[3] for one in whole]
        assert read == SMALL_CLIENTS
        path = tmp_path / "inbox" / "client-03.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        assert uploads[2].payload.facts == whole[2][2]
        with pytest.raises(RoundError, match="damaged"):
            uploads[2].payload.tensors["sums"]


def test_the_sums_of_many_clients_are_never_together_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[weakref.ref[Upload]] = []
    most = []
    read = Stored.__getitem__

    def watched(self: Stored, index: int) -> Upload:
        upload = read(self, index)
        seen.append(weakref.ref(upload))
        most.append(sum(ref() is not None for ref in seen))
        return upload

    plan = prepare(SMALL).plan
    with stored(tmp_path) as uploads, computing(plan, Machine(), quiet, tmp_path / "scratch") as ctx:
        whole = FedCGS(plan.task, plan.settings).server_phase(list(uploads), ctx)
        monkeypatch.setattr(Stored, "__getitem__", watched)
        release = FedCGS(plan.task, plan.settings).server_phase(uploads, ctx)
    assert len(most) >= 12 and max(most) <= 2
    assert payload_digest(release.shared) == payload_digest(whole.shared)


def test_an_upload_that_changes_meanwhile_is_refused(tmp_path: Path) -> None:
    with stored(tmp_path) as uploads:
        path = tmp_path / "inbox" / "client-03.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"x")
        assert torch.isfinite(uploads[1].payload.tensors["sums"]).all()
        with pytest.raises(RoundError, match="damaged"):
            uploads[2]
        uploads._origin = {**uploads._origin, "client-04": "0" * 64}
        with pytest.raises(RoundError, match="changed while"):
            uploads[3]
