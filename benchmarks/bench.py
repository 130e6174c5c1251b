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

from osfl.core.result import write_json
from osfl.runtime.environment import describe_environment
from osfl.runtime.machine import Machine
from osfl.runtime.workers import default_workers

RECORDS = Path(__file__).parent / "records"
# each is a module with run() -> dict
PARTS = (
    "run_speed",
    "ensemble_forward",
    "inversion_speed",
    "sparse_inversion_speed",
    "synthesis_speed",
    "factory_speed",
    "token_speed",
    "slimming_speed",
    "wire_faults",
    "run_faults",
    "roles_faults",
    "forgetting",
    "tampering",
    "flower_faults",
    "three_ways",
    "pretrained_clients",
    "lying_counts",
    "onesum_speed",
    "onesum_memory",
    "server_memory",
    "large_data",
    "onesum_crossing",
    "named_mutants",
    "mutation",
)


def main(parts: list[str]) -> None:
    for name in parts or PARTS:
        if name not in PARTS:
            raise SystemExit(f"there is no part {name!r}; parts: {', '.join(PARTS)}")
        start = time.perf_counter()
        print(f"== {name}", flush=True)
        figures = importlib.import_module(f"benchmarks.{name}").run()
        record = {
            "command": f"python -m benchmarks.bench {name}",
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "seconds": round(time.perf_counter() - start, 1),
            "environment": describe_environment(Machine(), default_workers()),
            "figures": figures,
        }
        RECORDS.mkdir(exist_ok=True)
        write_json(RECORDS / f"{name}.json", record)
        print(json.dumps(figures, indent=1), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
