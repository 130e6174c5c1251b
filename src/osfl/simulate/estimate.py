"""Estimate traffic, time and memory of a run before it starts.

Everything is measured in short rehearsals and continued to the whole run (osfl.simulate.rehearsal): bytes sent, and for client
phase, server phase and personalization floating point operations, seconds of one worker, and bytes of tensors. Only what a
training takes within limited memory is known by formula (`Method.device_bytes`). A plan that cannot fit is refused.
Features that earlier runs have kept are not used, but reported: an estimate is that of a run with an empty cache.
"""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from osfl.core.errors import DeviceError, UsageError
from osfl.core.method import Phase
from osfl.core.registry import is_reference, load
from osfl.core.types import ClientId, Contract, Json, Plan
from osfl.rounds.contacts import Done, Pass, done_times, least_bytes, schedule, sized
from osfl.rounds.folder import contracts_of
from osfl.rounds.phases import contract_for
from osfl.runtime.environment import devices_named
from osfl.runtime.machine import Machine, available_memory
from osfl.runtime.memory import available, budget, sharing
from osfl.runtime.meter import peak_memory
from osfl.runtime.workers import default_workers, return_freed_memory
from osfl.simulate.rehearsal import PHASES, Expected, expected
from osfl.simulate.run import device_bytes
from osfl.simulate.simulation import Federation, Simulation, prepare
from osfl.wire.sealing import sealed_size


@dataclass(frozen=True)
class PhaseEstimate:
    """What a phase will cost: all clients together, or the server."""

    flops: float
    seconds: float  # of one worker
    tensor_bytes: int  # that exist at once: at the server, or at the client that needs most


@dataclass(frozen=True)
class Estimate:
    """What a run will cost, without evaluation."""

    method: str
    upload_bytes: Mapping[ClientId, int]
    download_bytes: Mapping[ClientId, int]
    messages_per_client: int
    exact_bytes: bool  # False: the size depends on data or settings that a rehearsal cannot know
    phases: Mapping[Phase, PhaseEstimate]
    flops: float  # of all clients, before and after the server phase
    client_seconds: float  # summed over clients, before and after the server phase
    wall_seconds: float  # clients with the workers of this machine, then the server with one worker
    server_flops: float
    server_seconds: float  # with one worker
    memory_bytes: int  # of this process with all its workers
    device_bytes: int  # of one worker's tensors: of the phase that needs most, within the memory it may use
    rehearsed: Sequence[str]  # what was continued: the values of two rehearsals, and the plan's
    kept_features: float = 0.0  # part of the images whose features are kept already: a run does not encode those again
    passes: Sequence[Pass] = ()  # with a contact schedule: what each window carries, each way
    done: Sequence[Done] = ()  # and when each site has received the uploads of all its neighbors

    def as_json(self) -> dict[str, Json]:
        return {
            **asdict(self),
            "upload_bytes_total": sum(self.upload_bytes.values()),
            "download_bytes_total": sum(self.download_bytes.values()),
        }


def estimate(simulation: Simulation, machine: Machine = Machine(), *, sealed: bool = False) -> Estimate:
    """Estimate what `osfl run` with the same options will send and need. `sealed`: windows carry sealed copies."""
    if sealed and not (simulation.topology and simulation.topology.contacts):
        raise UsageError(
            "sealed bundles are planned for contact windows, and there are none",
            field="sealed",
            fix="Add --contacts FILE, or leave --sealed out.",
        )
    return estimate_of(prepare(simulation), machine, sealed=sealed)


def estimate_of(federation: Federation, machine: Machine = Machine(), *, sealed: bool = False) -> Estimate:
    """The same of a federation that is prepared."""
    plan = federation.plan
    training = device_bytes(federation, machine)  # refused before anything is rehearsed
    found = expected(federation, machine)
    phases = {phase: _phase(found, phase) for phase in PHASES}
    workers = min(machine.workers or default_workers(), len(federation.shards))
    tensors = {phase: one.tensor_bytes for phase, one in phases.items()}
    if training is not None:
        tensors["client"] = training if machine.memory or machine.device != "cpu" else max(tensors["client"], 0)
    at_once = {phase: tensors[phase] * (1 if phase == "server" else workers) for phase in PHASES}
    check_fits(plan, tensors, at_once, machine)
    return_freed_memory()
    return Estimate(
        method=plan.method,
        upload_bytes=found.up,
        download_bytes=found.down,
        messages_per_client=found.messages,
        exact_bytes=_fixed(plan),
        phases=phases,
        flops=phases["client"].flops + phases["personalize"].flops,
        client_seconds=phases["client"].seconds + phases["personalize"].seconds,
        wall_seconds=sum(_wall(found, phase, workers) for phase in PHASES),
        server_flops=phases["server"].flops,
        server_seconds=phases["server"].seconds,
        memory_bytes=_resident() + max(at_once.values()),
        device_bytes=max(tensors.values()),
        rehearsed=found.rehearsed,
        kept_features=found.kept,
        **_passes(plan, found.up, sealed),
    )


