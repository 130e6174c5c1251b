"""The coordinator on the network: collects the upload of every site in chunks, and sends the release back.

What is on disk is the state. A program that was killed is started again, reads the round folder, and asks only for what is
missing: pieces that arrived stay, uploads in the inbox stay, a release stays. An upload is acknowledged when it is in the
inbox and not before. The network is passed in as a `Channel`, so that tests can lose, repeat and reorder everything.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from osfl.core.errors import Rejected, RoundError
from osfl.core.types import ClientId
from osfl.deploy.flower import messages
from osfl.deploy.flower.chunks import Damaged, FileInfo, Partial, announce, read_chunk
from osfl.deploy.flower.messages import MessageBody, Reply
from osfl.roles import coordinator
from osfl.rounds.judgment import UNDECIDED
from osfl.rounds.state import read_json, read_policy, upload_hash_path
from osfl.runtime.atomic import make_folder, replace_atomically
from osfl.wire.inbox import Inbox
from osfl.wire.repair import REQUEST
from osfl.wire.sealing import sealed_size
from osfl.wire.signing import SigningKey, VerifyKey

LOOK = 10.0  # seconds between two looks at the deadline


@dataclass(frozen=True)
class CollectorConfig:
    """How to ask, not what for. Times are in seconds, sizes in bytes."""

    chunk: int = 16 << 20  # one message; it bounds the memory of every program in between
    window: int = 2  # messages under way to one site
    wait: float = 7 * 86400.0  # for uploads; then the program ends, and can be started again
    linger: float = 86400.0  # offer the release to sites that are away
    again: float = 300.0  # at most so long until a site that failed is asked once more
    poll: float = 1.0


class Channel(Protocol):
    """A network that delivers questions to nodes and brings answers back, perhaps late, twice, or never."""

    def nodes(self) -> Collection[int]: ...
    def send(self, node: int, kind: str, body: MessageBody) -> str: ...
    def replies(self) -> Iterator[Reply]: ...


@dataclass
class NodeSession:
    """One node: who it showed itself to be, what was asked and not answered, and how far the files are."""

    node: int
    client: ClientId = ""
    sent: dict[str, tuple[str, int]] = field(default_factory=dict)  # ticket -> (kind, offset)
    partial: Partial | None = None  # an upload under way
    notice: MessageBody | None = None  # what the site must receive: a receipt or a refusal
    parts: list[tuple[str, Path, FileInfo]] | None = None  # of the release, those not fetched yet
    have: int = 0  # bytes of the first of them that the site has
    took: bool = False
    away: bool = False
    failures: int = 0
    rests_until: float = 0.0
    nonce: str = ""

    def asked(self, kind: str) -> bool:
        return any(kind == asked for asked, _ in self.sent.values())


class Collector:
    """Runs one round over a network, until everybody has the release or time is up.

    What it does with files is what `osfl receive` and `osfl server` do: the functions of osfl.roles.coordinator.
    """

    def __init__(
        self,
        folder: Path,  # of the round
        server_key: Path,  # the server's private key: it opens sealed uploads and signs the release
        channel: Channel,
        collector_config: CollectorConfig = CollectorConfig(),
        *,
        log: Callable[[str], None] = print,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.folder, self.server_key, self.channel, self.collector_config = folder, server_key, channel, collector_config
        self.log, self.clock, self.sleep = log, clock, sleep
        self.policy, self.plan = read_policy(folder), messages.plan_text(read_json(folder / "plan.json"))
        self.inbox, self.partial = Inbox(folder / "inbox", self.policy), folder / "partial"
        self.sessions: dict[int, NodeSession] = {}
        self.took: set[ClientId] = set()
        self.noted: set[ClientId] = set()  # who got from this program a receipt or a refusal
        self.refused: set[str] = set()  # hashes of uploads that the gate rejected
        self.unknown_nodes: set[int] = set()
        self.looked: float | None = None  # when the round was last found not to be ready
        self.judged: dict[ClientId, int] = {}  # the uploads of the last attempt at a release
        self.undecided = ""  # why that waits for a decision of the coordinator
        self.release: tuple[int, ...] = ()  # the file that is being brought
        self.forgotten: set[ClientId] = set()
        self.repairs_due: set[ClientId] = set()  # who has to send a repair of a secure sum

    def run(self) -> bool:
        """True when every client has the release."""
        self._gather()
        if not self._released():
            self.log(f"time is up; start again to go on waiting, nothing is lost{'. ' * bool(self.undecided)}{self.undecided}")
            return False
        until = self.clock() + self.collector_config.linger
        self._look_at_round()
        while self._without() and self.clock() < until:
            self._step()
        missing = self._without()
        self.log(f"has no release yet: {', '.join(missing)}" if missing else "every client has the release")
        return not missing

    def _without(self) -> list[ClientId]:
        """Who has no release yet."""
        return sorted(set(self.policy.enrolled) - self.forgotten - self.took)

    def _gather(self) -> None:
        until = self.clock() + self.collector_config.wait
        while not self._released() and self.clock() < until:
            self._step()
            if self._may_begin():
                self._make_release()

    def _make_release(self) -> None:
        """The server phase. Where uploads are suspected it waits for the coordinator, who decides with `osfl server`; the
        release that this makes is brought to the sites like any other."""
        self.log("the server phase begins")
        self.judged = self.inbox.delivered()
        key = SigningKey.load(self.server_key)
        try:
            coordinator.make_release(self.folder, key, progress=lambda what, done, all_: self.log(f"{what} {done}/{all_}"))
            self.log("the release is published")
        except RoundError as error:
            if error.field != UNDECIDED:
                raise
            self.undecided = str(error)
            self.log(f"{self.undecided} Then the sites get the release; this program waits for it.")

    def _may_begin(self) -> bool:
        """Asked when an upload has come, and from time to time because of the deadline."""
        if self.looked is not None and self.clock() < self.looked + LOOK:
            return False
        self.looked = self.clock()
        if self.undecided and self.inbox.delivered() == self.judged:
            return False  # nothing has come that could be judged otherwise
        found = coordinator.status(self.folder)
        if found.asks:
            request = coordinator.request_repairs(self.folder, SigningKey.load(self.server_key))
            self.log(f"missing: {', '.join(request.missing)}; the others are asked for repairs")
            found = coordinator.status(self.folder)
        self.repairs_due = set(found.repairs_due)
        return found.ready and not found.asks

    def _released(self) -> bool:
        return coordinator.release_files(self.folder, "") is not None

    def _look_at_round(self) -> None:
        """Something may have been forgotten meanwhile: then there is another release, which nobody has yet."""
        self.forgotten = set(read_policy(self.folder).gone)
        found = _mark(coordinator.release_files(self.folder, ""))
        if not found or found == self.release:
            return
        if self.release:
            self.took.clear()
            for session in self.sessions.values():
                session.parts, session.have, session.took = None, 0, False
                session.sent.clear()  # answers about the old one do not count
        self.release = found

    def _step(self) -> None:
        self._look_at_round()
        online = self.channel.nodes()
        for node in online:
            self.sessions.setdefault(node, NodeSession(node))
        for reply in self.channel.replies():  # one at a time: each may hold a piece
            self._handle(reply)
        for session in self.sessions.values():
            self._notice(session, session.node in online)
            if not session.away and self.clock() >= session.rests_until:
                self._ask(session)
        self.sleep(self.collector_config.poll)

    def _notice(self, session: NodeSession, online: bool) -> None:
        """A node that was away may have forgotten what it was asked: it is asked again."""
        if online and session.away:
            session.sent.clear()
        session.away = not online

    # --- asking ---

    def _ask(self, session: NodeSession) -> None:
        if not session.client:
            self._ask_once(session, messages.ANNOUNCE)
        elif session.partial is not None:
            self._ask_for_pieces(session, session.partial)
        elif session.notice is not None:
            self._ask_once(session, messages.RECEIPT)
        elif session.client in self.repairs_due:
            self._ask_once(session, messages.REPAIR)
        elif (
            not session.took
            and session.client not in self.forgotten
            and (files := coordinator.release_files(self.folder, session.client)) is not None
        ):
            self._bring(session, files)

    def _ask_once(self, session: NodeSession, kind: str) -> None:
        if session.asked(kind):
            return
        if kind == messages.ANNOUNCE:
            session.nonce = secrets.token_hex(16)
            wanted = int(not self._released() and not (self.folder / REQUEST).exists())  # nobody joins a sum being repaired
            body: MessageBody = {
                "plan": self.plan,
                "nonce": session.nonce,
                "wanted": wanted,
                "length": self.collector_config.chunk,
            }
        elif kind == messages.TAKE:
            body = {"plan": self.plan}
        elif kind == messages.REPAIR:
            body = {"plan": self.plan, "request": (self.folder / REQUEST).read_bytes()}
        else:
            body = session.notice or {}
        self._send(session, kind, 0, body)

    def _send(self, session: NodeSession, kind: str, offset: int, body: MessageBody) -> None:
        ticket = self.channel.send(session.node, kind, {"round": self.policy.plan, "client": session.client, **body})
        session.sent[ticket] = (kind, offset)

    def _ask_for_pieces(self, session: NodeSession, partial: Partial) -> None:
        for offset in self._offsets(partial.size, partial.info.bytes, session, messages.CHUNK):
            self._send(session, messages.CHUNK, offset, {"offset": offset, "length": self.collector_config.chunk})

    def _bring(self, session: NodeSession, files: Mapping[str, Path]) -> None:
        if session.parts is None:
            session.parts = [(part, path, announce(path)) for part, path in files.items()]
        if not session.parts:
            self._ask_once(session, messages.TAKE)
            return
        part, path, info = session.parts[0]
        for offset in self._offsets(session.have, info.bytes, session, messages.PUT):
            piece = messages.chunk_body(read_chunk(path, offset, self.collector_config.chunk))
            about: MessageBody = {
                "part": part,
                "bytes": info.bytes,
                "whole": info.sha256,
                "chunk": self.collector_config.chunk,
            }
            self._send(session, messages.PUT, offset, {**about, **piece})

    def _offsets(self, start: int, end: int, session: NodeSession, kind: str) -> Sequence[int]:
        """The next pieces that are not under way already."""
        under_way = {offset for asked, offset in session.sent.values() if asked == kind}
        wanted = range(start, end, self.collector_config.chunk)[: self.collector_config.window]
        return [offset for offset in wanted if offset not in under_way]

    # --- hearing ---

    def _handle(self, reply: Reply) -> None:
        session = self.sessions.get(reply.node)
        kind, _ = session.sent.pop(reply.ticket, ("", 0)) if session else ("", 0)
        if session is None or not kind:
            return  # an answer that nobody waits for any more: a repeated or forgotten one
        if reply.body is None:
            self._failed(session, reply.error)
        elif "refused" in reply.body:
            self._start_over(session, kind)
            self._failed(session, f"the site refused: {messages.text(reply.body, 'refused')}; its own log has the reason")
        else:
            session.failures = 0
            handlers = {
                messages.ANNOUNCE: self._handle_announcement,
                messages.CHUNK: self._handle_piece,
                messages.RECEIPT: self._handle_noted,
                messages.PUT: self._handle_put,
                messages.TAKE: self._handle_taken,
                messages.REPAIR: self._handle_repair,
            }
            handlers[kind](session, reply.body)

    def _start_over(self, session: NodeSession, kind: str) -> None:
        """Start again after a site refused: its upload may be gone, or a file was damaged in transit."""
        session.parts, session.have = None, 0
        if kind == messages.CHUNK:
            session.client, session.partial = "", None

    def _failed(self, session: NodeSession, why: str) -> None:
        session.failures += 1
        rest = min(self.collector_config.again, 2.0 ** min(session.failures, 20))
        session.rests_until = self.clock() + rest
        self.log(f"{session.client or f'node {session.node}'}: {why}; asked again in {rest:.0f} s")

    def _handle_announcement(self, session: NodeSession, body: MessageBody) -> None:
        client, proof = messages.text(body, "client"), messages.text(body, "proof")
        key = self.policy.enrolled.get(client)
        if key is None or not VerifyKey(key).verify(messages.statement(self.policy.plan, client, session.nonce), proof):
            self._turn_away(session, client)
            return
        session.client, session.parts, session.have, session.took = client, None, 0, client in self.took
        info = FileInfo.announced(body.get("bytes"), body.get("whole"))
        if info is not None:
            self._begin(session, info, body)
        elif self._released() and client not in self.noted and self.inbox.path(client).exists():
            self._store_upload(session, self.inbox.path(client))  # the program before may have died with the receipt

    def _turn_away(self, session: NodeSession, client: str) -> None:
        no = Rejected(
            "the node did not show the key of an enrolled client",
            client=client[:64] or None,
            field="proof",
            expected="a signature by the enrolled key",
            got=f"node {session.node}",
            fix="Enroll the site's public key, or give its node the key file that is enrolled.",
        )
        if session.node not in self.unknown_nodes:
            self.unknown_nodes.add(session.node)
            self.inbox.note(no)
        self._failed(session, no.reason)
        session.rests_until = self.clock() + self.collector_config.again

    def _begin(self, session: NodeSession, info: FileInfo, body: MessageBody) -> None:
        """An announced upload: it is here already, it is too large, or its pieces are asked for."""
        stored, limit = self.inbox.path(session.client), sealed_size(self.policy.limits.upload_bytes)
        if info.sha256 in self.refused:
            self._ask_again_later(session)
        elif stored.exists() and (self._upload_hash(session.client) == info.sha256 or announce(stored) == info):
            self._store_upload(session, stored)
            Partial(self.partial, session.client, info, self.collector_config.chunk).remove()  # of a program that died here
        elif info.bytes > limit:
            no = Rejected(
                "the upload is larger than the plan allows",
                client=session.client,
                field="size",
                expected=f"at most {limit} bytes",
                got=info.bytes,
            )
            self.inbox.note(no)
            self._refuse(session, info, no)
        else:
            session.partial = Partial(self.partial, session.client, info, self.collector_config.chunk)
            self._handle_piece(session, body)

    def _handle_piece(self, session: NodeSession, body: MessageBody) -> None:
        partial, chunk = session.partial, messages.chunk_in(body)
        if partial is None:
            return
        if chunk is not None:
            partial.add(chunk)  # any other than the next one is dropped and asked for again
        if not partial.finished:
            return
        try:
            path = partial.complete()
        except Damaged as no:
            self._failed(session, no.reason)
            return
        self._store_upload(session, path)
        if session.notice and "digest" in session.notice:
            replace_atomically(upload_hash_path(self.folder, session.client), partial.info.sha256.encode())
        partial.remove()
        session.partial = None

    def _upload_hash(self, client: ClientId) -> str:
        """The hash of the file that a client's upload came as: a sealed one has other bytes than what is in the inbox."""
        path = upload_hash_path(self.folder, client)
        return path.read_text(encoding="ascii", errors="replace") if path.exists() else ""

    def _store_upload(self, session: NodeSession, path: Path) -> None:
        """Through the gate; the receipt is written for a file that is in the inbox, and only then."""
        info = announce(path)
        try:
            receipt = coordinator.receive(self.folder, path, SigningKey.load(self.server_key))
        except Rejected as no:
            self._refuse(session, info, no)
            return
        self.looked = None
        session.notice = {"digest": receipt.digest, "bytes": receipt.bytes}
        self.log(f"{session.client}: the upload is in the inbox ({receipt.bytes} bytes)")

    def _refuse(self, session: NodeSession, info: FileInfo, no: Rejected) -> None:
        self.refused.add(info.sha256)
        session.notice = {"refused": str(no)}
        self.log(str(no))

    def _handle_noted(self, session: NodeSession, body: MessageBody) -> None:
        self.noted.add(session.client)
        refused = session.notice is not None and "refused" in session.notice
        session.notice = None
        if refused:
            self._ask_again_later(session)

    def _ask_again_later(self, session: NodeSession) -> None:
        """Ask from the beginning, later: people at the site may have put things right."""
        session.client, session.rests_until = "", self.clock() + self.collector_config.again

    def _handle_put(self, session: NodeSession, body: MessageBody) -> None:
        if not session.parts:
            return
        part, _, info = session.parts[0]
        if messages.text(body, "part") != part:
            return
        session.have = min(max(0, messages.number(body, "have")), info.bytes)
        if session.have == info.bytes:
            session.parts.pop(0)
            session.have = 0

    def _handle_repair(self, session: NodeSession, body: MessageBody) -> None:
        """A repair, small enough for one message; sealed, so it goes through the gate as a file."""
        data, path = body.get("data"), self.partial / f"{session.client}.repair"
        make_folder(self.partial)
        replace_atomically(path, data if isinstance(data, bytes) else b"")
        try:
            coordinator.receive(self.folder, path, SigningKey.load(self.server_key))
        except Rejected as no:
            self._failed(session, str(no))
            return
        finally:
            path.unlink(missing_ok=True)
        self.looked = None
        self.repairs_due.discard(session.client)
        self.log(f"{session.client}: the repair is here")

    def _handle_taken(self, session: NodeSession, body: MessageBody) -> None:
        session.took = True
        self.took.add(session.client)
        self.log(f"{session.client}: has the release and made its model of it")


def _mark(files: Mapping[str, Path] | None) -> tuple[int, ...]:
    """Tells a release from the one before without reading it; empty if there is none."""
    try:
        found = files["release"].stat() if files else None
    except FileNotFoundError:
        found = None
    return (found.st_ino, found.st_mtime_ns, found.st_size) if found else ()
