"""Estimate traffic, time and memory of a run before it starts.

Bytes are measured: the run is rehearsed on a few images with short training, and once more on fewer where uploads may
grow with the images (a reference that pools them), to continue along that line. Minutes are rough: operations of the training,
by torch's formulas, over the speed that this machine shows in a second of it. The server's work is known for methods that
provide `server_flops`; for the others it is left out, and the output notes it.
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from osfl.core.errors import UsageError
from osfl.core.registry import is_reference, load
from osfl.core.result import Result
from osfl.core.seeds import torch_generator
from osfl.core.types import ClientId, Contract, Dataset, Json, Plan, Topology
from osfl.ingredients.training.local import Training, batches, fit
from osfl.models.build import architecture_for, build_model
from osfl.models.flops import training_flops
from osfl.rounds.contacts import Done, Pass, done_times, least_bytes, schedule, sized
from osfl.rounds.folder import contracts_of
from osfl.rounds.phases import contract_for
from osfl.runtime.machine import Machine
from osfl.runtime.meter import peak_memory, reset_peak_memory
from osfl.runtime.workers import compute_threads, default_workers
from osfl.simulate.run import device_bytes, run_federation
from osfl.simulate.simulation import Federation, Simulation, prepare
from osfl.wire.sealing import sealed_size

FEW, MORE = 4, 8  # images a client in the two rehearsals
SECOND = 1.0  # how long the speed of training is measured


@dataclass(frozen=True)
class Estimate:
    """What a run will cost. None: not known from the settings of this method."""

    method: str
    upload_bytes: Mapping[ClientId, int]
    download_bytes: Mapping[ClientId, int]
    messages_per_client: int
    exact_bytes: bool  # False: the size depends on data or settings that a rehearsal cannot know
    flops: float | None  # of local training, all clients
    client_seconds: float | None  # summed over clients
    wall_seconds: float | None  # with the workers of this machine; with what the server learns, where that is known
    server_flops: float | None  # of the server phase; None: not known from the settings
    server_seconds: float | None  # with one worker
    server_learns: bool  # True: the server trains too, for nobody knows how long, which is not in the seconds
    sites_learn_again: bool  # True: sites train on what they are given, too, which is not in the seconds either
    memory_bytes: int
    device_bytes: int | None  # of one client's training on its device, within the memory it may use
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
    federation = prepare(simulation)
    on_device = device_bytes(federation, machine)
    more = rehearse(federation, MORE)
    alike = _fixed(federation.plan) and not _reference(federation.plan)  # the number of images changes no size
    few = more if alike else rehearse(federation, FEW)
    speed, used = _speed(federation.plan)
    flops = _flops(federation)
    learners = {} if flops is None else flops
    workers = min(machine.workers or default_workers(), len(federation.shards))
    seconds = {client: count / speed for client, count in learners.items()}
    phases = more["costs"]["phases"]
    pooled = not phases["client"]["flops"] and not phases["personalize"]["flops"]
    one_shot = not pooled and not _reference(federation.plan)
    wall = sum(seconds.values()) if pooled else max([sum(seconds.values()) / workers, *seconds.values()])
    method = load(federation.plan.method)(federation.plan.task, federation.plan.settings)
    server = method.server_flops(federation.plan.clients)
    return Estimate(
        method=federation.plan.method,
        upload_bytes=_continued(few, more, "upload_bytes_by_client", federation),
        download_bytes=_continued(few, more, "download_bytes_by_client", federation),
        messages_per_client=_messages(more, federation.plan),
        exact_bytes=_fixed(federation.plan),
        flops=sum(learners.values()) if flops is not None else None,
        client_seconds=sum(seconds.values()) if flops is not None else None,
        wall_seconds=wall + (server or 0) / speed / workers if flops is not None else None,
        server_flops=server,
        server_seconds=None if server is None else server / speed,
        server_learns=one_shot and server is None and phases["server"]["flops"] > 0,
        sites_learn_again=one_shot and phases["client"]["flops"] > 0 and phases["personalize"]["flops"] > 0,
        memory_bytes=_resident() + workers * used,
        device_bytes=on_device,
        **_passes(federation.plan, _continued(few, more, "upload_bytes_by_client", federation), sealed),
    )


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


# --- bytes: a rehearsal ------------------------------------------------------------------------------------------------


def rehearse(federation: Federation, images: int) -> Result:
    """A whole run with so many images a client and the smoke preset's short training; structure stays as it is."""
    plan = replace(federation.plan, settings=_short(federation.plan), topology=_wide(federation.plan.topology))
    least = int(getattr(plan.settings, "least", 0))
    shards = [replace(shard, train=few_of(shard.train, images, least), val=_first(shard.val, 1)) for shard in federation.shards]
    small = replace(federation, plan=plan, shards=shards, test=_first(federation.test, 32), domains=None)
    with tempfile.TemporaryDirectory(prefix="osfl-estimate-") as folder:
        return run_federation(small, Path(folder), {"preset": "smoke", "command": ""})


