"""Random tampering with a finished round folder: how much of it `osfl verify` notices, and whether the rest is harmless.

python -m benchmarks.bench tampering      # two minutes

The round (OneSum, three sites) has refusals, a release, a site that joined late and a site that was forgotten. Each tampering
works on a copy: edits, truncations, swaps, deletions, older copies of a file, of several files and of the folder, and files of
strangers. `osfl verify` gets the folder and a copy of head.json that was kept elsewhere (tests/rounds/tampering.py).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

from tests.rounds.tampering import WAYS, campaign, finished


def run(each: int = 50) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, Path(os.devnull).open("w") as nowhere:
        work = Path(name)
        (work / "copies").mkdir()
        with contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            folder, older, head = finished(work)
            return campaign(folder, older, head, times=each * len(WAYS), seed=2026, work=work / "copies")
