"""Release digests of all methods at seed 0 and smoke size: written before code is moved, compared afterwards.

python -m benchmarks.digests                   # compare with the record; exit code 1 if one differs
python -m benchmarks.digests fedavg onesum     # the same of these methods
python -m benchmarks.digests --write           # write benchmarks/records/digests.json
python -m benchmarks.digests --write onesum    # write these rows of it again; the others stay

`release` is the digest of the signed release: of its tensors, its facts and the plan. `tensors` is of names and bytes of all
tensors alone, shared and personal, and stays where only a setting was renamed. Last bits depend on what `numerics` lists: on
another machine, or with another torch, nothing is compared. Handwritten digits, 3 sites, Dirichlet 0.5, 120 images of 8 px. All
methods together take 15 seconds of one core.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from osfl.core.registry import names as method_names
from osfl.core.result import write_json
from osfl.rounds.folder import existing_round
from osfl.runtime.environment import numerics
from osfl.runtime.machine import Machine
from osfl.runtime.payloads import to_raw
from osfl.simulate.run import run_federation
from osfl.simulate.simulation import Simulation, prepare

RECORD = Path(__file__).parent / "records" / "digests.json"


def digests_of(name: str) -> dict[str, str]:
    """Of the release of one method's round."""
    federation = prepare(Simulation(name, "digits", 3, "dirichlet:0.5", "smoke", samples=120, image_size=8))
    with tempfile.TemporaryDirectory() as folder:
        run_federation(federation, Path(folder), {"preset": "smoke", "command": ""}, machine=Machine(workers=1))
        with existing_round(Path(folder), federation.plan) as fl_round:
            published = fl_round.release()
            assert published is not None
            release, digest = published
            parts = {"": release.shared, **release.personal}
    tensors = hashlib.sha256()
    for client, payload in sorted(parts.items()):
        for tensor, raw in sorted(to_raw(payload.tensors).items()):
            tensors.update(f"{client}/{tensor} {raw.dtype} {list(raw.shape)}\n".encode())
            tensors.update(raw.data)
    return {"release": digest, "tensors": tensors.hexdigest()}


def write(names: Sequence[str]) -> None:
    """All rows; of some methods their rows alone, where the others can be compared with them."""
    kept: dict[str, Any] = {}
    if set(names) != set(method_names()):
        before = json.loads(RECORD.read_text(encoding="utf-8"))
        _check_comparable(before)
        kept = before["digests"]
    made = {**kept, **{name: digests_of(name) for name in names}}
    record = {
        "command": "python -m benchmarks.digests --write",
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "numerics": numerics(),
        "digests": {name: made[name] for name in method_names() if name in made},
    }
    write_json(RECORD, record)


def _check_comparable(record: dict[str, Any]) -> None:
    different = {key: value for key, value in numerics().items() if record["numerics"].get(key) != value}
    if different:
        raise SystemExit(f"not comparable: the record is of {record['numerics']}, here {different}")


def changed(record: dict[str, Any], names: Sequence[str]) -> list[str]:
    """What differs from the record, one line a method; refused where the last bits need not agree."""
    _check_comparable(record)
    lines = []
    for name in names:
        before, now = record["digests"].get(name), digests_of(name)
        if before is None:
            lines.append(f"{name}: not in the record; write it again with --write")
        elif before["tensors"] != now["tensors"]:
            lines.append(f"{name}: other tensors")
        elif before["release"] != now["release"]:
            lines.append(f"{name}: the same tensors, another plan or other facts")
    return lines


def main(arguments: Sequence[str]) -> None:
    names = [one for one in arguments if not one.startswith("--")] or list(method_names())
    if "--write" in arguments:
        write(names)
        return
    lines = changed(json.loads(RECORD.read_text(encoding="utf-8")), names)
    print("\n".join(lines) or f"all {len(names)} digests are those of the record")
    raise SystemExit(1 if lines else 0)


if __name__ == "__main__":
    main(sys.argv[1:])
