"""Every role killed, every disk full, deliveries in disorder, large and many: a small version of benchmarks/roles_faults.py."""

from __future__ import annotations

import json
import subprocess
import sys


def test_nothing_that_was_acknowledged_is_lost() -> None:
    """In a process of its own: forking is only safe before this one has computed anything."""
    done = subprocess.run([sys.executable, "-m", "benchmarks.roles_faults", "--quick"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    for role in ("client", "receive", "server", "personalize"):
        kills, full = found["kills"][role], found["full_disk"][role]
        assert kills["points"] == 6 and full["points"] == 3 and full["failed"] > 0
        wrong = {key: kills[key] + full.get(key, 0) for key in ("not_killed", "torn", "lost", "not_resumed", "other_result")}
        assert not any(wrong.values()) and full["unexplained"] == 0, (role, wrong)
    disorder, large, many = found["disorder"], found["large"], found["many_sites"]
    assert disorder["refused"] == disorder["cut_off"] and disorder["other_release"] == 0
    assert large["kept"] == large["bundles"] and large["memory_over_largest"] <= 1.5 and large["exit_code"] == 0
    assert (many["delivered"], many["not_acknowledged"], many["wrong"], many["leftovers"]) == (100, 0, 0, 0)
