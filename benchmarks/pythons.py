"""Other versions of Python: a subset of the tests, and one smoke run of each method.

    python -m benchmarks.pythons ENVIRONMENT/bin/python...      adds each version to benchmarks/records/pythons.json

An environment is made by `.ci/pythons python3.13`, which runs all tests; a record is kept of this subset. `versions`
has, by version, what was installed, and for each part how many tests passed, were skipped and failed, with the names of those
that failed. `methods` are smoke runs on 120 digits at two clients: `finished`, or the error.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from osfl.core.result import write_json

ROOT = Path(__file__).parent.parent
RECORD = Path(__file__).parent / "records" / "pythons.json"
PARTS = {
    "core": ["tests/core"],
    "wire": ["tests/wire"],
    "rounds": ["tests/rounds"],
    "cli": ["tests/cli/test_cli_verbs.py", "tests/cli/test_roles_cli.py", "tests/cli/test_cli_help.py"],
}
SAID = ("osfl", "torch", "numpy", "scipy", "flwr", "cryptography", "typer")
_VERSIONS = f"""
import json, platform
from importlib.metadata import version
print(json.dumps({{"python": platform.python_version()}} | {{name: version(name) for name in {SAID}}}))
"""


def main(pythons: list[str]) -> None:
    if not pythons:
        sys.exit("which Pythons? For example: python -m benchmarks.pythons .pythons/3.13.0/bin/python")
    for python in pythons:
        installed = json.loads(_run([python, "-c", _VERSIONS]).stdout)
        installed["torch"] = _run([python, "-c", "import torch; print(torch.__version__)"]).stdout.strip()
        begun = time.perf_counter()
        parts = {name: _tested(python, files) for name, files in PARTS.items()}
        parts["methods"] = json.loads(_run([python, "-m", "benchmarks.pythons", "--methods"]).stdout.splitlines()[-1])
        _keep(installed, parts, time.perf_counter() - begun)


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def _tested(python: str, files: list[str]) -> dict[str, Any]:
    done = _run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-rf", *files])
    last = done.stdout.strip().splitlines()[-1]
    counts = {what: int(n) for n, what in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    if not counts:
        raise SystemExit(f"{python}: no tests ran:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    return {"files": files, **{"passed": 0, "failed": 0, "skipped": 0, **counts}, "names_of_failed": failed}


def _keep(installed: dict[str, str], parts: dict[str, Any], seconds: float) -> None:
    record: dict[str, Any] = {"command": "python -m benchmarks.pythons", "versions": {}}
    record = json.loads(RECORD.read_text()) if RECORD.exists() else record
    facts = {"date": time.strftime("%Y-%m-%d", time.gmtime()), "seconds": round(seconds), "installed": installed}
    record["versions"][installed["python"]] = {**facts, "parts": parts}
    record["versions"] = dict(sorted(record["versions"].items()))
    write_json(RECORD, record)
    print(json.dumps(record["versions"][installed["python"]], indent=1))


def smoke_runs() -> dict[str, str]:
    """One run of each method, in this interpreter."""
    from osfl.core.errors import OsflError
    from osfl.core.registry import names
    from osfl.simulate.run import run
    from osfl.simulate.simulation import Simulation

    found = {}
    for method in names():
        with tempfile.TemporaryDirectory() as folder:
            try:
                run(Simulation(method, "digits", clients=2, preset="smoke", samples=120), folder)
                found[method] = "finished"
            except (OsflError, ImportError) as error:
                found[method] = f"{type(error).__name__}: {error}".splitlines()[0]
    return found


if __name__ == "__main__":
    if sys.argv[1:] == ["--methods"]:
        print(json.dumps(smoke_runs()))
    else:
        main(sys.argv[1:])
