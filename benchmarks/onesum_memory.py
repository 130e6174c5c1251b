"""The memory of a coordinator of OneSum, with ten sites and with a thousand: every upload is received and summed alone.

    python -m benchmarks.onesum_memory            10 and 1,000 sites, each in a process of its own
    python -m benchmarks.onesum_memory 10 48      one of them: so many sites, so many filters
    python -m benchmarks.onesum_memory 10 48 off  the same, and uploads are not compared with each other first

Every site signs the same sums; each upload is received through the gate into a round folder, and the server phase reads them
back from there. `before` is resident when the round has opened, `peak` the most until the release is published.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any, Literal, TypeAlias

from benchmarks.server_memory import measure

Suspects: TypeAlias = Literal["note", "off"]
SITES, FILTERS = (10, 1000), 20  # 0.7 MB an upload: a thousand are nearly twice what a process with torch has


def run() -> dict[str, Any]:
    rows = {str(sites): in_own_process(sites, FILTERS) for sites in SITES}
    few, many = (rows[str(sites)] for sites in SITES)
    alone = in_own_process(SITES[1], FILTERS, "off")
    times = {"peak_times": round(many["peak_mb"] / few["peak_mb"], 3)}
    return {"filters": FILTERS, "sites": rows, **times, "thousand_sites_without_comparing_uploads": alone}


def in_own_process(sites: int, filters: int, suspects: Suspects = "note") -> dict[str, float]:
    """Memory that one run left behind must not hide what the next one needs."""
    command = [sys.executable, "-m", "benchmarks.onesum_memory", str(sites), str(filters), suspects]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    found: dict[str, float] = json.loads(done.stdout)
    return found


def receive_and_sum(sites: int, filters: int, suspects: Suspects = "note") -> dict[str, float]:
    """A whole round with so many sites; megabytes and seconds."""
    return measure("onesum", {"filters": filters}, sites, suspects)


if __name__ == "__main__":
    numbers, comparing = [int(word) for word in sys.argv[1:3]], sys.argv[3:] != ["off"]
    if numbers:
        print(json.dumps(receive_and_sum(numbers[0], numbers[1], "note" if comparing else "off")))
    else:
        print(json.dumps(run(), indent=1))
