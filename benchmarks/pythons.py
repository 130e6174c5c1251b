"""Other versions of Python: a subset of the tests, and one smoke run of each method.

    python -m benchmarks.pythons ENVIRONMENT/bin/python [PART...]      adds this version to benchmarks/records/pythons.json

An environment is made by `.ci/pythons python3.13`, which runs all tests; a record is kept of this subset. `versions` has, by
version, what was installed, and for each part how many tests passed, were skipped and failed, with the names of those that
failed. `methods` are smoke runs on 120 digits at two clients: `finished`, or the error.
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
    "wire": [f"tests/wire/test_{name}.py" for name in ("bundle", "gate", "inbox", "masks", "sealing", "signing")],
    "rounds": [f"tests/rounds/test_{name}.py" for name in ("contacts", "egress", "folder", "head", "secure_sum")],
    "cli": [f"tests/cli/test_cli_{name}.py" for name in ("errors", "help", "progress")],
    "methods": [],  # one run each instead of tests
}
SAID = ("osfl", "torch", "numpy", "scipy", "flwr", "cryptography", "typer")
_VERSIONS = f"""
import json, platform
from importlib.metadata import version
print(json.dumps({{"python": platform.python_version()}} | {{name: version(name) for name in {SAID}}}))
"""


def main(python: str, wanted: list[str]) -> None:
    if unknown := set(wanted) - PARTS.keys():
        sys.exit(f"there is no part {', '.join(sorted(unknown))}; parts: {', '.join(PARTS)}")
    installed = json.loads(_run([python, "-c", _VERSIONS]).stdout)
    installed["torch"] = _run([python, "-c", "import torch; print(torch.__version__)"]).stdout.strip()
    for name in wanted or list(PARTS):
        begun = time.perf_counter()
        found = _tested(python, PARTS[name]) if PARTS[name] else _smoke_runs(python)
        _keep(installed, name, {**found, "seconds": round(time.perf_counter() - begun)})


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


def _smoke_runs(python: str) -> dict[str, Any]:
    done = _run([python, "-m", "benchmarks.pythons", "--methods"])
    if done.returncode:
        raise SystemExit(f"{python}: the smoke runs stopped:\n{done.stderr[-2000:]}")
    runs: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return {"finished": sum(text == "finished" for text in runs.values()), "of": len(runs), "runs": runs}


def _keep(installed: dict[str, str], part: str, found: dict[str, Any]) -> None:
    """Written after every part: an interrupted run goes on with those that it names."""
    record: dict[str, Any] = {"command": "python -m benchmarks.pythons PYTHON", "versions": {}}
    record = json.loads(RECORD.read_text()) if RECORD.exists() else record
    one = record["versions"].setdefault(installed["python"], {"parts": {}})
    one |= {"date": time.strftime("%Y-%m-%d", time.gmtime()), "installed": installed}
    one["parts"][part] = found
    record["versions"] = dict(sorted(record["versions"].items()))
    write_json(RECORD, record)
    print(installed["python"], part, json.dumps(found), flush=True)


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
    elif sys.argv[1:]:
        main(sys.argv[1], sys.argv[2:])
    else:
        sys.exit("which Python? For example: python -m benchmarks.pythons .pythons/3.13.0/bin/python")
