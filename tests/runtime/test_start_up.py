"""What torch loads once a process is no client's work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CODE = """
import sys
import osfl.rounds.phases as phases
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation

original, after = phases.with_fallback, []

def work(*given):
    before = set(sys.modules)
    found = original(*given)
    after.append(len([name for name in set(sys.modules) - before if name.startswith("torch.")]))
    return found

phases.with_fallback = work
run(Simulation("fedavg", "digits", 2, "iid", "smoke", samples=40, image_size=8), sys.argv[1])
print(after)
"""


def test_no_client_pays_for_what_torch_loads_once(tmp_path: Path) -> None:
    printed = subprocess.check_output([sys.executable, "-c", CODE, str(tmp_path / "run")], text=True)
    counts = [int(count) for count in printed.strip().splitlines()[-1].strip("[]").split(",")]
    assert len(counts) >= 2 and max(counts) == 0, counts  # two clients, and the phases after them
