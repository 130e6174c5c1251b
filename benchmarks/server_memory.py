"""The memory of a coordinator whose server phase reads uploads one after the other, with ten sites and with a thousand.

    python -m benchmarks.server_memory                    10 and 1,000 sites, each in a process of its own
    python -m benchmarks.server_memory fedavg 10          one of them: so many sites

Every site signs the same upload, which the judgment before the server phase notes. Each is received through the gate into a
round folder, and the server phase reads them back from there. `before` is resident when the round has opened, `peak` the most
until the release is published. FALCON's server has to learn from the sequences of all sites: `peak` grows by those, which
`sequences_mb` counts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch

from osfl.core.method import Context
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import Dataset, Judging, Payload, Plan, Shard, Task
from osfl.roles import coordinator
from osfl.rounds.folder import existing_round, simulated_key
from osfl.runtime.machine import Machine
from osfl.runtime.meter import peak_memory, reset_peak_memory
from osfl.runtime.payloads import to_raw
from osfl.wire.bundle import pack

SITES = (10, 1000)
IMAGES = 40  # of a site
METHODS: Mapping[str, Mapping[str, Any]] = {  # what makes an upload as large as in earnest, and the server's own work small
    "fedavg": {"architecture": "cnn-w48"},
    "fedcgs": {"window": 8},
    "falcon": {"generator_width": 16, "send": "sequences"},
    "federated_factory": {"images_per_class": 1000, "mixture_dims": 60},
}


def run() -> dict[str, Any]:
    rows: dict[str, Any] = {}
    for method in METHODS:
        found = {str(sites): in_own_process(method, sites) for sites in SITES}
        few, many = (found[str(sites)] for sites in SITES)
        rows[method] = {"sites": found, "peak_times": round(many["peak_mb"] / few["peak_mb"], 3)}
    return rows


def in_own_process(method: str, sites: int) -> dict[str, float]:
    """Memory that one run left behind must not hide what the next one needs."""
    command = [sys.executable, "-m", "benchmarks.server_memory", method, str(sites)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(method: str, changes: Mapping[str, Any], sites: int, suspects: Literal["note", "off"] = "note") -> dict[str, float]:
    """A whole round with so many sites; megabytes and seconds. With `off` uploads are not compared before the server phase."""
    torch.set_num_threads(1)
    clients = tuple(f"site-{number:04}" for number in range(sites))
    task = Task("cells", ("one", "other"), (1, 8, 8))
    plan = Plan(task, method, resolve_settings(load(method), "smoke", changes), clients, judging=Judging(suspects=suspects))
    payload = _upload(plan)
    tensors, facts = to_raw(payload.tensors), dict(payload.facts)
    keys, server = {client: simulated_key(0, client) for client in clients}, simulated_key(0, "server")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "round"
        coordinator.open_new(folder, plan, {c: key.public_hex for c, key in keys.items()}, server.public_hex)
        reset_peak_memory()
        before = peak_memory()
        start, worked = time.perf_counter(), time.process_time()
        with existing_round(folder, plan) as fl_round:
            inbox = fl_round.inbox
            for client in clients:
                inbox.receive(pack("upload", client, plan.digest, tensors, facts, keys[client]))
        received, worked, peak = time.perf_counter(), time.process_time() - worked, peak_memory()
        coordinator.make_release(folder, server, machine=Machine(workers=1))
        done = time.perf_counter()
        peak = max(peak, peak_memory())
        size = sum(path.stat().st_size for path in (folder / "inbox").glob("*.safetensors"))
    sequences = payload.tensors.get("sequences")
    pooled = {} if sequences is None else {"sequences_mb": round(4e-6 * sequences.numel() * sites, 1)}
    return {
        "before_mb": round(before / 1e6, 1),
        "peak_mb": round(peak / 1e6, 1),
        "uploads_mb": round(size / 1e6, 1),
        "receive_seconds_a_site": round((received - start) / sites, 4),  # the sites' packing, and waiting for the disk included
        "receive_processor_seconds_a_site": round(worked / sites, 4),
        "server_seconds": round(done - received, 2),
        **pooled,
    }


def _upload(plan: Plan) -> Payload:
    """One site's upload, of images that no two sites need to share."""
    images = torch.randint(0, 256, (IMAGES, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    data = Dataset(images, torch.arange(IMAGES) % 2)
    shard = Shard("site-0000", data, data.subset(torch.arange(2)))
    payload: Payload = load(plan.method)(plan.task, plan.settings).client_phase(shard, Context(plan, torch.device("cpu")))
    return payload


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], METHODS[sys.argv[1]], int(sys.argv[2]))))
    else:
        print(json.dumps(run(), indent=1))
