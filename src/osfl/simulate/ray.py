"""Simulations on Ray: client phases, and the parts of a server phase that need nothing of one another, on the machines of a
cluster. `pip install 'osfl[ray]'`.

An option next to the embedded default, which starts in milliseconds while Ray needs seconds and hundreds of megabytes. Each
client trains with one compute thread in a process of its own, and its upload comes back as the signed bytes that a
site would send; they pass the same gate. So every digest is that of the embedded default.

RAY_ADDRESS names a running cluster, as for any program that uses Ray; without it Ray is started here. The machines of the
cluster need osfl installed. Ray ships the images with pickle: use a cluster that you trust.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import os
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from safetensors.torch import load as read
from safetensors.torch import save

from osfl.core.errors import OsflError, UsageError
from osfl.core.method import Context, Method, Part, PartWork
from osfl.core.types import ClientId, Dataset, Json, Payload, Plan, Shard, Upload
from osfl.runtime.machine import Machine, Precision
from osfl.runtime.meter import Meter, measure, spend_again
from osfl.runtime.precision import current_precision
from osfl.runtime.workers import Workers, compute_threads


def require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise UsageError(
            "Ray is not installed here", field="engine", fix="Install it with: pip install 'osfl[ray]', or leave --engine out."
        )


def run_client_phases_on_ray(
    plan: Plan, shards: Sequence[Shard], machine: Machine = Machine()
) -> Iterator[tuple[ClientId, bytes, Meter]]:
    """The upload of each client and what it cost, in the order in which they finish.

    Device, precision and memory are the machine's: they change bits. A client computes in one process, with one thread.
    """
    with cluster(machine) as ray:
        task, text, own = ray.remote(_run_client_phase), json.dumps(plan.as_json()), _alone(machine)
        waiting = [task.remote(text, own, shard.client, *_arrays(shard), shard.digest) for shard in shards]
        while waiting:
            (done, *_), waiting = ray.wait(waiting)
            client, bundle, cost = _result(ray, done)
            yield client, bundle, Meter(**cost)


@contextlib.contextmanager
def cluster(machine: Machine) -> Iterator[Any]:
    """Ray, started here unless it runs already or RAY_ADDRESS names a cluster; what was started here ends here."""
    require_ray()
    ray: Any = importlib.import_module("ray")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    ours = not ray.is_initialized()
    if ours:
        here: dict[str, Json] = (
            {} if os.environ.get("RAY_ADDRESS") else {"num_cpus": machine.workers, "include_dashboard": False}
        )
        ray.init(logging_level="ERROR", log_to_driver=False, **here)
    try:
        yield ray
    finally:
        if ours:
            ray.shutdown()


def _result(ray: Any, reference: Any) -> Any:
    """What a worker gives back; its refusal is the sentence alone, without the traceback that Ray puts before it."""
    try:
        return ray.get(reference)
    except OsflError as error:
        raise getattr(error, "cause", error) from None


def _alone(machine: Machine) -> Machine:
    """How one worker of the cluster computes: one process, one thread, and the numbers of this machine."""
    return replace(machine, workers=1, threads=1, engine="local", precision=cast(Precision, current_precision()))


# --- parts of the server phase ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def server_parts_on_ray(ctx: Context, machine: Machine) -> Iterator[Context]:
    """The context with a cluster that computes parts of the server phase (`Context.spread`)."""
    with cluster(machine) as ray:
        yield replace(ctx, elsewhere=functools.partial(_spread, ray, machine))


def _spread(
    ray: Any, machine: Machine, method: Method, work: PartWork, uploads: Sequence[Upload], parts: Sequence[Part], ctx: Context
) -> list[Payload]:
    """`ctx.spread` on the workers of the cluster. An upload is sent once, when the first part that reads it begins."""
    task, text, own = ray.remote(_run_part), json.dumps(ctx.plan.as_json()), _alone(machine)
    places = {upload.client: place for place, upload in enumerate(uploads)}
    sent: dict[ClientId, Any] = {}
    lock = threading.Lock()
    name = f"{work.__module__}:{work.__qualname__}"

    def upload_of(client: ClientId) -> Any:
        with lock:
            if client not in sent:
                sent[client] = ray.put(_as_bytes(uploads[places[client]].payload))
            return sent[client]

    def remote(numbered: tuple[int, Part]) -> Payload:
        number, part = numbered

        def make() -> Payload:
            refs = [upload_of(client) for client in part.clients]
            made, cost = _result(ray, task.remote(text, own, name, number, part.clients, _as_bytes(part.payload), *refs))
            spend_again(cost)
            return _from_bytes(made)

        return make() if part.key is None else ctx.get_or_compute(part.key(), make)

    at_once = max(1, int(ray.cluster_resources().get("CPU", 1)))
    return Workers(at_once).map(remote, enumerate(parts))  # threads that wait for the cluster


def _as_bytes(payload: Payload) -> tuple[bytes, str]:
    """A payload as it travels: a safetensors file, and its facts as JSON."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in payload.tensors.items()}
    return save(tensors), json.dumps(dict(payload.facts))


