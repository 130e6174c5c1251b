"""Simulated clients on Ray: the phases of many clients at once, on the machines of a cluster. `pip install 'osfl[ray]'`.

An option next to the embedded default, which starts in milliseconds while Ray needs seconds and hundreds of megabytes. Each
client trains with one compute thread in a process of its own, and its upload comes back as the signed bytes that a
site would send; they pass the same gate. So every digest is that of the embedded default.

RAY_ADDRESS names a running cluster, as for any program that uses Ray; without it Ray is started here. The machines of the
cluster need osfl installed. Ray ships the images with pickle: use a cluster that you trust.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from osfl.core.errors import UsageError
from osfl.core.types import ClientId, Dataset, Json, Plan, Shard
from osfl.runtime.machine import Machine
from osfl.runtime.meter import Meter


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
        task, text = ray.remote(_run_client_phase), json.dumps(plan.as_json())
        own = replace(machine, workers=1, threads=1, engine="local")
        waiting = [task.remote(text, own, shard.client, *_arrays(shard), shard.digest) for shard in shards]
        while waiting:
            (done, *_), waiting = ray.wait(waiting)
            client, bundle, cost = ray.get(done)
            yield client, bundle, Meter(**cost)
    finally:
        if ours:
            ray.shutdown()


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