def _wide(topology: Topology | None) -> Topology | None:
    """The same meetings with windows that everything fits into: whether it does is what is asked."""
    if topology is None:
        return None
    return replace(topology, contacts=tuple(replace(contact, bytes_per_second=1e15) for contact in topology.contacts))


def _first(data: Dataset, count: int) -> Dataset:
    return data.subset(torch.arange(min(count, len(data))))


def few_of(data: Dataset, count: int, least: int) -> Dataset:
    """So many images from the start; and of each class as many as it needs to count with a method, where there are so many."""
    kept = torch.zeros(len(data), dtype=torch.bool)
    kept[:count] = True
    classes = int(data.labels.max()) + 1 if data.labels.ndim == 1 else data.labels.shape[1]
    for label in range(classes if least else 0):
        kept[data.shows(label).nonzero()[:least, 0]] = True
    return data.subset(kept.nonzero()[:, 0])


def _short(plan: Plan) -> Any:
    """Numbers of the smoke preset (epochs, rounds, batches); text values, such as the architecture, are the user's."""
    method = load(plan.method)
    smoke = {key: value for key, value in method.PRESETS.get("smoke", {}).items() if key not in method.STRUCTURE}
    return replace(plan.settings, **{key: value for key, value in smoke.items() if not isinstance(value, str)})


def _continued(few: Result, more: Result, key: str, federation: Federation) -> dict[ClientId, int]:
    """Bytes at the real number of images, and for the real number of rounds."""
    times = _messages(more, federation.plan) / max(1, more["costs"]["messages_per_client"])
    less, found = few["costs"][key], more["costs"][key]  # type: ignore[literal-required]
    small, large = _sizes(few), _sizes(more)
    bytes_of = {}
    for shard in federation.shards:
        client = shard.client
        step = large[client] - small[client]
        slope = (found[client] - less[client]) / step if step else 0.0
        bytes_of[client] = round(times * (found[client] + slope * (len(shard.train) - large[client])))
    return bytes_of


def _sizes(result: Result) -> dict[ClientId, int]:
    return {row["client"]: row["train"] for row in result["clients"]}


def _messages(rehearsed: Result, plan: Plan) -> int:
    """As often as in the rehearsal, or as the rounds of a multi-round reference say."""
    rounds = getattr(plan.settings, "rounds", None)
    return int(rounds) if rounds is not None and _reference(plan) else rehearsed["costs"]["messages_per_client"]


def _reference(plan: Plan) -> bool:
    return is_reference(load(plan.method))


def _fixed(plan: Plan) -> bool:
    """Whether every tensor of an upload has its size written in the contract."""
    if _reference(plan):
        return True
    fields = [f for contract in _contracts(plan).values() for f in contract.values()]
    return all(field.required and all(isinstance(side, int) for side in field.shape) for field in fields)


# --- minutes and memory: a second of training --------------------------------------------------------------------------


def _flops(federation: Federation) -> dict[ClientId, float] | None:
    """Operations of each client's training, where the settings name an architecture and epochs."""
    settings, task = federation.plan.settings, federation.plan.task
    if not (hasattr(settings, "architecture") and hasattr(settings, "epochs")):
        return None
    passes = settings.epochs * (getattr(settings, "rounds", 1) if _reference(federation.plan) else 1)
    names = {shard.client: architecture_for(settings.architecture, shard.client) for shard in federation.shards}
    each = {name: training_flops(build_model(name, task), task.image) for name in set(names.values())}
    return {shard.client: each[names[shard.client]] * len(shard.train) * passes for shard in federation.shards}


def _speed(plan: Plan) -> tuple[float, int]:
    """(operations a second of one worker, bytes that one training adds), measured on the first client's network."""
    spec = getattr(plan.settings, "architecture", "cnn-w16")
    name, task = architecture_for(spec, plan.clients[0]), plan.task
    rng = torch_generator(0, "estimate")
    model = build_model(name, task, rng)
    size = int(getattr(plan.settings, "batch_size", 64))
    data = Dataset(torch.zeros((size, *task.image), dtype=torch.uint8), torch.arange(size) % len(task.classes))
    recipe = Training(name, epochs=1, batch_size=size, lr=1e-6)
    with compute_threads(1):
        fit(model, data, recipe, rng)  # the first step also sets things up
        before = _resident()
        reset_peak_memory()
        start, steps = time.perf_counter(), 0
        while time.perf_counter() - start < SECOND:
            fit(model, data, recipe, rng)
            steps += len(batches(size, size, rng))
        seconds = time.perf_counter() - start
    return training_flops(model, task.image) * size * steps / seconds, max(0, peak_memory() - before)


def _resident() -> int:
    """Bytes of memory in use now: this process with its data."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return peak_memory()
    return pages * resource.getpagesize()
