"""The machines of a deployed round as processes on this one: real SuperLink, SuperNodes and runs, over TLS on loopback."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import Plan, Task
from osfl.deploy.flower.deployment import deploy
from tests.faults.progress import PATIENCE, signs, wait_until

CLIENTS = ("north", "south", "west")
CLASSES = ("bright", "dark")
SETTINGS = {"poll": 0.3, "again": 5.0, "chunk": 20 << 10, "wait": 600.0, "linger": 600.0}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on; all are held until all are known."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in sockets:
            listener.bind(("127.0.0.1", 0))
        return [listener.getsockname()[1] for listener in sockets]


def make_sites(folder: Path, clients: Sequence[str] = CLIENTS, images: int = 12) -> Path:
    """A small npz a site: two classes told by brightness."""
    import numpy as np

    folder.mkdir(parents=True, exist_ok=True)
    for number, client in enumerate(clients):
        rng = np.random.default_rng(number)
        labels = np.arange(images) % 2
        pixels = np.clip(rng.normal(80 + 90 * labels[:, None, None], 25, (images, 8, 8)), 0, 255).astype(np.uint8)
        np.savez(folder / f"{client}.npz", train_images=pixels, train_labels=labels)
    return folder


def make_plan(method: str, clients: Sequence[str] = CLIENTS, **changed: object) -> Plan:
    settings = replace(resolve_settings(load(method), "smoke"), **changed)
    return Plan(Task("two", CLASSES, (1, 8, 8)), method, settings, tuple(clients), seed=5)


@dataclass
class Machines:
    """Everything that was started here; `stop` ends each process group, whatever state it is in."""

    folder: Path
    data: Path
    port: int
    node_ports: dict[str, int]
    inner: int = 0  # the SuperLink's own port
    again: int = 4  # seconds until scripts start something once more
    heartbeat: int = 15  # Flower's, in seconds; see hasty/
    slow: float = 0.0  # seconds that the programs of tasks take to start; see hasty/
    groups: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def coordinator(self) -> Path:
        return self.folder / "coordinator"

    def home(self, client: str) -> Path:
        """The folder of a site, or the coordinator's."""
        return self.folder / "sites" / client if client else self.coordinator

    def _environment(self, **more: str) -> dict[str, str]:
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "FLWR_HOME": str(self.folder / "flwr")}
        quiet |= {"OSFL_INNER": str(self.inner)} if self.inner else {}
        paths = [str(Path(__file__).parent / "hasty"), *filter(None, [os.environ.get("PYTHONPATH")])]
        quiet |= {"PYTHONPATH": os.pathsep.join(paths), "OSFL_HEARTBEAT": str(self.heartbeat)}
        quiet |= {"OSFL_SLOW_START": str(self.slow)} if self.slow else {}
        return {**os.environ, "PATH": path, "OSFL_AGAIN": str(self.again), **quiet, **more}

    def start(self, name: str, command: Sequence[str | Path], **environment: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                list(map(str, command)),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self._environment(**environment),
                start_new_session=True,
            )
        self.groups.append(process)
        return process

    def link(self) -> subprocess.Popen[bytes]:
        return self.start("link", [self.coordinator / "start.sh"])

    def site(self, client: str, name: str = "", data: Path | None = None) -> subprocess.Popen[bytes]:
        port = {"OSFL_NODE_PORT": str(self.node_ports[name or client])}
        script = self.folder / "sites" / (name or client) / "start.sh"
        return self.start(name or client, [script, data or self.data / f"{client}.npz"], **port)

    def run(self, fl_round: str) -> subprocess.Popen[bytes]:
        return self.start("run", [self.coordinator / "run.sh", fl_round])

    def wait_registered(self) -> None:
        """Until the SuperLink knows all nodes; one that is started earlier is refused, and tries again."""
        nodes, marks = len(list((self.coordinator / "nodes").glob("*.pub"))), self.coordinator / "link"
        self.wait_for("registered nodes", lambda: len(list(marks.glob("registered-*"))) == nodes)

    def log(self, name: str) -> str:
        path = self.folder / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def round(self, name: str) -> Path:
        return self.coordinator / "rounds" / name

    def wait_for(self, what: str, true: Callable[[], bool], patience: float = PATIENCE) -> None:
        wait_until(what, true, self._seen, self._explain, patience)

    def _seen(self) -> frozenset[str]:
        places = ("coordinator/link/registered-*", "coordinator/rounds/**/*", "sites/*/work/**/*", "**/flwr/apps/*/*")
        return signs(self.folder.glob("*.log"), (path for place in places for path in self.folder.glob(place)))

    def _explain(self) -> str:
        logs = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in logs)

    def kill(self, program: str, client: str = "") -> int:
        """kill -9 the processes of this program (of one site, or the coordinator's); how many there were."""
        found = processes(program, self.home(client))
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(found)

    def stop(self, *only: subprocess.Popen[bytes]) -> None:
        """End these process groups, or all of them; returns when nobody of them is left to write a file."""
        for process in only or self.groups:
            until = time.monotonic() + 10
            with contextlib.suppress(ProcessLookupError):
                while time.monotonic() < until:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.poll()
                    time.sleep(0.02)
            process.wait()


def processes(program: str, home: Path) -> list[int]:
    """Processes of ours by what they run (anything, if that is "") and by the FLWR_HOME they were given."""
    wanted, found = f"FLWR_HOME={home / 'flwr'}".encode(), []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                command = (entry / "cmdline").read_bytes().split(b"\0")
                names = {Path(os.fsdecode(word)).name for word in command[:2]}
                if program in {"", *names} and wanted in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
    return found


@contextlib.contextmanager
def machines(
    folder: Path, rounds: Sequence[str | Plan], clients: Sequence[str] = CLIENTS, settings: Mapping[str, float] | None = None
) -> Iterator[tuple[Machines, list[Plan]]]:
    """A deployment of these rounds (a plan, or a method's name), nothing started yet; everything is stopped at the end."""
    port, inner, *ports = free_ports(3 + len(clients))
    plans = [make_plan(fl_round, clients) if isinstance(fl_round, str) else fl_round for fl_round in rounds]
    for plan in plans:
        deploy(plan, folder / "deployed", "127.0.0.1", port, settings={**SETTINGS, **(settings or {})})
    node_ports = dict(zip([*clients, "stranger"], ports, strict=True))
    found = Machines(folder / "deployed", make_sites(folder / "data", clients), port, node_ports, inner)
    try:
        yield found, plans
    finally:
        found.stop()
