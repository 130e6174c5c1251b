"""How to compute, not what: workers, threads, device, precision, memory and engine."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from osfl.core.errors import UsageError
from osfl.core.types import Json

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


@dataclass(frozen=True)
class Machine:
    """How to compute, not what.

    One thread is the default because digests then do not depend on the number of cores, and because small layers gain
    little from more while they lose a lot on a machine that does other work, too. Large networks like `threads=8`.
    """

    workers: int | None = None  # clients at once; default one a core. Any number gives the same bits
    device: str = "cpu"  # or several of a kind, each for some of the clients: "cuda:0,cuda:1", "cuda:all"
    threads: int = 1  # inside each operation of the server phase; other numbers change the last bits
    engine: str = "local"  # "ray": simulated clients on a Ray cluster (osfl.simulate.ray); the same bits
    precision: Precision = "fp32"  # of networks (osfl.runtime.precision); others change more than the last bits
    memory: int = 0  # bytes that training may use (osfl.runtime.memory); 0: what a GPU has free, and all of a CPU's

    def __post_init__(self) -> None:
        for name, value in (("workers", self.workers), ("threads", self.threads)):
            if value is not None and not (type(value) is int and value >= 1):
                raise UsageError(f"{name}: expected a whole number of at least 1, got {value!r}", field=name)

    def bits(self) -> dict[str, Json]:
        """What a result depends on besides the plan, or its last bits do."""
        chosen = {"precision": self.precision} if self.precision != "fp32" else {}
        return {"device": self.device, "threads": self.threads, **chosen, **({"memory": self.memory} if self.memory else {})}

    def options(self) -> str:
        """What a command must repeat to get the same bits, and where its clients ran."""
        usual = {"device": "cpu", "threads": 1, "engine": "local"}
        chosen = {**self.bits(), "engine": self.engine}
        return "".join(f" --{name} {value}" for name, value in chosen.items() if value != usual.get(name))


def parse_memory(text: str) -> int:
    """`20GB`, `512 MiB` or a number of bytes."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", text.lower())
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or not float(found[1]) * unit >= 1:
        raise UsageError(f"{text!r} is no amount of memory", field="memory", fix="For example --memory 20GB.")
    return int(float(found[1]) * unit)


def available_memory() -> int:
    """Bytes that this process may still take: what the system says is available, or else all that is built in."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    with suppress(AttributeError, OSError, ValueError):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return 1 << 62
