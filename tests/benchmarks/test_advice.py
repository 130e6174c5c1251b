"""What `osfl advise` knows is what the records say, and its advice is judged on cells that it has not seen."""

from __future__ import annotations

import json

from benchmarks.advice import judge, table
from osfl.evaluation.advice.known import FILE, known_cells


def test_the_package_knows_exactly_what_the_records_say() -> None:
    """After a change of the records: `python -m benchmarks.results`."""
    assert json.loads(FILE.read_text(encoding="utf-8")) == table()


def test_the_first_of_the_list_is_near_the_best_of_a_cell_that_was_left_out() -> None:
    """The aim, in both."""
    found = judge(known_cells(), personal=False)
    assert found["cells"] >= 60 and found["within"] >= 0.8 * found["cells"]
    own = judge(known_cells(), personal=True)
    assert own["cells"] >= 30 and own["within"] >= 0.8 * own["cells"]
