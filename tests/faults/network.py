"""A network that loses, repeats, delays, reorders and damages, between a real collector and real answers; no Flower, no torch.

Programs die in it too: `Killed` is raised at a numbered step, and the scenario begins again with what is on disk.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import signal
from collections import Counter as Tally
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from osfl.core.errors import OsflError
from osfl.core.tensors import RawTensor
from osfl.deploy.flower import collector, messages
from osfl.deploy.flower.collector import Collector, CollectorConfig
from osfl.deploy.flower.grid import answer as answer_as_flower
from osfl.deploy.flower.messages import MessageBody, Reply
from osfl.deploy.flower.site_node import SiteNode
from osfl.roles import coordinator
from osfl.wire.bundle import pack
from osfl.wire.gate import AcceptancePolicy
from osfl.wire.inbox import Inbox, Receipt
from osfl.wire.signing import SigningKey
from tests.faults.kills import CONTEXT
from tests.faults.scenario import _KEYS, CLIENTS, POLICY, upload
from tests.faults.traps import no_room, trapped

RELEASE = bytes(range(256)) * 40
SERVER = SigningKey.from_seed(b"server".ljust(32))
QUICK = CollectorConfig(chunk=1000, window=3, wait=3000.0, linger=3000.0, again=20.0, poll=1.0)


class Killed(BaseException):
    """kill -9: nobody catches it."""


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class Faults:
    """Chances of what happens to a question or its answer."""

    lost: float = 0.0
    repeated: float = 0.0
    late: float = 0.0
    damaged: float = 0.0
    cut: float = 0.0
    away: float = 0.0  # a node is not online in a step
    seed: int = 0


@dataclass
class Network:
    """A `Channel`. A node is a function of (kind, message); a step is one call of `replies`."""

    sites: dict[int, Callable[[str, MessageBody], MessageBody]]
    clock: Clock
    faults: Faults = field(default_factory=Faults)
    tally: Tally[str] = field(default_factory=Tally)
    under_way: list[tuple[float, Reply]] = field(default_factory=list)
    dead: set[int] = field(default_factory=set)
    tickets: int = 0

    def __post_init__(self) -> None:
        self.rng = random.Random(self.faults.seed)

    def nodes(self) -> set[int]:
        return {node for node in self.sites if node not in self.dead and not self._chance("away")}

    def send(self, node: int, kind: str, body: MessageBody) -> str:
        self.tickets += 1
        self.tally[kind] += 1
        ticket = f"t{self.tickets}"
        if node in self.dead or self._chance("lost"):
            self.under_way.append((self.clock() + 30, Reply(node, ticket, None, "no answer (code 5)")))
            return ticket
        answer = self._harm(self.sites[node](kind, body))
        delay = self.rng.uniform(2, 60) if self._chance("late") else 0.0
        for _ in range(1 + self._chance("repeated")):
            self.under_way.append((self.clock() + delay, Reply(node, ticket, answer)))
        return ticket

    def replies(self) -> Iterator[Reply]:
        due = [entry for entry in self.under_way if entry[0] <= self.clock()]
        self.under_way = [entry for entry in self.under_way if entry[0] > self.clock()]
        if self.faults.repeated or self.faults.late:
            self.rng.shuffle(due)
        yield from (reply for _, reply in due)

    def _harm(self, answer: MessageBody) -> MessageBody:
        data = answer.get("data")
        if isinstance(data, bytes) and data and self._chance("damaged"):
            place = self.rng.randrange(len(data))
            answer = {**answer, "data": data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]}
        elif isinstance(data, bytes) and self._chance("cut"):
            answer = {**answer, "data": data[: len(data) // 2]}
        return answer

    def _chance(self, what: str) -> bool:
        happens: bool = self.rng.random() < getattr(self.faults, what)
        self.tally[what] += happens
        return happens


@dataclass
class Scenario:
    """A round of the first few clients in one folder; every `step` may be the last one of a program."""

    folder: Path
    clients: tuple[str, ...] = CLIENTS[:3]
    made: Tally[str] = field(default_factory=Tally)
    receipts: dict[str, str] = field(default_factory=dict)  # client -> digest that the site was told
    step: Callable[[], None] = lambda: None
    keys: Mapping[str, SigningKey] = field(default_factory=lambda: _KEYS)
    server: SigningKey | None = None  # with it uploads travel sealed, as over Flower

    @property
    def policy(self) -> AcceptancePolicy:
        return replace(POLICY, enrolled={client: self.keys[client].public_hex for client in self.clients})

    def upload_bytes(self, client: str) -> bytes:
        tensors = {"w": RawTensor("U8", (4000,), bytes(4000))}
        return upload(client) if self.keys is _KEYS else pack("upload", client, POLICY.plan, tensors, {}, self.keys[client])

    def site(self, client: str) -> SiteNode:
        work = self.folder / "sites" / client

        def make(plan: str) -> Path:
            self.made[client] += 1
            path = answers.folder(POLICY.plan) / "upload.safetensors"
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_suffix(".tmp")
            temporary.write_bytes(self.upload_bytes(client))
            self.step()
            temporary.replace(path)
            self.step()
            return path

        def take(plan: str, release: Path, personal: Path | None) -> Path:
            assert release.read_bytes() == RELEASE
            return release

        answers = SiteNode(client, self.keys[client], work, make, take, self.server.public_hex if self.server else "")
        return answers

    def answer(self, client: str) -> Callable[[str, MessageBody], MessageBody]:
        def answer(kind: str, body: MessageBody) -> MessageBody:
            self.step()
            reply = answer_as_flower(lambda: self.site(client), kind, body)  # opened anew for each message
            if kind == messages.RECEIPT and "digest" in body:
                self.receipts[client] = messages.text(body, "digest")
            self.step()
            return reply

        return answer

    @property
    def inbox(self) -> Inbox:
        return Inbox(self.folder / "round" / "inbox", self.policy)

    @contextlib.contextmanager
    def role(self, policy: AcceptancePolicy | None = None, **changed: object) -> Iterator[None]:
        """The coordinator's role without torch: its real inbox, and a release of fixed bytes; some of it `changed`."""
        fl_round = self.folder / "round"

        def receive(folder: Path, path: Path, key: SigningKey) -> Receipt:
            self.step()
            receipt = self.inbox.receive(self.inbox.unsealed(path, self.server))
            self.step()
            return receipt

        def make_release(folder: Path, key: SigningKey, *, progress: object) -> None:
            self.step()
            (fl_round / "release.tmp").write_bytes(RELEASE)
            (fl_round / "release.tmp").replace(fl_round / "release.safetensors")
            self.step()

        def release_files(folder: Path, client: str) -> dict[str, Path] | None:
            path = fl_round / "release.safetensors"
            return {"release": path} if path.exists() else None

        def status(folder: Path) -> SimpleNamespace:
            return SimpleNamespace(ready=len(self.inbox.delivered()) == len(self.clients), asks=False, repairs_due=())

        calls: dict[str, Any] = {
            "receive": receive,
            "make_release": make_release,
            "release_files": release_files,
            "status": status,
        }
        rules = mock.patch.object(collector, "read_policy", lambda folder: policy or self.policy)
        with rules, mock.patch.multiple(coordinator, **{**calls, **changed}):
            yield

    def collector(
        self,
        network: Network,
        collector_config: CollectorConfig = QUICK,
        sleep: Callable[[float], None] | None = None,
    ) -> Collector:
        """The coordinator's program on this round; it runs inside `role`."""
        fl_round, key = self.folder / "round", self.folder / "server.key"
        fl_round.mkdir(parents=True, exist_ok=True)
        (fl_round / "plan.json").write_text("{}")
        if not key.exists():
            SERVER.save(key)
        clock = network.clock
        return Collector(
            fl_round, key, network, collector_config, log=lambda body: None, clock=clock, sleep=sleep or clock.sleep
        )

    def network(self, clock: Clock, faults: Faults) -> Network:
        return Network({number: self.answer(client) for number, client in enumerate(self.clients, 10)}, clock, faults)

    def log(
        self, faults: Faults | None = None, collector_config: CollectorConfig = QUICK, network: Network | None = None
    ) -> bool:
        """One run of the coordinator's program; True when everybody has the release."""
        clock = network.clock if network else Clock()
        channel = network or self.network(clock, faults or Faults())
        with self.role():
            return self.collector(channel, collector_config).run()


