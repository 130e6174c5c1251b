"""Where OneSum is ten times faster than every inversion or generator method: by the rows, by one run, or not."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.onesum_speed import ten_times_faster
from benchmarks.onesum_times import PAIRS, seconds_of
from osfl.core.types import canonical


def test_a_cell_counts_by_its_rows_or_by_both_methods_in_one_run() -> None:
    rows = {
        name: {"least_times": times, "least_is": "dense"} for name, times in (("a", 10.0), ("b", 9.9), ("c", 3.0), ("d", 3.0))
    }
    pairs = {
        "a": {"beside": "dense", "times": 1.0},
        "b": {"beside": "dense", "times": 12.0},
        "c": {"beside": "dense", "times": 9.0},
        "d": {"beside": "dafl", "times": 20.0},  # no longer the fastest of its cell
    }
    found = ten_times_faster({**rows, "e": {"onesum_seconds": 1.0}}, pairs)
    assert (found["cells"], found["by_rows"], found["in_one_run"]) == (4, 1, {"b": 12.0})
    assert {name: one["in_one_run"] for name, one in found["missed"].items()} == {"c": 9.0, "d": None}


def test_the_phases_of_a_method_count(tmp_path: Path) -> None:
    notes = [
        {"phase": phase, "client": "x", "processor_seconds": 1.0}
        for phase in ("client", "client", "server", "personalize", "evaluate")
    ]
    journal = tmp_path / "journal.jsonl"
    journal.write_bytes(b"\n".join(canonical(note) for note in [*notes, {"phase": "cache", "client": ""}]))
    assert seconds_of(journal) == {"client": 2.0, "server": 1.0, "personalize": 1.0}


def test_the_pairs_of_the_record_are_those_of_the_module() -> None:
    record = Path(__file__).parents[2] / "benchmarks" / "records" / "onesum_times.json"
    figures = json.loads(record.read_text(encoding="utf-8"))["figures"]
    assert {cell: one["beside"] for cell, one in figures.items()}.items() <= PAIRS.items()
