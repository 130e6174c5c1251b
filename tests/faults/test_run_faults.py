"""SIGKILL anywhere in a round, the same command again: nothing acknowledged is lost, nothing finished is repeated."""

import subprocess
import sys


def test_kill_anywhere_and_run_again() -> None:
    """In a process of its own: forking is only safe before this one has computed anything."""
    code = "import json; from benchmarks.run_faults import run; print(json.dumps(run(full=False)['total']))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    total = __import__("json").loads(done.stdout)
    assert total["killed"] >= 20
    assert {total[key] for key in ("not_resumed", "lost", "repeated", "other_digest")} == {0}, total
