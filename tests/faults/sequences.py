"""Long random lives of an inbox, compared with a dictionary."""

from __future__ import annotations

import contextlib
import errno
import os
import random
from pathlib import Path

from osfl.core.errors import OsflError, Rejected, RoundError
from osfl.wire.gate import accept
from osfl.wire.inbox import Inbox
from tests.faults.scenario import CLIENTS, POLICY, upload
from tests.faults.traps import fail, trapped, without_links


class Life:
    """One inbox and what we believe it holds."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.rng = folder, random.Random(seed)
        self.inbox = Inbox(folder / "inbox", POLICY)
        self.believed: dict[str, str] = {}

    def live(self, steps: int) -> None:
        for _ in range(steps):
            weights = {self.send: 6, self.damage: 2, self.reopen: 1, self.litter: 1, self.fail: 2, self.look: 1}
            self.rng.choices(list(weights), list(weights.values()))[0]()
        self.look()

    def send(self) -> None:
        data, digest, client = self._any_upload()
        with without_links(self.rng.random() < 0.3):
            if self.believed.setdefault(client, digest) == digest:
                assert self.inbox.receive(data).digest == digest
                return
            try:
                self.inbox.receive(data)
                raise AssertionError("a second upload was taken")
            except Rejected as no:
                assert (no.field, no.expected, no.got) == ("upload", self.believed[client], digest)

    def damage(self) -> None:
        data = bytearray(self._any_upload()[0])
        data[self.rng.randrange(len(data))] ^= 1 << self.rng.randrange(8)
        try:
            self.inbox.receive(data)
            raise AssertionError("a damaged upload was taken")
        except Rejected:
            pass

    def fail(self) -> None:
        """Whatever a failing call leaves behind, it is this upload or nothing; an answer is an acknowledgement."""
        data, digest, client = self._any_upload()
        acknowledged = False
        with trapped(self.rng.randint(1, 20), fail(errno.EIO)), contextlib.suppress(OsflError):
            acknowledged = self.inbox.receive(data).digest == digest
        stored = {receipt.client: receipt.digest for receipt in self.inbox.uploads()}
        if client not in self.believed and client in stored:
            self.believed[client] = digest
        assert stored == self.believed
        assert not acknowledged or stored[client] == digest

    def reopen(self) -> None:
        self.inbox = Inbox(self.folder / "inbox", POLICY)

    def litter(self) -> None:
        """Leftovers of writers that died, old and young; files of nobody."""
        old = self.inbox.folder / ".site-00.safetensors.0123.tmp"
        old.write_bytes(b"half")
        os.utime(old, (0, 0))
        (self.inbox.folder / ".site-01.safetensors.4567.tmp").write_bytes(b"half")
        (self.inbox.folder / "mallory.safetensors").write_bytes(b"not enrolled")
        self.reopen()
        assert not old.exists()

    def look(self) -> None:
        assert {receipt.client: receipt.digest for receipt in self.inbox.uploads()} == self.believed
        client = self.rng.choice(CLIENTS[:3])
        try:
            assert self.inbox.bundle(client).digest == self.believed[client]
        except RoundError:
            assert client not in self.believed

    def _any_upload(self) -> tuple[bytes, str, str]:
        client = self.rng.choice(CLIENTS[:3])
        data = upload(client, version=self.rng.randrange(2))
        return data, accept(data, POLICY).digest, client


def sequences(folder: Path, count: int, steps: int = 50) -> dict[str, int]:
    violations = 0
    for seed in range(count):
        try:
            Life(folder / str(seed), seed).live(steps)
        except AssertionError:
            violations += 1
    return {"sequences": count, "steps": count * steps, "violations": violations}
