"""The memory of a coordinator of OneSum, with ten sites and with a thousand: every upload is received and summed alone.

    python -m benchmarks.onesum_memory            10 and 1,000 sites, each in a process of its own
    python -m benchmarks.onesum_memory 10 48      one of them: so many sites, so many filters

Every site signs the same sums; each upload is received through the gate into a round folder, and the server phase reads them
back from there. `before` is resident when the round has opened, `peak` the most until the release is published.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from osfl.core.method import Context
from osfl.core.settings import resolve_settings
from osfl.core.types import Dataset, Plan, Shard, Task
from osfl.methods.onesum import OneSum
from osfl.roles import coordinator
from osfl.rounds.folder import simulated_key
from osfl.runtime.machine import Machine
from osfl.runtime.meter import peak_memory, reset_peak_memory
from osfl.runtime.payloads import to_raw
from osfl.wire.bundle import pack

SITES, FILTERS = (10, 1000), 32  # 1.6 MB an upload: a thousand are five times what a process with torch has


def run() -> dict[str, Any]:
    rows = {str(sites): in_own_process(sites, FILTERS) for sites in SITES}
    few, many = (rows[str(sites)] for sites in SITES)
    return {"filters": FILTERS, "sites": rows, "peak_times": round(many["peak_mb"] / few["peak_mb"], 3)}


def in_own_process(sites: int, filters: int) -> dict[str, float]:
    """Memory that one run left behind must not hide what the next one needs."""
    command = [sys.executable, "-m", "benchmarks.onesum_memory", str(sites), str(filters)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: dict[str, float] = json.loads(done.stdout)
    return found


def receive_and_sum(sites: int, filters: int) -> dict[str, float]:
    """A whole round with so many sites; megabytes and seconds."""
    torch.set_num_threads(1)
    clients = tuple(f"site-{number:04}" for number in range(sites))
    task = Task("cells", ("one", "other"), (1, 8, 8))
    plan = Plan(task, "onesum", resolve_settings(OneSum, "smoke", {"filters": filters}), clients)
    tensors, facts = _sums(plan)
    keys, server = {client: simulated_key(0, client) for client in clients}, simulated_key(0, "server")
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "round"
        coordinator.open_new(folder, plan, {c: key.public_hex for c, key in keys.items()}, server.public_hex)
        reset_peak_memory()
        before = peak_memory()
        start = time.perf_counter()
        for client in clients:
            coordinator.receive(folder, pack("upload", client, plan.digest, tensors, facts, keys[client]))
        received, peak = time.perf_counter(), peak_memory()
        coordinator.make_release(folder, server, machine=Machine(workers=1))
        done = time.perf_counter()
        peak = max(peak, peak_memory())
        size = sum(path.stat().st_size for path in (folder / "inbox").glob("*.safetensors"))
    return {
        "before_mb": round(before / 1e6, 1),
        "peak_mb": round(peak / 1e6, 1),
        "uploads_mb": round(size / 1e6, 1),
        "receive_seconds_a_site": round((received - start) / sites, 4),
        "server_seconds": round(done - received, 2),
    }


def _sums(plan: Plan) -> tuple[dict[str, Any], dict[str, Any]]:
    """One site's upload, as the wire has it."""
    images = torch.randint(0, 256, (40, 1, 8, 8), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    data = Dataset(images, torch.arange(40) % 2)
    shard = Shard("site-0000", data, data.subset(torch.arange(2)))
    payload = OneSum(plan.task, plan.settings).client_phase(shard, Context(plan, torch.device("cpu")))
    return to_raw(payload.tensors), dict(payload.facts)


if __name__ == "__main__":
    numbers = [int(word) for word in sys.argv[1:]]
    print(json.dumps(receive_and_sum(*numbers) if numbers else run(), indent=None if numbers else 1))
