"""A coordinator's memory does not grow with the number of sites: uploads are received, read and summed one at a time."""

from __future__ import annotations

from benchmarks.onesum_memory import in_own_process


def test_a_round_of_many_sites_never_has_their_uploads_in_memory() -> None:
    """The record has a thousand sites; here what 140 of them add to a process is less than three quarters of what they sent."""
    found = in_own_process(140, 20)
    assert found["uploads_mb"] > 50
    assert found["peak_mb"] - found["before_mb"] < found["uploads_mb"] * 3 / 4, found
