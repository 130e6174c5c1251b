"""A real deployment between hosts of their own, where the machine allows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.hosts import NotAllowed, round_between_hosts

pytest.importorskip("flwr.app", reason="needs osfl[flower]")


def test_a_round_between_network_namespaces(tmp_path: Path) -> None:
    try:
        found = round_between_hosts(tmp_path)
    except NotAllowed as no:
        pytest.skip(str(no))
    assert found == {"hosts": 3, "delivered": 2, "models": 2, "door_reached": 1, "superlink_reached": 0}
