"""The coordinator at the network: asks every site for its upload, takes it piece by piece, and brings back the release.

What is on disk is the state. A program that was killed is started again, reads the round folder, and asks only for what is
missing: pieces that arrived stay, uploads in the inbox stay, a release stays. An upload is acknowledged when it is in the
inbox and not before. The network is handed in as a `Post`, so that tests can lose, repeat and reorder everything.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from osfl.errors import Rejected
from osfl.protocol import ClientId
from osfl.transports import messages as say
from osfl.transports.chunks import Damaged, Partial, Whole, announce, read_chunk
from osfl.transports.messages import Reply, Words
from osfl.wire.atomic import replace_atomically
from osfl.wire.inbox import Receipt
from osfl.wire.signing import VerifyKey

LOOK = 10.0  # seconds between two looks at the deadline


@dataclass(frozen=True)
class Manner:
    """How to ask, not what for. Times are in seconds, sizes in bytes."""

    chunk: int = 16 << 20  # one message; it bounds the memory of every program on the way
    window: int = 2  # messages under way to one site
    wait: float = 7 * 86400.0  # for uploads; then the program ends, and can be started again
    linger: float = 86400.0  # offer the release to sites that are away
    again: float = 300.0  # at most so long until a site that failed is asked once more
    poll: float = 1.0


class Post(Protocol):
    """A network that delivers questions to nodes and brings answers back, perhaps late, twice, or never."""

    def nodes(self) -> Collection[int]: ...
    def send(self, node: int, kind: str, words: Words) -> str: ...
    def replies(self) -> Iterator[Reply]: ...


@dataclass(frozen=True)
class Counter:
    """What the coordinator can do with files; osfl.coordinator behind plain functions."""

    round: str  # the plan's digest
    plan: str  # the plan itself, as text for the sites
    enrolled: Mapping[ClientId, str]
    limit: int  # bytes of an upload
    folder: Path  # for pieces
    standing: Callable[[ClientId], Path]  # where the upload of a client is in the inbox
    receive: Callable[[Path], Receipt]
    refuse: Callable[[Rejected], None]  # remembered for `osfl show`
    ready: Callable[[], bool]
    serve: Callable[[], None]
    parts: Callable[[ClientId], Mapping[str, Path] | None]  # what a client fetches; None before the release
    forgotten: Callable[[], Collection[ClientId]] = tuple  # nobody waits for them, and nothing is brought to them


@dataclass
class Line:
    """One node: who it showed itself to be, what was asked and not answered, and how far the files are."""

    node: int
    client: ClientId = ""
    sent: dict[str, tuple[str, int]] = field(default_factory=dict)  # ticket -> (kind, offset)
    partial: Partial | None = None  # an upload under way
    news: Words | None = None  # what the site must hear: a receipt or a refusal
    parts: list[tuple[str, Path, Whole]] | None = None  # of the release, those not fetched yet
    have: int = 0  # bytes of the first of them that the site has
    took: bool = False
    away: bool = False
    failures: int = 0
    rests_until: float = 0.0
    nonce: str = ""

    def asked(self, kind: str) -> bool:
        return any(kind == asked for asked, _ in self.sent.values())


class Collector:
    """Runs one round over a network, until everybody has the release or time is up."""

    def __init__(
        self, counter: Counter, post: Post, manner: Manner = Manner(), *,
        tell: Callable[[str], None] = print, clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:  # fmt: skip
        self.counter, self.post, self.manner = counter, post, manner
        self.tell, self.clock, self.sleep = tell, clock, sleep
        self.lines: dict[int, Line] = {}
        self.took: set[ClientId] = set()
        self.noted: set[ClientId] = set()  # who heard from this program what became of its upload
        self.refused: set[str] = set()  # hashes of uploads that the gate said no to
        self.strangers: set[int] = set()
        self.looked: float | None = None  # when the round was last found not to be ready
        self.release: tuple[int, ...] = ()  # the file that is being brought
        self.forgotten: set[ClientId] = set()

    def run(self) -> bool:
        """True when every client has the release."""
        self._gather()
        if not self._released():
            self.tell("time is up; start again to go on waiting, nothing is lost")
            return False
        until = self.clock() + self.manner.linger
        self._look_at_round()
        while self._without() and self.clock() < until:
            self._step()
        missing = self._without()
        self.tell(f"has no release yet: {', '.join(missing)}" if missing else "every client has the release")
        return not missing

    def _without(self) -> list[ClientId]:
        """Who has no release yet."""
        return sorted(set(self.counter.enrolled) - self.forgotten - self.took)

    def _gather(self) -> None:
        until = self.clock() + self.manner.wait
        while not self._released() and self.clock() < until:
            self._step()
            if self._may_begin():
                self.tell("the server phase begins")
                self.counter.serve()
                self.tell("the release is published")

    def _may_begin(self) -> bool:
        """Asked when an upload has come, and from time to time because of the deadline."""
        if self.looked is not None and self.clock() < self.looked + LOOK:
            return False
        self.looked = self.clock()
        return self.counter.ready()

    def _released(self) -> bool:
        return self.counter.parts("") is not None

    def _look_at_round(self) -> None:
        """Something may have been forgotten meanwhile: then there is another release, which nobody has yet."""
        self.forgotten = set(self.counter.forgotten())
        found = _mark(self.counter.parts(""))
        if not found or found == self.release:
            return
        if self.release:
            self.took.clear()
            for line in self.lines.values():
                line.parts, line.have, line.took = None, 0, False
                line.sent.clear()  # answers about the old one do not count
        self.release = found

    def _step(self) -> None:
        self._look_at_round()
        online = self.post.nodes()
        for node in online:
            self.lines.setdefault(node, Line(node))
        for reply in self.post.replies():  # one at a time: each may hold a piece
            self._hear(reply)
        for line in self.lines.values():
            self._notice(line, line.node in online)
            if not line.away and self.clock() >= line.rests_until:
                self._ask(line)
        self.sleep(self.manner.poll)

    def _notice(self, line: Line, online: bool) -> None:
        """A node that was away may have forgotten what it was asked: it is asked again."""
        if online and line.away:
            line.sent.clear()
        line.away = not online

    # --- asking ---

    def _ask(self, line: Line) -> None:
        if not line.client:
            self._ask_once(line, say.SPEAK)
        elif line.partial is not None:
            self._ask_for_pieces(line, line.partial)
        elif line.news is not None:
            self._ask_once(line, say.RECEIPT)
        elif not line.took and line.client not in self.forgotten and (files := self.counter.parts(line.client)) is not None:
            self._bring(line, files)

    def _ask_once(self, line: Line, kind: str) -> None:
        if line.asked(kind):
            return
        if kind == say.SPEAK:
            line.nonce = secrets.token_hex(16)
            wanted = int(not self._released())
            words: Words = {"plan": self.counter.plan, "nonce": line.nonce, "wanted": wanted, "length": self.manner.chunk}
        elif kind == say.TAKE:
            words = {"plan": self.counter.plan}
        else:
            words = line.news or {}
        self._send(line, kind, 0, words)

    def _send(self, line: Line, kind: str, offset: int, words: Words) -> None:
        ticket = self.post.send(line.node, kind, {"round": self.counter.round, "client": line.client, **words})
        line.sent[ticket] = (kind, offset)

    def _ask_for_pieces(self, line: Line, partial: Partial) -> None:
        for offset in self._offsets(partial.size, partial.whole.bytes, line, say.CHUNK):
            self._send(line, say.CHUNK, offset, {"offset": offset, "length": self.manner.chunk})

    def _bring(self, line: Line, files: Mapping[str, Path]) -> None:
        if line.parts is None:
            line.parts = [(part, path, announce(path)) for part, path in files.items()]
        if not line.parts:
            self._ask_once(line, say.TAKE)
            return
        part, path, whole = line.parts[0]
        for offset in self._offsets(line.have, whole.bytes, line, say.PUT):
            piece = say.chunk_words(read_chunk(path, offset, self.manner.chunk))
            about: Words = {"part": part, "bytes": whole.bytes, "whole": whole.sha256, "chunk": self.manner.chunk}
            self._send(line, say.PUT, offset, {**about, **piece})

    def _offsets(self, start: int, end: int, line: Line, kind: str) -> Sequence[int]:
        """The next pieces that are not under way already."""
        under_way = {offset for asked, offset in line.sent.values() if asked == kind}
        wanted = range(start, end, self.manner.chunk)[: self.manner.window]
        return [offset for offset in wanted if offset not in under_way]

    # --- hearing ---

    def _hear(self, reply: Reply) -> None:
        line = self.lines.get(reply.node)
        kind, _ = line.sent.pop(reply.ticket, ("", 0)) if line else ("", 0)
        if line is None or not kind:
            return  # an answer that nobody waits for any more: a repeated or forgotten one
        if reply.words is None:
            self._failed(line, reply.error)
        elif "refused" in reply.words:
            self._start_over(line, kind)
            self._failed(line, f"the site says no: {say.text(reply.words, 'refused')}; its own log has the reason")
        else:
            line.failures = 0
            hear = {say.SPEAK: self._hear_speak, say.CHUNK: self._hear_piece, say.RECEIPT: self._hear_noted,
                    say.PUT: self._hear_put, say.TAKE: self._hear_taken}  # fmt: skip
            hear[kind](line, reply.words)

    def _start_over(self, line: Line, kind: str) -> None:
        """What a site says no to is begun again: its upload may be gone, or a file was damaged on the way."""
        line.parts, line.have = None, 0
        if kind == say.CHUNK:
            line.client, line.partial = "", None

    def _failed(self, line: Line, why: str) -> None:
        line.failures += 1
        rest = min(self.manner.again, 2.0 ** min(line.failures, 20))
        line.rests_until = self.clock() + rest
        self.tell(f"{line.client or f'node {line.node}'}: {why}; asked again in {rest:.0f} s")

    def _hear_speak(self, line: Line, words: Words) -> None:
        client, proof = say.text(words, "client"), say.text(words, "proof")
        key = self.counter.enrolled.get(client)
        if key is None or not VerifyKey(key).verify(say.statement(self.counter.round, client, line.nonce), proof):
            self._turn_away(line, client)
            return
        line.client, line.parts, line.have, line.took = client, None, 0, client in self.took
        whole = Whole.heard(words.get("bytes"), words.get("whole"))
        if whole is not None:
            self._begin(line, whole, words)
        elif self._released() and client not in self.noted and self.counter.standing(client).exists():
            self._deliver(line, self.counter.standing(client))  # the program before may have died with the receipt

    def _turn_away(self, line: Line, client: str) -> None:
        no = Rejected("the node did not show the key of an enrolled client", client=client[:64] or None, field="proof",
                      expected="a signature by the enrolled key", got=f"node {line.node}",
                      fix="Enrol the site's public key, or give its node the key file that is enrolled.")  # fmt: skip
        if line.node not in self.strangers:
            self.strangers.add(line.node)
            self.counter.refuse(no)
        self._failed(line, no.reason)
        line.rests_until = self.clock() + self.manner.again

    def _begin(self, line: Line, whole: Whole, words: Words) -> None:
        """An announced upload: it is here already, it is too large, or its pieces are asked for."""
        standing = self.counter.standing(line.client)
        if whole.sha256 in self.refused:
            self._forget(line)
        elif standing.exists() and (self._came(line.client) == whole.sha256 or announce(standing) == whole):
            self._deliver(line, standing)
            Partial(self.counter.folder, line.client, whole, self.manner.chunk).remove()  # of a program that died here
        elif whole.bytes > self.counter.limit:
            no = Rejected("the upload is larger than the plan allows", client=line.client, field="size",
                          expected=f"at most {self.counter.limit} bytes", got=whole.bytes)  # fmt: skip
            self.counter.refuse(no)
            self._say_no(line, whole, no)
        else:
            line.partial = Partial(self.counter.folder, line.client, whole, self.manner.chunk)
            self._hear_piece(line, words)

    def _hear_piece(self, line: Line, words: Words) -> None:
        partial, chunk = line.partial, say.chunk_in(words)
        if partial is None:
            return
        if chunk is not None:
            partial.add(chunk)  # any other than the next one is dropped and asked for again
        if not partial.finished:
            return
        try:
            path = partial.complete()
        except Damaged as no:
            self._failed(line, no.reason)
            return
        self._deliver(line, path)
        if line.news and "digest" in line.news:
            replace_atomically(came_as(self.counter.folder, line.client), partial.whole.sha256.encode())
        partial.remove()
        line.partial = None

    def _came(self, client: ClientId) -> str:
        """The hash of the file that a client's upload came as: a sealed one has other bytes than what stands in the inbox."""
        path = came_as(self.counter.folder, client)
        return path.read_text(encoding="ascii", errors="replace") if path.exists() else ""

    def _deliver(self, line: Line, path: Path) -> None:
        """Through the gate; the receipt is written for a file that is in the inbox, and only then."""
        whole = announce(path)
        try:
            receipt = self.counter.receive(path)
        except Rejected as no:
            self._say_no(line, whole, no)
            return
        self.looked = None
        line.news = {"digest": receipt.digest, "bytes": receipt.bytes}
        self.tell(f"{line.client}: the upload is in the inbox ({receipt.bytes} bytes)")

    def _say_no(self, line: Line, whole: Whole, no: Rejected) -> None:
        self.refused.add(whole.sha256)
        line.news = {"refused": str(no)}
        self.tell(str(no))

    def _hear_noted(self, line: Line, words: Words) -> None:
        self.noted.add(line.client)
        refused = line.news is not None and "refused" in line.news
        line.news = None
        if refused:
            self._forget(line)

    def _forget(self, line: Line) -> None:
        """Ask from the beginning, later: people at the site may have put things right."""
        line.client, line.rests_until = "", self.clock() + self.manner.again

    def _hear_put(self, line: Line, words: Words) -> None:
        if not line.parts:
            return
        part, _, whole = line.parts[0]
        if say.text(words, "part") != part:
            return
        line.have = min(max(0, say.number(words, "have")), whole.bytes)
        if line.have == whole.bytes:
            line.parts.pop(0)
            line.have = 0

    def _hear_taken(self, line: Line, words: Words) -> None:
        line.took = True
        self.took.add(line.client)
        self.tell(f"{line.client}: has the release and made its model of it")


def came_as(folder: Path, client: ClientId) -> Path:
    return folder / f"{client}.came"


def _mark(files: Mapping[str, Path] | None) -> tuple[int, ...]:
    """Tells a release from the one before without reading it; empty if there is none."""
    try:
        found = files["release"].stat() if files else None
    except FileNotFoundError:
        found = None
    return (found.st_ino, found.st_mtime_ns, found.st_size) if found else ()
