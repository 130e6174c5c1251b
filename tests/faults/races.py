"""Sixteen processes send for the same client at the same moment: one upload wins, everyone agrees which."""

from __future__ import annotations

from collections import Counter
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

from osfl.core.errors import Rejected
from osfl.wire.inbox import Inbox
from tests.faults.kills import CONTEXT
from tests.faults.scenario import CLIENTS, POLICY, upload
from tests.faults.traps import without_links

VERSIONS = 4  # different uploads in a race; the others repeat one of them


def races(folder: Path, count: int, processes: int = 16) -> dict[str, int]:
    """Every second race without hard links."""
    barrier = CONTEXT.Barrier(processes)
    pipes = [CONTEXT.Pipe(duplex=False) for _ in range(processes)]
    workers = [
        CONTEXT.Process(target=_race, args=(sender, barrier, folder, count, number)) for number, (_, sender) in enumerate(pipes)
    ]
    for worker, (_, sender) in zip(workers, pipes, strict=True):
        worker.start()
        sender.close()
    outcomes = [receiver.recv() for receiver, _ in pipes]  # by worker, then by race: a digest, or "" when refused
    for worker, (receiver, _) in zip(workers, pipes, strict=True):
        worker.join()
        receiver.close()
    total: Counter[str] = Counter(races=count, processes=processes)
    for race in range(count):
        total.update(_judge_race(folder / str(race), [outcome[race] for outcome in outcomes]))
    return dict(total)


def _judge_race(folder: Path, answers: list[str]) -> dict[str, int]:
    inbox = Inbox(folder, POLICY)
    stored = [receipt.digest for receipt in inbox.uploads()]
    winners = set(answers) - {""}
    winning = [number % VERSIONS for number, answer in enumerate(answers) if answer]
    agreed = len(winners) == 1 and stored == list(winners) and len(set(winning)) == 1
    complete = agreed and len(winning) == sum(number % VERSIONS == winning[0] for number in range(len(answers)))
    leftovers = [path for path in folder.iterdir() if path.name.endswith(".tmp")]
    return {"one_winner": int(complete), "leftovers": len(leftovers)}


def _race(sender: Connection, barrier: Barrier, folder: Path, count: int, number: int) -> None:
    outcomes = []
    data = upload(CLIENTS[0], version=number % VERSIONS)
    for race in range(count):
        with without_links(race % 2 == 1):
            inbox = Inbox(folder / str(race), POLICY)
            barrier.wait()
            try:
                outcomes.append(inbox.receive(data).digest)
            except Rejected:
                outcomes.append("")
    sender.send(outcomes)
