"""How to compute, not what: workers, threads, device and engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Machine:
    """How to compute, not what.

    One thread is the default because digests then do not depend on the number of cores, and because small layers gain
    little from more while they lose a lot on a machine that does other work, too. Large networks like `threads=8`.
    """

    workers: int | None = None  # clients at once; default one a core. Any number gives the same bits
    device: str = "cpu"
    threads: int = 1  # inside each operation of the server phase; other numbers change the last bits
    engine: str = "local"  # "ray": simulated clients on a Ray cluster (osfl.simulate.ray); the same bits

    def options(self) -> str:
        """What a command must repeat to get the same bits."""
        device = f" --device {self.device}" if self.device != "cpu" else ""
        return device + (f" --threads {self.threads}" if self.threads != 1 else "")
