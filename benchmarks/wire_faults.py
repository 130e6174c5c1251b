"""What the wire withstands, in figures: the tests of tests/wire and tests/faults at full size.

python -m benchmarks.wire_faults          # about ten minutes
python -m benchmarks.wire_faults --quick
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from osfl.core.errors import Rejected
from osfl.core.tensors import RawTensor
from osfl.core.types import Field
from osfl.wire.bundle import pack
from osfl.wire.gate import AcceptancePolicy, accept
from osfl.wire.inbox import Inbox
from tests.faults.failures import failing_calls, power_cuts
from tests.faults.kills import CONTEXT, at_random, numbered
from tests.faults.races import races
from tests.faults.sequences import sequences
from tests.wire.corpus import CORPUS
from tests.wire.forge import CLIENT, KEY, PLAN, POLICY, upload
from tests.wire.fuzz import campaign


def run(full: bool = True) -> dict[str, Any]:
    """Every figure by name; `full=False` is a look at the machinery, not evidence."""
    share = 1 if full else 10
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "corpus": corpus,
            "bit_flips": lambda: bit_flips(share),
            "fuzz": lambda: campaign(10_000 // share),
            "kill_numbered": lambda: numbered(folder / "numbered", every=share),
            "kill_random": lambda: at_random(folder / "random", 100 // share),
            "failing_calls": lambda: failing_calls(folder / "failing", every=share),
            "power_cuts": lambda: power_cuts(folder / "cuts", 1000 // share),
            "races": lambda: races(folder / "races", 100 // share),
            "sequences": lambda: sequences(folder / "sequences", 1000 // share),
            "large": lambda: large(folder / "large", uploads=10 // share, size=100_000_000 // share),
        }
        return {part: _timed(work) for part, work in parts.items()}


def corpus() -> dict[str, Any]:
    """Named bad files, and how many were refused with the right field."""
    right = sum(_refused_field(maker()) == field for field, maker in CORPUS.values())
    return {"files": len(CORPUS), "right_field": right}


def bit_flips(every: int = 1) -> dict[str, Any]:
    """Every single bit of one bundle."""
    data, accepted = upload(), 0
    bits = range(0, len(data) * 8, every)
    for bit in bits:
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        accepted += _refused_field(changed) is None
    return {"bytes": len(data), "flips": len(bits), "accepted": accepted}


def large(folder: Path, uploads: int, size: int) -> dict[str, Any]:
    """Memory of a coordinator that receives large uploads one after the other, as a multiple of the largest."""
    policy = AcceptancePolicy(PLAN, {CLIENT: KEY.public_hex}, {"": {"w": Field("F32", (size // 4,))}}, classes=2)
    folder.mkdir()
    path = folder / "upload.safetensors"
    path.write_bytes(pack("upload", CLIENT, PLAN, {"w": RawTensor("F32", (size // 4,), bytes(size))}, {}, KEY))
    receiver, sender = CONTEXT.Pipe(duplex=False)
    child = CONTEXT.Process(target=_receive_large, args=(sender, path, policy, uploads))
    child.start()
    sender.close()  # else a child that dies would leave us waiting
    grown = receiver.recv()
    child.join()
    return {"uploads": uploads, "bytes": path.stat().st_size, "memory_over_largest": round(grown / size, 2)}


def _receive_large(sender: Any, path: Path, policy: AcceptancePolicy, uploads: int) -> None:
    Inbox(path.parent / "warm", policy)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(uploads):
        inbox = Inbox(path.parent / f"inbox-{number}", policy)
        inbox.receive(path)
        inbox.receive(path)  # a repeated upload reads what stands: still one at a time
        inbox.path(CLIENT).unlink()
    sender.send((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)


def _refused_field(data: bytes | bytearray) -> str | None:
    try:
        accept(data, POLICY)
    except Rejected as no:
        return no.field
    return None


def _timed(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    start = time.perf_counter()
    return {**work(), "seconds": round(time.perf_counter() - start, 1)}


if __name__ == "__main__":
    print(json.dumps(run(full="--quick" not in sys.argv[1:]), indent=2))
