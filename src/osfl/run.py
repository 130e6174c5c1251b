"""One round from top to bottom; the only file that sees every stage.

    plan → shards → client phases → bytes → gate → inbox → server phase → personalisation → build → evaluation
    → results.json → report

The round folder is the state. Kill the process anywhere and call `run` again with the same words: it continues to the
same digest, and no finished client phase is repeated.
"""

from __future__ import annotations

import os
import shlex
import sys
import time
import types
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from osfl.cluster import speak_on_ray
from osfl.encounters import after_encounters
from osfl.environment import describe_environment
from osfl.errors import RoundError
from osfl.evaluation.comparison import summarize
from osfl.evaluation.gains import with_gains
from osfl.meter import Meter, measure, reset_peak_memory
from osfl.outcome import Traffic, measured, outcome, round_seconds
from osfl.phases import Machine, check_schedule, computing, serve, settle, speak
from osfl.plan import plan_from
from osfl.protocol import (
    ClientId,
    Context,
    Joint,
    Payload,
    Plan,
    Progress,
    Shard,
    Task,
    quiet,
)
from osfl.registry import is_reference, load
from osfl.reports.comparison import write_comparison
from osfl.reports.model_card import write_model_card
from osfl.reports.page import write_report
from osfl.result import Result, write_json
from osfl.round import Round, contracts_of, encounter_folder, open_round, simulated_key, standing_round
from osfl.simulation import Federation, Simulation, for_methods, prepare
from osfl.storage import load_model_of, load_payload
from osfl.topology import all_encounters, is_last
from osfl.transports.memory import deliver
from osfl.wire.agreed import read_json, standing_desk
from osfl.workers import default_workers


def run(
    simulation: Simulation,
    out: Path | str,
    *,
    machine: Machine = Machine(),
    progress: Progress = quiet,
    shelf: Path | None = None,
) -> Result:
    """Simulate one round in `out`, or continue it. `shelf`: where client models are shared with other methods."""
    about = {"preset": simulation.preset, "command": simulation.command(str(out)) + machine.words()}
    return walk(prepare(simulation), Path(out), about, machine=machine, progress=progress, shelf=shelf)


def walk(
    federation: Federation,
    out: Path,
    about: Mapping[str, Any],
    *,
    machine: Machine = Machine(),
    progress: Progress = quiet,
    shelf: Path | None = None,
) -> Result:
    """From shards to a report. `about` goes into the result: preset and command.

    Where clients meet several times, each encounter is a whole round, and what a client made of it is where it starts in
    the next one. The last is the round in `out` itself, those before it are in `out/encounters`.
    """
    *before, last = all_encounters(federation.plan)
    story = Story()
    for number, plan in enumerate(before, 1):
        folder, telling = encounter_folder(out, number), within(progress, f"encounter {number}")
        result = one_round(replace(federation, plan=plan), folder, about, story, machine, telling, shelf)
        story = Story((*story.results, result), folder)
    telling = within(progress, f"encounter {len(before) + 1}") if before else progress
    return one_round(replace(federation, plan=last), out, about, story, machine, telling, shelf)


@dataclass(frozen=True)
class Story:
    """What happened in the encounters before this one: their results, and the folder of the last of them."""

    results: Sequence[Result] = ()
    folder: Path | None = None

    def previous(self, client: ClientId) -> Payload | None:
        """The model that this client made in the encounter before; None before the first."""
        if self.folder is None:
            return None
        kept = load_model_of(self.folder / "models" / f"{client}.safetensors")
        if kept is None:
            raise RoundError("the model of the encounter before is lost", client=client, field="models",
                             expected=f"{client}.safetensors in {self.folder / 'models'}", got="nothing that can be read",
                             fix=f"Remove {self.folder} and later encounters, and run the same command again.")  # fmt: skip
        return kept[0]


