"""The record of honest rounds meets its aim, and the threat model states its figures."""

from __future__ import annotations

from pathlib import Path

from benchmarks import honest_rounds
from benchmarks.bench import kept_figures

AIM = 0.01  # of rounds in which nobody lies
PAGE = Path(__file__).parent.parent.parent / "docs" / "threat-model.md"


def test_the_record_meets_its_aim_and_stands_on_the_page() -> None:
    kept = kept_figures("honest_rounds")
    assert honest_rounds.figures(kept["table"]) == kept and kept["rounds"] == honest_rounds.ROUNDS
    assert kept["share"] <= AIM
    assert (
        f"`benchmarks/records/honest_rounds.json` ({kept['rounds with an alarm']} of {kept['rounds']} rounds)"
        in PAGE.read_text()
    )


def test_a_round_with_any_alarm_counts_once() -> None:
    found = honest_rounds.figures({"one": [["a", "copy", 0.0], ["b", "copy", 0.0]], "two": []})
    assert (found["rounds"], found["rounds with an alarm"], found["share"]) == (2, 1, 0.5)
