"""One round from top to bottom; the only file that sees every stage.

    plan → shards → client phases → bytes → gate → inbox → server phase → personalization → build → evaluation
    → results.json → report

The round folder is the state. Kill the process anywhere and call `run` again with the same options: it continues to the
same digest, and no finished client phase is repeated.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from osfl.core.errors import RoundError
from osfl.core.method import Context, Method, quiet
from osfl.core.registry import is_reference, load
from osfl.core.result import Result, write_json
from osfl.core.topology import all_encounters, is_last
from osfl.core.types import ClientId, Json, Payload, Progress, Shard
from osfl.reports.model_card import write_model_card
from osfl.reports.page import write_report
from osfl.rounds.folder import Round, contracts_of, encounter_folder, open_round, simulated_key
from osfl.rounds.judgment import judged
from osfl.rounds.phases import check_schedule, computing, run_client_phase, run_personalization, run_server_phase, with_secret
from osfl.rounds.state import check_holds_no_other
from osfl.rounds.storage import load_model_of
from osfl.runtime.environment import describe_environment, devices_named
from osfl.runtime.machine import Machine
from osfl.runtime.memory import available, budget, sharing
from osfl.runtime.meter import Meter, measure, reset_peak_memory
from osfl.runtime.precision import computing_in, half
from osfl.runtime.workers import default_workers
from osfl.simulate.encounters import after_encounters
from osfl.simulate.evaluate import Traffic, evaluate, measured, round_seconds
from osfl.simulate.ray import run_client_phases_on_ray, server_parts_on_ray
from osfl.simulate.simulation import Federation, Simulation, prepare
from osfl.simulate.tracking.tracker import Log


def run(
    simulation: Simulation,
    out: Path | str,
    *,
    machine: Machine = Machine(),
    progress: Progress = quiet,
    cache: Path | None = None,
    federation: Federation | None = None,
    logs: Sequence[Log] = (),
) -> Result:
    """Simulate one round in `out`, or continue it. `cache`: where client models are shared with other methods; `federation`:
    what `prepare` made of this simulation, if it has run; `logs`: trackers that get the finished result."""
    about = {"preset": simulation.preset, "command": simulation.command(str(out)) + machine.options()}
    federation = prepare(simulation) if federation is None else federation
    result = run_federation(federation, Path(out), about, machine=machine, progress=progress, cache=cache)
    for log in logs:
        log.run(result, Path(out))
    return result


def run_federation(
    federation: Federation,
    out: Path,
    about: Mapping[str, Json],
    *,
    machine: Machine = Machine(),
    progress: Progress = quiet,
    cache: Path | None = None,
) -> Result:
    """From shards to a report. `about` goes into the result: preset and command.

    Where clients exchange several times, each encounter is a whole round, and what a client made of it is where it starts in
    the next one. The last is the round in `out` itself, those before it are in `out/encounters`.
    """
    check_holds_no_other(out, "enrolled.json")
    if machine.memory or machine.device != "cpu":
        device_bytes(federation, machine)  # refused before anything starts
    *before, last = all_encounters(federation.plan)
    history = RunHistory()
    for number, plan in enumerate(before, 1):
        folder, within_encounter = encounter_folder(out, number), within(progress, f"encounter {number}")
        result = run_round(replace(federation, plan=plan), folder, about, history, machine, within_encounter, cache)
        history = RunHistory((*history.results, result), folder)
    within_encounter = within(progress, f"encounter {len(before) + 1}") if before else progress
    return run_round(replace(federation, plan=last), out, about, history, machine, within_encounter, cache)


def device_bytes(federation: Federation, machine: Machine) -> int | None:
    """Memory that the largest client's training takes on its device, or None where no formula knows; refused where it cannot
    fit."""
    (device, *others), plan = devices_named(machine.device), federation.plan
    method, workers = load(plan.method)(plan.task, plan.settings), machine.workers or default_workers()
    at_once = sharing(min(workers, len(plan.clients)), 1 + len(others))
    with computing_in(machine.precision), budget(machine.memory), at_once:
        most = max(len(shard.train) for shard in federation.shards)
        return method.device_bytes(most, available(device), half(device) is not None)


@dataclass(frozen=True)
class RunHistory:
    """What happened in the encounters before this one: their results, and the folder of the last of them."""

    results: Sequence[Result] = ()
    folder: Path | None = None

    def previous(self, client: ClientId) -> Payload | None:
        """The model that this client made in the encounter before; None before the first."""
        if self.folder is None:
            return None
        kept = load_model_of(self.folder / "models" / f"{client}.safetensors")
        if kept is None:
            raise RoundError(
                "the model of the encounter before is lost",
                client=client,
                field="models",
                expected=f"{client}.safetensors in {self.folder / 'models'}",
                got="nothing that can be read",
                fix=f"Remove {self.folder} and later encounters, and run the same command again.",
            )
        return kept[0]


def run_round(
    federation: Federation,
    out: Path,
    about: Mapping[str, Json],
    history: RunHistory,
    machine: Machine,
    progress: Progress,
    cache: Path | None,
) -> Result:
    """One round from top to bottom, in a folder of its own."""
    started = time.perf_counter()
    plan = federation.plan
    method = load(plan.method)(plan.task, plan.settings)
    contracts = {} if is_reference(method) else contracts_of(method, federation.plan)
    enrolled = {client: simulated_key(plan.seed, client).public_hex for client in plan.clients}
    with open_round(out, plan, contracts, enrolled, simulated_key(plan.seed, "server")) as fl_round:
        finished = fl_round.finished()
        if finished is not None:
            return _completed(finished, fl_round)
        federation = _without_forgotten(method, federation, fl_round, history)
        if cache is not None and ("cache", "") not in fl_round.journal():
            fl_round.note("cache", {"path": os.path.relpath(cache, out)})  # client models are kept there, too
        with (
            computing(
                plan, machine, progress, fl_round.scratch, cache=cache, show=fl_round.show, milestone=fl_round.milestone
            ) as alone,
            server_parts_on_ray(alone, machine) if machine.engine == "ray" else contextlib.nullcontext(alone) as ctx,
        ):
            traffic, payloads = run_phases(method, federation, fl_round, ctx, history, machine)
            result = evaluate(method, federation, payloads, traffic, fl_round, ctx)
            environment = describe_environment(machine, machine.workers or default_workers())
        journal = fl_round.journal().items()
        notes = [f"{client or phase}: {remark}" for (phase, client), note in journal for remark in note.get("remarks", ())]
        environment |= {"notes": notes} if notes else {}
        result |= {**about, "environment": environment}  # type: ignore[typeddict-item]
        result["costs"]["wall_seconds"] = round_seconds(time.perf_counter() - started)
        if history.results and is_last(plan):
            result = after_encounters(result, history.results)
        write_json(out / "results.json", result)
        return _completed(result, fl_round)


def within(progress: Progress, where: str) -> Progress:
    """The same lines, each saying what it is a part of."""
    return lambda what, done, total: progress(f"{where}: {what}", done, total)


def _without_forgotten(method: Method, federation: Federation, fl_round: Round, history: RunHistory) -> Federation:
    """Clients that were forgotten (`osfl forget`) do not come back when the same command runs again, nor later."""
    present = set(fl_round.present).intersection(*({row["client"] for row in r["clients"]} for r in history.results))
    if len(present) == len(fl_round.plan.clients):
        return federation
    shards = [shard for shard in federation.shards if shard.client in present]
    problems = list(method.problems(len(shards))) if shards else ["every client was forgotten"]
    if problems:
        raise RoundError(
            f"nothing can be made of what was not forgotten: {'; '.join(problems)}",
            field="clients",
            expected="enough clients for this method",
            got=f"{len(shards)} of {len(federation.shards)}",
            fix="Start a new round with other settings, in another folder.",
        )
    return replace(federation, shards=shards)


def _completed(result: Result, fl_round: Round) -> Result:
    """A round with results has its report and model card, drawn again if they were lost, and no checkpoints."""
    if not (fl_round.folder / "report" / "index.html").exists():
        write_report(result, fl_round.folder / "report")
    if not (fl_round.folder / "model_card.md").exists():
        write_model_card(result, fl_round.folder)
    fl_round.tidy()
    return result


def run_phases(
    method: Method, federation: Federation, fl_round: Round, ctx: Context, history: RunHistory, machine: Machine
) -> tuple[Traffic, Mapping[ClientId, Payload]]:
    """From shards to what each client makes of the release, and what was sent for it."""
    traffic = _release(method, federation, fl_round, ctx, history, machine)
    return traffic, _personalization(method, federation.shards, fl_round, ctx, history)


# --- to a release --------------------------------------------------------------------------------------------------------


def _release(
    method: Method, federation: Federation, fl_round: Round, ctx: Context, history: RunHistory, machine: Machine
) -> Traffic:
    """Everything up to release.safetensors, which is kept if it is there."""
    if is_reference(method):
        return _reference(method, federation.shards, fl_round, ctx)
    has_uploads = any(fl_round.policy.contracts.values())
    _client_phases(method, federation.shards, fl_round, ctx, history, machine)
    if fl_round.release() is None:
        if federation.rehearsed:
            _compare_uploads(method, fl_round, ctx)
        run_server_phase(method, fl_round, ctx)
    everyone = {shard.client for shard in federation.shards}
    # an empty contract: the bundles of a real round, so that digests agree, but they say nothing, and count as nothing
    up = fl_round.delivered() if has_uploads else dict.fromkeys(sorted(everyone), 0)
    down = {client: size for client, size in fl_round.release_bytes().items() if client in everyone}
    return Traffic(up, down, int(has_uploads))


def _compare_uploads(method: Method, fl_round: Round, ctx: Context) -> None:
    """What the coordinator of the real round would be told before its release. Nobody decides here: it is noted."""
    plan = ctx.plan
    if plan.judging.suspects == "off" or plan.secure_sum or plan.topology is not None:
        return
    with measure():  # no cost of the method
        found = judged(fl_round, method, fl_round.delivered(), ctx)
    for number, one in enumerate(found, 1):
        ctx.progress(f"suspected: {one['client']} {one['text']} ({one['rule']})", number, len(found))


def _client_phases(
    method: Method, shards: Sequence[Shard], fl_round: Round, ctx: Context, history: RunHistory, machine: Machine
) -> None:
    """Run the client phase of each client without an upload: train, check the upload, sign it and deliver it."""
    delivered = fl_round.delivered()
    waiting = [shard for shard in shards if shard.client not in delivered]
    check_schedule(fl_round.plan, [shard.client for shard in waiting], fl_round.policy.contracts)
    done = len(shards) - len(waiting)
    done_clients: list[ClientId] = []
    reset_peak_memory()

    def hand_over(client: ClientId, bundle: bytes, meter: Meter) -> None:
        fl_round.note("client", meter.as_json(), client)
        fl_round.inbox.receive(bundle)  # the same gate as in a real round
        done_clients.append(client)
        ctx.progress("clients", done + len(done_clients), len(shards))

    def run_here(shard: Shard) -> None:
        key = simulated_key(fl_round.plan.seed, shard.client)
        mine = replace(ctx.for_client(shard.client), previous=history.previous(shard.client))
        own = with_secret(mine, shard.client, fl_round.scratch / "secrets")
        policy = fl_round.policy
        hand_over(
            shard.client,
            *run_client_phase(method, shard, fl_round.plan, policy.contracts, key, own, policy.enrolled, real=False),
        )

    ctx.progress("clients", done, len(shards))
    if machine.engine == "ray" and not history.results:  # later encounters start from models, which stay in this process
        for finished_client in run_client_phases_on_ray(fl_round.plan, waiting, machine):
            hand_over(*finished_client)
    else:
        ctx.map(run_here, waiting)


def _reference(method: Method, shards: Sequence[Shard], fl_round: Round, ctx: Context) -> Traffic:
    """Run a reference, which may pool data or use many rounds; what it would send is measured like an upload."""
    note = fl_round.journal().get(("server", ""))
    if fl_round.release() is None or note is None:
        reset_peak_memory()
        with measure() as meter:
            simulated = method.simulate(shards, ctx)
        everyone = fl_round.present
        traffic: dict[str, Any] = {
            "up": {c: measured(simulated.up.get(c, ()), c, fl_round) for c in everyone},
            "down": {c: measured(simulated.down.get(c, ()), c, fl_round) for c in everyone},
            "messages": max((e.times for sent in simulated.up.values() for e in sent), default=0),
        }
        spent = {"seconds": simulated.client_seconds, "flops": simulated.client_flops, "peak_bytes": meter.peak_bytes}
        fl_round.note("client", spent)
        fl_round.note("server", {**meter.as_json(), **traffic})
        fl_round.publish(simulated.release, {})
        note = traffic
    return Traffic(note["up"], note["down"], note["messages"])


# --- from a release to a result ---------------------------------------------------------------------------------------


def _personalization(
    method: Method, shards: Sequence[Shard], fl_round: Round, ctx: Context, history: RunHistory
) -> Mapping[ClientId, Payload]:
    """What each client makes of the release; clients that take it as it is share one object."""
    published = fl_round.release()
    assert published is not None
    release, digest = published
    if is_reference(method):
        return {shard.client: release.for_client(shard.client) for shard in shards}
    reset_peak_memory()
    finished: list[ClientId] = []

    def personalize(shard: Shard) -> Payload:
        kept = fl_round.model(shard.client, digest)
        if kept is not None:
            return kept
        mine = replace(ctx.for_client(shard.client), previous=history.previous(shard.client))
        own = with_secret(mine, shard.client, fl_round.scratch / "secrets")
        payload, meter = run_personalization(method, release, shard, own)
        if payload is not release.shared:
            fl_round.note("personalize", meter.as_json(), shard.client)
            fl_round.keep_model(shard.client, payload, digest)
            finished.append(shard.client)
            ctx.progress("personalize", len(finished), len(shards))
        return payload

    return dict(zip([s.client for s in shards], ctx.map(personalize, shards), strict=True))