def one_round(
    federation: Federation, out: Path, about: Mapping[str, Any], story: Story, machine: Machine, progress: Progress,
    shelf: Path | None,
) -> Result:  # fmt: skip
    """One round from top to bottom, in a folder of its own."""
    started = time.perf_counter()
    plan = federation.plan
    method = load(plan.method)(plan.task, plan.settings)
    contracts = {} if is_reference(method) else contracts_of(method)
    enrolled = {client: simulated_key(plan.seed, client).public_hex for client in plan.clients}
    with open_round(out, plan, contracts, enrolled, simulated_key(plan.seed, "server")) as round:
        finished = round.finished()
        if finished is not None:
            return _completed(finished, round)
        federation = _without_forgotten(method, federation, round, story)
        if shelf is not None and ("shelf", "") not in round.journal():
            round.note("shelf", {"path": os.path.relpath(shelf, out)})  # client models are kept there, too
        with computing(plan, machine, progress, round.scratch, shelf=shelf, show=round.show,
                       milestone=round.milestone) as ctx:  # fmt: skip
            traffic = _release(method, federation, round, ctx, story, machine)
            payloads = _personalization(method, federation.shards, round, ctx, story)
            result = outcome(method, federation, payloads, traffic, round, ctx)
            environment = describe_environment(machine.device, machine.workers or default_workers())
        result |= {**about, "environment": environment}  # type: ignore[typeddict-item]
        result["costs"]["wall_seconds"] = round_seconds(time.perf_counter() - started)
        if is_last(plan):
            result = after_encounters(result, story.results)
        write_json(out / "results.json", result)
        return _completed(result, round)


def within(progress: Progress, where: str) -> Progress:
    """The same lines, each saying what it is a part of."""
    return lambda what, done, total: progress(f"{where}: {what}", done, total)


def _without_forgotten(method: Any, federation: Federation, round: Round, story: Story) -> Federation:
    """Clients that were forgotten (`osfl forget`) do not come back when the same words are said again, nor later on."""
    present = set(round.present).intersection(*({row["client"] for row in r["clients"]} for r in story.results))
    if len(present) == len(round.plan.clients):
        return federation
    shards = [shard for shard in federation.shards if shard.client in present]
    problems = list(method.problems(len(shards))) if shards else ["every client was forgotten"]
    if problems:
        raise RoundError(f"nothing can be made of what was not forgotten: {'; '.join(problems)}", field="clients",
                         expected="enough clients for this method", got=f"{len(shards)} of {len(federation.shards)}",
                         fix="Start a new round with other settings, in another folder.")  # fmt: skip
    return replace(federation, shards=shards)


def _completed(result: Result, round: Round) -> Result:
    """A round with results has its report and model card, drawn again if they were lost, and no checkpoints."""
    if not (round.folder / "report" / "index.html").exists():
        write_report(result, round.folder / "report")
    if not (round.folder / "model_card.md").exists():
        write_model_card(result, round.folder)
    round.tidy()
    return result


# --- to a release --------------------------------------------------------------------------------------------------------


def _release(method: Any, federation: Federation, round: Round, ctx: Context, story: Story, machine: Machine) -> Traffic:
    """Everything up to release.safetensors, which is left alone if it is there."""
    if is_reference(method):
        return _reference(method, federation.shards, round, ctx)
    speaks = any(round.desk.contracts.values())
    _client_phases(method, federation.shards, round, ctx, story, machine)
    if round.release() is None:
        serve(method, round, ctx)
    everyone = {shard.client for shard in federation.shards}
    # an empty contract: the bundles of a real round, so that digests agree, but they say nothing, and count as nothing
    up = round.delivered() if speaks else dict.fromkeys(sorted(everyone), 0)
    down = {client: size for client, size in round.release_bytes().items() if client in everyone}
    return Traffic(up, down, int(speaks))


