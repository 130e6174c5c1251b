"""`osfl estimate`: the table, and what a script gets."""

from __future__ import annotations

from typing import Any

import pytest

from osfl.cli.estimate import _show
from osfl.core.method import Phase
from osfl.simulate.estimate import Estimate, PhaseEstimate
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


def test_no_figure_is_cut_in_a_narrow_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """`15.1 MB` lost its B beside nine other columns."""
    monkeypatch.setenv("COLUMNS", "80")
    phases: dict[Phase, PhaseEstimate] = {}
    sizes = {f"client-{i}": 35_500 for i in range(5)}
    _show(["ensemble"], [Estimate("", sizes, sizes, 1, True, phases, 0, 130.0, 178.0, 0, 7230.0, 484_000_000, 15_100_000, [])])
    shown = capsys.readouterr().out
    assert "…" not in shown and all(one in shown.replace("\xa0", " ") for one in ("Clients", "484 MB", "15.1 MB", "35.5 kB"))
