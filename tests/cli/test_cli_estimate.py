"""`osfl estimate`: the table, and what a script gets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.conftest import Osfl


def test_a_method_that_fails_is_a_row(osfl: Osfl, monkeypatch: pytest.MonkeyPatch) -> None:
    """FALCON's encoder needs its weights, and larger images than digits; FederatedFactory needs ten of a class."""
    monkeypatch.setattr("osfl.simulate.rehearsal.TARGET", 0.05)
    command = "estimate --samples 400 --clients 2 --partition iid --set images_per_class=20 --method falcon,federated_factory"
    rows: list[dict[str, Any]] = osfl(f"{command} --format json").json
    assert [row["method"] for row in rows] == ["falcon", "federated_factory"]
    assert "efficientnet_lite0" in rows[0]["reason"] and rows[0]["fix"]
    assert rows[1]["upload_bytes_total"] > 100_000
    text = osfl(command)
    assert text.code == 0 and "federated_factory" in text.out and "falcon: " in text.out and "efficientnet_lite0" in text.out
    alone = osfl("estimate --method falcon --samples 400 --clients 2")
    assert alone.code != 0 and "efficientnet_lite0" in alone.err  # nothing is left to show