def _client_phases(method: Any, shards: Sequence[Shard], round: Round, ctx: Context, story: Story, machine: Machine) -> None:
    """Each client that has not spoken yet trains, checks what it would send, signs it and hands it over."""
    delivered = round.delivered()
    waiting = [shard for shard in shards if shard.client not in delivered]
    check_schedule(round.plan, [shard.client for shard in waiting], round.desk.contracts)
    done = len(shards) - len(waiting)
    spoken: list[ClientId] = []
    reset_peak_memory()

    def hand_over(client: ClientId, bundle: bytes, meter: Meter) -> None:
        round.note("client", meter.as_json(), client)
        deliver(bundle, round.inbox)
        spoken.append(client)
        ctx.progress("clients", done + len(spoken), len(shards))

    def speak_here(shard: Shard) -> None:
        key = simulated_key(round.plan.seed, shard.client)
        own = replace(ctx, previous=story.previous(shard.client))
        hand_over(shard.client, *speak(method, shard, round.plan, round.desk.contracts, key, own))

    ctx.progress("clients", done, len(shards))
    if machine.engine == "ray" and not story.results:  # later encounters start from models, which stay in this process
        for said in speak_on_ray(round.plan, waiting, workers=machine.workers):
            hand_over(*said)
    else:
        ctx.map(speak_here, waiting)


def _reference(method: Any, shards: Sequence[Shard], round: Round, ctx: Context) -> Traffic:
    """References may pool data or speak often; what they would send is measured like an upload."""
    note = round.journal().get(("server", ""))
    if round.release() is None or note is None:
        reset_peak_memory()
        with measure() as meter:
            simulated = method.simulate(shards, ctx)
        everyone = round.present
        traffic = {
            "up": {c: measured(simulated.up.get(c, ()), c, round) for c in everyone},
            "down": {c: measured(simulated.down.get(c, ()), c, round) for c in everyone},
            "messages": max((e.times for sent in simulated.up.values() for e in sent), default=0),
        }
        spent = {"seconds": simulated.client_seconds, "flops": simulated.client_flops, "peak_bytes": meter.peak_bytes}
        round.note("client", spent)
        round.note("server", {**meter.as_json(), **traffic})
        round.publish(simulated.release, {})
        note = traffic
    return Traffic(note["up"], note["down"], note["messages"])


# --- from a release to a result ---------------------------------------------------------------------------------------


def _personalization(
    method: Any, shards: Sequence[Shard], round: Round, ctx: Context, story: Story
) -> Mapping[ClientId, Payload]:
    """What each client makes of the release; clients that take it as it is share one object."""
    published = round.release()
    assert published is not None
    release, digest = published
    if is_reference(method):
        return {shard.client: release.for_client(shard.client) for shard in shards}
    reset_peak_memory()
    finished: list[ClientId] = []

    def personalize(shard: Shard) -> Payload:
        kept = round.model(shard.client, digest)
        if kept is not None:
            return kept
        payload, meter = settle(method, release, shard, replace(ctx, previous=story.previous(shard.client)))
        if payload is not release.shared:
            round.note("personalize", meter.as_json(), shard.client)
            round.keep_model(shard.client, payload, digest)
            finished.append(shard.client)
            ctx.progress("personalize", len(finished), len(shards))
        return payload

    return dict(zip([s.client for s in shards], ctx.map(personalize, shards), strict=True))


# --- several methods, and finished models -----------------------------------------------------------------------------


def compare(
    simulation: Simulation,
    methods: Sequence[str],
    seeds: Sequence[int],
    out: Path | str,
    *,
    machine: Machine = Machine(),
    progress: Progress = quiet,
) -> dict[str, Any]:
    """Several methods on the same shards. Each client model is trained once and shared by all that upload it."""
    out = Path(out)
    variants = dict(zip(methods, for_methods(simulation, methods), strict=True))
    results: list[tuple[str, Result]] = []
    for seed in seeds:
        for label, variant in variants.items():
            where = f"{label} seed {seed}"
            result = run(replace(variant, seed=seed), out / label / f"seed{seed}", machine=machine,
                         progress=within(progress, where), shelf=out / "shelf")  # fmt: skip
            results.append((label, result))
            progress(f"{where} done", len(results), len(seeds) * len(variants))
    results = [(label, result) for (label, _), result in zip(results, with_gains([r for _, r in results]), strict=True)]
    comparison = summarize(
        [result for _, result in results], labels=[label for label, _ in results],
        paths=[f"{label}/seed{result['seed']}" for label, result in results],
        command=_compare_command(simulation, methods, seeds, out),
    )  # fmt: skip
    for label, result in results:  # again, now that every reference is known
        others: list[Result] = [
            {**r, "method": other} for other, r in results if other != label and r["seed"] == result["seed"]
        ]
        write_report(result, out / label / f"seed{result['seed']}" / "report", others)
    write_json(out / "comparison.json", comparison)
    write_comparison(comparison, [result for _, result in results], out / "report")
    return comparison


