"""`make bench`: the long evidence, one part after the other; figures with what produced them go to benchmarks/records/.

python -m benchmarks.bench                 everything
python -m benchmarks.bench run_speed      one part
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

from osfl.core.result import write_json
from osfl.runtime.environment import describe_environment
from osfl.runtime.machine import Machine
from osfl.runtime.workers import default_workers

RECORDS = Path(__file__).parent / "records"
# each is a module with run() -> dict
PARTS = (
    "estimates",
    "run_speed",
    "ensemble_forward",
    "inversion_speed",
    "inversion_bounds",
    "sparse_inversion_speed",
    "synthesis_speed",
    "time_to_accuracy",
    "factory_speed",
    "token_speed",
    "slimming_speed",
    "fol_bounds",
    "wire_faults",
    "run_faults",
    "roles_faults",
    "forgetting",
    "tampering",
    "flower_faults",
    "three_ways",
    "pretrained_clients",
    "lying_counts",
    "onesum_times",
    "onesum_speed",
    "onesum_memory",
    "server_memory",
    "thousand_sites",
    "server_growth",
    "lying_sites",
    "honest_rounds",
    "large_data",
    "onesum_crossing",
    "privacy_curve",
    "named_mutants",
    "mutation",
)


def main(parts: list[str]) -> None:
    for part in parts or PARTS:
        name, _, size = part.partition("=")  # large_data=8000: a smaller one
        if name not in PARTS:
            raise SystemExit(f"there is no part {name!r}; parts: {', '.join(PARTS)}")
        start = time.perf_counter()
        print(f"== {name}", flush=True)
        figures = importlib.import_module(f"benchmarks.{name}").run(*([int(size)] if size else []))
        write_record(name, figures, time.perf_counter() - start, size)
        print(json.dumps(figures, indent=1), flush=True)


def write_record(name: str, figures: Any, seconds: float, size: str = "") -> None:
    """Figures with what produced them; a part that takes long writes what it has, too, before it ends."""
    record = {
        "command": f"python -m benchmarks.bench {name}{f'={size}' if size else ''}",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "seconds": round(seconds, 1),
        "environment": describe_environment(Machine(), default_workers()),
        "figures": figures,
    }
    RECORDS.mkdir(exist_ok=True)
    write_json(RECORDS / f"{name}.json", record)


def kept_figures(name: str) -> dict[str, Any]:
    """What an interrupted run of a part has written; delete the record to begin anew."""
    path = RECORDS / f"{name}.json"
    return json.loads(path.read_bytes())["figures"] if path.exists() else {}


if __name__ == "__main__":
    main(sys.argv[1:])