def _from_bytes(sent: tuple[bytes, str]) -> Payload:
    return Payload(read(sent[0]), json.loads(sent[1]))


def _run_part(
    plan: str, machine: Machine, name: str, number: int, clients: Sequence[ClientId], part: tuple[bytes, str], *uploads: Any
) -> tuple[tuple[bytes, str], dict[str, Any]]:
    """One part in a worker of the cluster, on its device by turns; the function is found by its name."""
    from osfl.core.method import quiet
    from osfl.core.plan import plan_from
    from osfl.core.registry import load
    from osfl.rounds.phases import computing

    module, _, function = name.partition(":")
    work: PartWork = getattr(importlib.import_module(module), function)
    plan_here = plan_from(json.loads(plan), "the plan")
    method = load(plan_here.method)(plan_here.task, plan_here.settings)
    sent = [Upload(client, plan_here.digest, _from_bytes(one)) for client, one in zip(clients, uploads, strict=True)]
    with tempfile.TemporaryDirectory() as scratch, computing(plan_here, machine, quiet, Path(scratch)) as ctx:
        mine = replace(ctx, device=ctx.devices[number % len(ctx.devices)], devices=())
        with compute_threads(1), measure() as meter:
            made = work(method, sent, Part(tuple(clients), _from_bytes(part)), mine)
    cost = {"flops": meter.flops, "made": meter.made, "made_flops": meter.made_flops}
    return _as_bytes(made), cost


def _arrays(shard: Shard) -> list[object]:
    return [part.numpy() for data in (shard.train, shard.val) for part in (data.images, data.labels)]


def _run_client_phase(
    plan: str, machine: Machine, client: ClientId, images: Any, labels: Any, val_images: Any, val_labels: Any, digest: str
) -> tuple[ClientId, bytes, dict[str, Json]]:
    """One client's phase in a worker of the cluster."""
    import torch

    from osfl.core.method import quiet
    from osfl.core.plan import plan_from
    from osfl.core.registry import load
    from osfl.rounds.folder import contracts_of, simulated_key
    from osfl.rounds.phases import computing, run_client_phase

    round_plan = plan_from(json.loads(plan), "the plan")
    train, val = (Dataset(torch.tensor(i), torch.tensor(y)) for i, y in ((images, labels), (val_images, val_labels)))
    method = load(round_plan.method)(round_plan.task, round_plan.settings)
    key = simulated_key(round_plan.seed, client)
    with tempfile.TemporaryDirectory() as scratch, computing(round_plan, machine, quiet, Path(scratch)) as ctx:
        keys = {c: simulated_key(round_plan.seed, c).public_hex for c in round_plan.clients}
        shard = Shard(client, train, val, digest)
        bundle, meter = run_client_phase(
            method, shard, round_plan, contracts_of(method, round_plan), key, ctx.for_client(client), keys, real=False
        )
    return client, bundle, meter.as_json()