def _compare_command(simulation: Simulation, methods: Sequence[str], seeds: Sequence[int], out: Path) -> str:
    one = f"osfl run --method {shlex.quote(simulation.method)} "
    several = f"osfl compare --methods {shlex.quote(','.join(methods))} "
    words = simulation.command(str(out)).replace(one, several, 1)
    return words.replace(f"--seed {simulation.seed} ", f"--seeds {','.join(map(str, seeds))} ", 1)


def load_model(folder: Path | str, client: ClientId | None = None) -> tuple[nn.Module, Task]:
    """A finished classifier, ready for evaluation: of a round folder, or of the folder where a site keeps its model.

    `client` picks one where each has its own.
    """
    folder = Path(folder)
    if not any((folder / name).exists() for name in ("release.safetensors", "model.safetensors")):
        raise RoundError(
            f"{folder} holds no finished round and no site's model", field="run",
            fix="Run `osfl run --out DIR` first, or at a site of a real round `osfl personalize --out DIR`.",
        )  # fmt: skip
    plan = plan_from(read_json(folder / "plan.json"), str(folder / "plan.json"))
    method = load(plan.method)(plan.task, plan.settings)
    if client is not None and client not in plan.clients:
        raise RoundError(f"{client!r} took no part in this round", field="client", expected=" or ".join(plan.clients),
                         got=client, fix="Leave --client out where all share one model.")  # fmt: skip
    _check_withdrawn(folder)
    payload = load_payload(folder / "model.safetensors") or _joint_model(folder, method, client)
    payload = payload or _finished_model(folder, plan, client)
    return method.build(payload).eval(), plan.task


def _check_withdrawn(folder: Path) -> None:
    """Refuse models that were made of a release which was withdrawn, where this is a round's folder and knows of it."""
    if not (folder / "enrolled.json").exists():
        return
    withdrawn = standing_desk(folder).withdrawn
    for path in [folder / "model.safetensors", *sorted((folder / "models").glob("*.safetensors"))] if withdrawn.digests else []:
        kept = load_model_of(path)
        why = withdrawn.digests.get(kept[1]) if kept is not None else None
        if why is not None:
            raise RoundError(f"{path.relative_to(folder)} was made of a release that was {why}", field="run",
                             fix=f"Delete {path}.")  # fmt: skip


def _joint_model(folder: Path, method: Any, client: ClientId | None) -> Payload | None:
    """Where clients answer together and none is asked for: all their models as one."""
    if client is not None or not isinstance(method, Joint):
        return None
    kept = {path.stem: load_payload(path) for path in sorted((folder / "models").glob("*.safetensors"))}
    return method.after_round({name: model for name, model in kept.items() if model is not None}) if kept else None


def _finished_model(folder: Path, plan: Plan, client: ClientId | None) -> Payload:
    """What a round folder gives to this client, or to all."""
    with standing_round(folder, plan) as round:
        published = round.release()
    assert published is not None
    own = sorted(path.stem for path in (folder / "models").glob("*.safetensors"))
    if own and client not in own:
        raise RoundError(f"each client has a model of its own here, and {client!r} is none of them" if client else
                         "each client has a model of its own here", field="client",
                         expected=" or ".join(own), got=client or "nothing", fix=f"Add --client {own[0]}.")  # fmt: skip
    payload = load_payload(folder / "models" / f"{client}.safetensors") if own else published[0].for_client(client or "")
    assert payload is not None
    return payload


class _Callable(types.ModuleType):
    """`osfl.run` names both this file and its main function: Python puts the file there once anybody has imported it."""

    def __call__(self, *args: Any, **options: Any) -> Result:
        return run(*args, **options)


sys.modules[__name__].__class__ = _Callable