def _phase(found: Expected, phase: Phase) -> PhaseEstimate:
    flops, seconds = (found.total(quantity, phase) for quantity in ("flops", "seconds"))
    return PhaseEstimate(flops, seconds, round(found.most("tensor_bytes", phase)))


def _wall(found: Expected, phase: Phase, workers: int) -> float:
    """Clients side by side; what the server does, or a reference in one piece, with one worker."""
    total, longest = found.total("seconds", phase), found.most("seconds", phase)
    return max(total / workers, longest)


# --- what cannot fit -------------------------------------------------------------------------------------------------------

BATCHES: Mapping[Phase, Sequence[str]] = {  # settings that decide how much a phase needs at once, where a method has them
    "client": ("batch_size", "generator_batch", "edm_batch", "window", "filters"),
    "server": ("synthesis_batch", "images", "images_per_class", "student_batch", "batch_size", "per_class", "samples"),
    "personalize": ("personal_batch", "student_batch", "align_batch", "batch_size"),
}


def check_fits(plan: Plan, tensors: Mapping[Phase, int], at_once: Mapping[Phase, int], machine: Machine) -> None:
    """Refuse a plan of which a phase needs more than its device, or this computer, has."""
    device, *others = devices_named(machine.device)
    with budget(machine.memory), sharing(machine.workers or default_workers(), 1 + len(others)):
        room = available(device)
    for phase in PHASES:
        if room and tensors[phase] > room:
            raise _too_much(plan, phase, tensors[phase], room, f"its device, {machine.device},")
    if device.type != "cpu":
        return
    here = available_memory()
    for phase in PHASES:
        if at_once[phase] > here:
            raise _too_much(plan, phase, at_once[phase], here, "this computer", workers=phase != "server")


def _too_much(plan: Plan, phase: Phase, needed: int, room: int, where: str, *, workers: bool = False) -> DeviceError:
    named = [name for name in BATCHES[phase] if hasattr(plan.settings, name)][:2]
    smaller = " or ".join(f"`--set {name}=...` below {getattr(plan.settings, name)}" for name in named) or "a smaller method"
    fix = f"Try {smaller}" + (", or fewer `--workers`." if workers else ".")
    return DeviceError(
        f"the {_NAMES[phase]} of {plan.method} needs more memory than {where} has for it",
        field=named[0] if named else "memory",
        expected=f"at least {needed / 1e9:.2f} GB",
        got=f"{room / 1e9:.2f} GB",
        fix=fix,
    )


_NAMES: Mapping[Phase, str] = {"client": "client phase", "server": "server phase", "personalize": "personalization"}


# --- contacts: what fits, and when ---------------------------------------------------------------------------------------


def _passes(plan: Plan, bytes_of: Mapping[ClientId, int], sealed: bool) -> dict[str, Json]:
    """The schedule, if there is one; what a client sends in all encounters is the same in each."""
    if plan.topology is None or not plan.topology.contacts:
        return {}
    contracts = _contracts(plan)
    bundles = {client: round(size / plan.topology.encounters) for client, size in bytes_of.items()}
    sizes = {
        client: sized(plan, contract_for(plan, contracts, client)[1], sealed_size(size) if sealed else size)
        for client, size in bundles.items()
    }
    return {"passes": schedule(plan.topology, sizes), "done": done_times(plan.topology, plan.clients, sizes)}


def planned_exchanges(plan: Plan, *, sealed: bool = False) -> tuple[list[Pass], list[Done]]:
    """The same for a real plan, without anybody's images: bundles have the size that their contract gives."""
    if plan.topology is None or not plan.topology.contacts:
        raise UsageError("this plan has no contact schedule", field="plan", fix="Write one with `osfl new --contacts FILE`.")
    if not _fixed(plan):
        raise UsageError(
            f"how much {plan.method} sends depends on the images",
            field="plan",
            fix="Rehearse it on a dataset: osfl estimate --method ... --contacts FILE.",
        )
    promised = {client: plan.topology.encounters * _promised(plan, client) for client in plan.clients}
    found = _passes(plan, promised, sealed)
    return found["passes"], found["done"]


def _promised(plan: Plan, client: ClientId) -> int:
    """Bytes of a bundle whose sizes are all in the contract (`_fixed`), of a client with many images."""
    return least_bytes(plan, client, *contract_for(plan, _contracts(plan), client), samples=100_000)


def _contracts(plan: Plan) -> dict[str, Contract]:
    return contracts_of(load(plan.method)(plan.task, plan.settings), plan)


def _fixed(plan: Plan) -> bool:
    """Whether every tensor of an upload has its size written in the contract."""
    if is_reference(load(plan.method)):
        return True
    fields = [f for contract in _contracts(plan).values() for f in contract.values()]
    return all(field.required and all(isinstance(side, int) for side in field.shape) for field in fields)


def _resident() -> int:
    """Bytes of memory in use now: this process with its data."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_memory()
    return pages * resource.getpagesize()
