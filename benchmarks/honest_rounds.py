"""False alarms of the judgment: rounds in which nobody lies, 5 and 10 sites, with much and little skew.

    python -m benchmarks.bench honest_rounds       # interrupted, it goes on

No bound was set on these seeds (1000 to 1199). All rounds are skewed: of equal shares nothing would be learned.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from benchmarks.bench import kept_figures, write_record
from benchmarks.lying_sites import federation, sent_by_all
from osfl.core.types import Upload
from osfl.rounds.judging.judge import judge
from osfl.runtime.workers import compute_threads

HONEST = ("OneSum", "FederatedFactory", "OneSum", "FedAvg", "FederatedFactory", "ensemble by class counts")
SKEWED = [(partition, sites) for partition in ("dirichlet:0.1", "dirichlet:0.3", "dirichlet:0.5") for sites in (5, 10)]
ROUNDS, SEED = 200, 1000  # rounds that are not iid, and the seed of the first


def run() -> dict[str, Any]:
    start, rounds = time.perf_counter(), dict[str, Any](kept_figures("honest_rounds").get("table", {}))
    for number in range(ROUNDS):
        case, (partition, sites) = HONEST[number % len(HONEST)], SKEWED[(number // len(HONEST)) % len(SKEWED)]
        name = f"{case}, digits, {sites} sites, {partition}, seed {SEED + number}"
        if name not in rounds:
            rounds[name] = alarms(case, sites, partition, SEED + number)
            print(name, rounds[name], file=sys.stderr, flush=True)
        if number % 10 == 9:
            write_record("honest_rounds", figures(rounds), time.perf_counter() - start)
    return figures(rounds)


def alarms(case: str, sites: int, partition: str, seed: int) -> list[list[Any]]:
    made = federation(case, "digits", sites, partition, seed)
    with compute_threads(1):
        method, ctx, sent = sent_by_all(made)
        found = judge(method, [Upload(client, "", sent[client]) for client in sorted(sent)], ctx)
    return [[one.client, one.rule, round(one.value, 3)] for one in found]


def figures(rounds: Mapping[str, list[list[Any]]]) -> dict[str, Any]:
    alarmed = sum(1 for found in rounds.values() if found)
    return {
        "rounds": len(rounds),
        "rounds with an alarm": alarmed,
        "share": round(alarmed / len(rounds), 4),
        "table": dict(rounds),
    }