def judge(scenario: Scenario) -> dict[str, int]:
    """What must be true at the end, counted as failures."""
    stored = {receipt.client: receipt.digest for receipt in scenario.inbox.uploads()}
    return {
        "lost": sum(stored.get(client) != digest for client, digest in scenario.receipts.items()),
        "missing": len(set(scenario.clients) - stored.keys()),
        "made_twice": sum(count > 1 for count in scenario.made.values()),
        "pieces_left": len(list((scenario.folder / "round" / "partial").glob("*.part"))),
    }


def killed_at_every_step(folder: Path, every: int = 1) -> dict[str, int]:
    """Any program of the round dies at each numbered step; the coordinator's is started again until it ends."""
    counting, total = Scenario(folder / "count", server=SERVER), Tally[str]()
    steps = _steps(counting, lambda count: None)
    for point in range(1, steps + 1, every):
        scenario = Scenario(folder / f"kill-{point}", server=SERVER)

        def die(count: int, point: int = point) -> None:
            if count == point:
                raise Killed

        try:
            _steps(scenario, die)
            total["not_killed"] += 1
        except Killed:
            scenario.step = lambda: None
            finished = scenario.log()
            total["not_finished"] += not finished
        # A site that dies between making and keeping its upload makes it once more; nothing was said before.
        total.update(points=1, **{key: count for key, count in judge(scenario).items() if key != "made_twice"})
    return dict(total)


