"""`osfl estimate`: the table, and what a script gets."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cli.conftest import Osfl


def test_a_method_that_fails_is_a_row(osfl: Osfl, monkeypatch: pytest.MonkeyPatch) -> None:
    """FALCON's encoder needs larger images than digits; FederatedFactory needs ten of a class."""
    monkeypatch.setattr("osfl.simulate.rehearsal.TARGET", 0.05)
    command = "estimate --samples 400 --clients 2 --partition iid --set images_per_class=20 --method falcon,federated_factory"
    rows: list[dict[str, Any]] = osfl(f"{command} --format json").json
    assert [row["method"] for row in rows] == ["falcon", "federated_factory"]
    assert "images are 8x8" in rows[0]["reason"] and rows[0]["fix"]
    assert rows[1]["upload_bytes_total"] > 100_000
    text = osfl(command)
    assert text.code == 0 and "federated_factory" in text.out and "falcon: Cannot start" in text.out
    assert osfl("estimate --method falcon --samples 400 --clients 2").code == 2  # nothing is left to show
