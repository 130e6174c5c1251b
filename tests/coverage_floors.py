"""The share of lines that the tests run, a room: `python -m tests.coverage_floors .coverage.json` fails below a floor."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

FLOORS = {"wire": 95.0, "rounds": 95.0, "everything": 90.0}  # per cent of lines


def percent_by_room(report: dict[str, Any]) -> dict[str, float]:
    """Per cent of lines run in each package of src/osfl, and in everything, from what `coverage json` writes."""
    run: Counter[str] = Counter()
    lines: Counter[str] = Counter()
    for path, file in report["files"].items():
        inside = path.replace("\\", "/").rpartition("src/osfl/")[2]
        room = inside.split("/")[0] if "/" in inside else "top level"
        for name in (room, "everything"):
            run[name] += file["summary"]["covered_lines"]
            lines[name] += file["summary"]["num_statements"]
    return {name: 100 * run[name] / lines[name] for name in lines if lines[name]}


def below_floor(percent: dict[str, float]) -> list[str]:
    """What is below its floor; a room that was not measured is, too."""
    return [name for name, floor in FLOORS.items() if percent.get(name, 0.0) < floor]


def main(path: str) -> int:
    percent = percent_by_room(json.loads(Path(path).read_text("utf-8")))
    rooms = sorted(percent, key=lambda name: (name == "everything", name))
    print(f"{'lines that tests run':<22}{'%':>6}{'floor':>8}")
    for name in rooms:
        print(f"{name:<22}{percent[name]:>6.1f}{FLOORS.get(name, ''):>8}")
    low = below_floor(percent)
    for name in low:
        print(
            f"{name}: {percent.get(name, 0.0):.1f} % of lines run, expected at least {FLOORS[name]} %. Test what {path} lists."
        )
    return 1 if low else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