def _steps(scenario: Scenario, at: Callable[[int], None]) -> int:
    taken = 0

    def step() -> None:
        nonlocal taken
        taken += 1
        at(taken)

    scenario.step = step
    scenario.log()
    return taken


def bad_networks(folder: Path, count: int) -> dict[str, int]:
    """So many rounds, each over a network that does everything wrong at random."""
    total: Tally[str] = Tally()
    for seed in range(count):
        scenario = Scenario(folder / f"bad-{seed}", server=SERVER)
        faults = Faults(lost=0.1, repeated=0.2, late=0.2, damaged=0.1, cut=0.1, away=0.05, seed=seed)
        network = scenario.network(Clock(), faults)
        finished = scenario.log(network=network)
        happened = {f"network_{key}": count for key, count in network.tally.items()}
        total.update(rounds=1, not_finished=not finished, **judge(scenario), **happened)
    return dict(total)


def many_at_once(folder: Path, clients: int) -> dict[str, int]:
    """All sites of a large round answer in the same step."""
    names = tuple(f"hospital-{number:03d}" for number in range(clients))
    keys = {name: SigningKey.from_seed(name.encode().ljust(32)) for name in names}
    scenario = Scenario(folder / "many", names, keys=keys, server=SERVER)
    finished = scenario.log(Faults(repeated=0.1, late=0.3))
    return {"sites": len(scenario.clients), "finished": int(finished), **judge(scenario)}


def full_disks(folder: Path, points: int) -> dict[str, int]:
    """From a numbered call of the operating system on nothing that needs room succeeds, at the coordinator's and at every
    site; then there is room again."""
    total = Tally[str]()
    _, calls = _without_room(Scenario(folder / "count", server=SERVER), 0)
    for number in range(points):
        scenario = Scenario(folder / f"full-{number}", server=SERVER)
        finished, _ = _without_room(scenario, 1 + number * (calls - 1) // max(1, points - 1))
        total.update(points=1, stopped=not finished, not_finished=not scenario.log())
        # What a site cannot keep it makes once more; nothing was said before.
        total.update({key: count for key, count in judge(scenario).items() if key != "made_twice"})
    return dict(total)


def _without_room(scenario: Scenario, at: int) -> tuple[bool, int]:
    """A run of the program on disks that are full from call `at` on: whether it came to the end, and how many calls it made."""
    finished, collector_config = False, replace(QUICK, wait=100.0, linger=100.0)
    aside = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with aside[0], aside[1], trapped(at, no_room, stays=at > 0) as trap, contextlib.suppress(OSError, OsflError):
        finished = scenario.log(collector_config=collector_config)
    return finished, trap.count


def really_killed(folder: Path, every: int = 1) -> dict[str, int]:
    """The same points with kill -9 of a process of its own; then a new process finishes the round."""
    total: Tally[str] = Tally()
    steps = _steps(Scenario(folder / "count", server=SERVER), lambda count: None)
    for point in range(1, steps + 1, every):
        place = folder / f"killed-{point}"
        child = CONTEXT.Process(target=_die_at, args=(place, point))
        child.start()
        child.join()
        scenario = Scenario(place, server=SERVER)
        reported = {
            client: json.loads(path.read_text()).get("digest")
            for client in scenario.clients
            if (path := scenario.site(client).folder(POLICY.plan) / "receipt.json").exists()
        }
        stored = {receipt.client: receipt.digest for receipt in scenario.inbox.uploads()}
        finished = scenario.log()
        total.update(
            points=1,
            not_killed=child.exitcode != -signal.SIGKILL,
            not_finished=not finished,
            acknowledged=len(reported),
            lost=sum(stored.get(client) != digest for client, digest in reported.items()),
            missing=judge(scenario)["missing"],
            pieces_left=judge(scenario)["pieces_left"],
        )
    return dict(total)


def _die_at(place: Path, point: int) -> None:
    def die(count: int) -> None:
        if count == point:
            os.kill(os.getpid(), signal.SIGKILL)

    with contextlib.redirect_stdout(io.StringIO()):
        _steps(Scenario(place, server=SERVER), die)
