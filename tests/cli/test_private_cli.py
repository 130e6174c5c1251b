"""`--epsilon` and `--delta`: a plan that explains itself, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.conftest import Osfl


def test_new_writes_privacy_and_the_settings_that_it_needs(osfl: Osfl) -> None:
    result = osfl("new --method onesum --epsilon 8 --delta 1e-5 --noise share --out plan.toml")
    assert result.code == 0, result.err
    plan = Path("plan.toml").read_text(encoding="utf-8")
    for text in (
        "[privacy]",
        "epsilon = 8.0 ",
        "delta = 1e-05 ",
        'noise = "share" ',
        "dimensions = 256  # at most so many features",
        "every round spends it anew",
    ):
        assert text in plan
    assert osfl("check plan.toml").code == 0


@pytest.mark.parametrize("method", ["onesum", "fedcgs"])
def test_new_writes_a_secure_sum_with_noise_that_some_sites_may_tell(osfl: Osfl, method: str) -> None:
    private = "--secure-sum --epsilon 8 --delta 1e-5 --noise share --colluders 2"
    assert osfl(f"new --method {method} {private} --out plan.toml").code == 0
    plan = Path("plan.toml").read_text(encoding="utf-8")
    for text in ("secure_sum = true ", "share = 1.0 ", "colluders = 2 ", "dimensions = 256 "):
        assert text in plan
    assert osfl("check plan.toml").code == 0


@pytest.mark.parametrize(
    ("command", "text"),
    [
        ("--method onesum --epsilon 8", "differential privacy needs --epsilon and --delta"),
        ("--method onesum --noise share", "differential privacy needs --epsilon and --delta"),
        ("--method onesum --colluders 1", "differential privacy needs --epsilon and --delta"),
        ("--method onesum --epsilon 8 --delta 1e-5 --colluders 1", "privacy.colluders: each site adds all of the noise"),
        ("--method onesum --epsilon 0 --delta 1e-5", "privacy.epsilon: expected a number above 0, got 0.0"),
        ("--method onesum --epsilon 8 --delta 1", "privacy.delta: expected a number above 0 and below 1, got 1.0"),
        ("--method local_only --epsilon 8 --delta 1e-5", "what sites of local_only send is not a sum that noise is added to"),
    ],
)
@pytest.mark.parametrize("verb", ["new --dataset digits --out plan.toml", "run --smoke"])
def test_what_cannot_be_private_is_refused(osfl: Osfl, verb: str, command: str, text: str) -> None:
    result = osfl(f"{verb} {command}")
    assert result.code == 2
    assert text in " ".join(result.err.split())
