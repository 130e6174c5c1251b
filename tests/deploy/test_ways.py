"""One plan through memory and through files: one digest, whatever a method says."""

from pathlib import Path

import pytest

from tests.faults.machines import make_plan, make_sites
from tests.faults.ways import by_files, by_memory


@pytest.mark.parametrize("method", ["local_only", "ensemble", "fol"])  # says nothing, says one thing to all, or to each another
def test_a_simulation_has_the_digest_of_carried_files(method: str, tmp_path: Path) -> None:
    plan, data = make_plan(method), make_sites(tmp_path / "data")
    assert by_memory(tmp_path / "memory", plan, data) == by_files(tmp_path / "files", plan, data)
