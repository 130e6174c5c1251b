"""Who names no method gets OneSum and a line about it; what `compare` and `demo` show first."""

from __future__ import annotations

from pathlib import Path

from osfl.cli.arguments import SENSIBLE
from osfl.cli.demo import METHODS, reading
from osfl.reports.text import percent
from tests.cli.conftest import Osfl

SMALL = "--smoke --samples 150 --clients 3 --partition iid"


def test_a_run_without_a_method_is_onesum_and_says_so(osfl: Osfl) -> None:
    result = osfl(f"run {SMALL}")
    assert result.code == 0 and "No --method: this runs onesum. `osfl advise` ranks others." in result.err
    assert "onesum on digits" in result.out and Path("runs/onesum-digits-iid-seed0/results.json").exists()
    assert "No --method" not in osfl(f"run {SMALL} --method onesum").err  # it is finished: nothing is computed again


def test_a_plan_without_a_method_is_of_onesum(osfl: Osfl) -> None:
    assert osfl("new --smoke --dataset digits").code == 0
    assert 'method = "onesum"' in Path("plan.toml").read_text()


def test_compare_without_methods_has_six_and_begins_with_onesum(osfl: Osfl) -> None:
    rows = osfl(f"compare {SMALL} --format json").json["methods"]
    assert tuple(rows) == SENSIBLE and SENSIBLE[0] == "onesum" and len(SENSIBLE) == 6


def test_the_demo_begins_with_onesum_in_numbers_of_its_table() -> None:
    keys = ("scores.global.accuracy", "scores.clients.own.mean", "costs.messages_per_client")
    rows = {name: {key: {"mean": 0.01 * number} for key in keys} for number, name in enumerate(METHODS, 10)}
    assert METHODS[0] == "onesum" and reading(rows).startswith(f"OneSum reaches [bold]{percent(0.1)}[/]: its sites")
