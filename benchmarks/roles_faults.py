"""What the roles of a real round withstand: kills, full disks, disorder, large bundles, many sites at once.

    python -m benchmarks.roles_faults          # some minutes
    python -m benchmarks.roles_faults --quick

Every role runs as its verb (`osfl.cli.main.answer`), in a child that is forked from a process which has imported everything
but computed nothing. Points are numbered: the n-th call of the operating system that touches files (tests/faults/traps.py).
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch._dynamo  # noqa: F401  torch.optim imports it anyway; once here instead of in every child
from PIL import Image

import osfl.roles.site  # noqa: F401  imported before forking
from benchmarks.run_faults import in_child
from osfl.cli.main import answer
from osfl.core.errors import Rejected
from osfl.core.plan import write_plan
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.tensors import RawTensor
from osfl.core.types import Field, Plan, Task
from osfl.roles import coordinator
from osfl.rounds.folder import agree, simulated_key
from osfl.wire.bundle import pack
from osfl.wire.signing import save_public
from tests.faults.traps import Spring, kill, no_room, tear, trapped

CLIENTS = ("north", "south", "west")
BUNDLES = ".safetensors"


# --- a small world, and the roles in it --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Role:
    """A command, what must be there before it, and the files that it ends with."""

    arguments: str
    before: str  # the state of the world that it starts from
    results: tuple[str, ...]


ROLES = {
    "client": Role(
        "client plan.toml --client north --data sites/north --key keys/north.key --out usb/north.safetensors",
        "enrolled",
        ("usb/north.safetensors",),
    ),
    "receive": Role("receive round usb", "sent", tuple(f"round/inbox/{client}.safetensors" for client in CLIENTS)),
    "server": Role("server round --key keys/server.key", "received", ("round/release.safetensors",)),
    "personalize": Role(
        "personalize plan.toml --client north --release round/release.safetensors --server keys/server.pub --out model",
        "served",
        ("model/model.safetensors", "model/plan.json"),
    ),
}


def small_plan(clients: Sequence[str] = CLIENTS) -> Plan:
    settings = resolve_settings(load("fedavg"), "smoke")
    return Plan(Task("cells", ("dark", "light"), (1, 8, 8)), "fedavg", settings, tuple(sorted(clients)))


def world(folder: Path) -> dict[str, Path]:
    """The states of a round, each a folder: what is there when a role begins."""
    first = folder / "enrolled"
    (first / "usb").mkdir(parents=True)
    (first / "plan.toml").write_text(write_plan(small_plan()))
    (first / "keys").mkdir()
    for name in (*CLIENTS, "server"):
        key = simulated_key(0, name)
        key.save(first / "keys" / f"{name}.key")
        save_public(first / "keys" / f"{name}.pub", key.public_hex)
    for number, client in enumerate(CLIENTS):
        _images(first / "sites" / client, number)
    run_command("enroll plan.toml --keys keys --out round", first)
    states = {"enrolled": first}
    for before, after, commands in (
        ("enrolled", "sent", [ROLES["client"].arguments.replace("north", client) for client in CLIENTS]),
        ("sent", "received", [ROLES["receive"].arguments]),
        ("received", "served", [ROLES["server"].arguments]),
        ("served", "ended", [ROLES["personalize"].arguments]),
    ):
        states[after] = folder / after
        shutil.copytree(states[before], states[after])
        for arguments in commands:
            run_command(arguments, states[after])
    return states


def _images(folder: Path, number: int) -> None:
    rng = np.random.default_rng(number)
    for label, name in enumerate(("dark", "light")):
        (folder / name).mkdir(parents=True)
        for index in range(8):
            pixels = np.clip(rng.normal(80 + 90 * label, 30, (8, 8)), 0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


def run_command(arguments: str, folder: Path) -> None:
    code = in_child(lambda: command(arguments, folder))
    assert code == 0, f"osfl {arguments}: {code}\n{(folder / 'output.txt').read_text()}"


def command(arguments: str, folder: Path, at: int = 0, spring: Spring = kill, stays: bool = False) -> None:
    """In a child: the verb, with a trap in the operating system; what it prints goes to output.txt, its calls to calls.txt."""
    os.chdir(folder)
    output = os.open("output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
    for stream in (1, 2):
        os.dup2(output, stream)
    with trapped(at, spring, stays) as trap:
        code = answer(arguments.split())
    Path("calls.txt").write_text(str(trap.count))
    sys.stdout.flush()
    os._exit(code)


# --- kill -9 and full disks --------------------------------------------------------------------------------------------


def killed(states: dict[str, Path], root: Path, points: int) -> dict[str, Any]:
    """Each role killed at numbered points, before a call or in the middle of it, then run again with the same command."""
    return {name: _killed_role(role, states, root, points) for name, role in ROLES.items()}


def _killed_role(role: Role, states: dict[str, Path], root: Path, points: int) -> dict[str, int]:
    expected, calls = _undisturbed(role, states, root)
    total = Counter(calls=calls)
    for number, step in enumerate(_spread(calls, points)):
        place = _fresh(states[role.before], root)
        spring = (kill, tear)[number % 2]
        code = in_child(lambda at=step, spring=spring, place=place: command(role.arguments, place, at, spring))  # type: ignore[misc]
        total.update(points=1, not_killed=int(code != -signal.SIGKILL), **_judge(role, place, expected))
    return dict(total)


def full_disk(states: dict[str, Path], root: Path, points: int) -> dict[str, Any]:
    """From a numbered call on, nothing that needs room succeeds; then there is room again."""
    return {name: _full_role(role, states, root, points) for name, role in ROLES.items()}


def _full_role(role: Role, states: dict[str, Path], root: Path, points: int) -> dict[str, int]:
    expected, calls = _undisturbed(role, states, root)
    total: Counter[str] = Counter()
    for step in _spread(calls, points):
        place = _fresh(states[role.before], root)
        code = in_child(lambda at=step, place=place: command(role.arguments, place, at, no_room, stays=True))  # type: ignore[misc]
        output = (place / "output.txt").read_text() if (place / "output.txt").exists() else ""
        explained = code == 0 or (code == 1 and "Traceback" not in output and bool(output.strip()))
        total.update(points=1, failed=int(code != 0), unexplained=int(not explained), **_judge(role, place, expected))
    return dict(total)


def _undisturbed(role: Role, states: dict[str, Path], root: Path) -> tuple[dict[str, bytes], int]:
    place = _fresh(states[role.before], root)
    run_command(role.arguments, place)
    return _contents(role, place), int((place / "calls.txt").read_text())


def _fresh(state: Path, root: Path) -> Path:
    place = root / "place"
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(state, place)
    return place


def _contents(role: Role, place: Path) -> dict[str, bytes]:
    return {name: (place / name).read_bytes() for name in role.results if (place / name).exists()}


def _judge(role: Role, place: Path, expected: dict[str, bytes]) -> dict[str, int]:
    """Files are absent or right, what was acknowledged is there, and the same command completes the work."""
    before = _contents(role, place)
    torn = sum(before[name] != expected[name] for name in before)
    acked = _acknowledged(place)
    lost = sum(f"round/inbox/{client}{BUNDLES}" not in before for client in acked) if role is ROLES["receive"] else 0
    kept = {path: path.read_bytes() for path in (place / "round" / "inbox").glob(f"*{BUNDLES}")}
    resumed = in_child(lambda: command(role.arguments, place)) == 0
    after = _contents(role, place)
    lost += sum(not path.exists() or path.read_bytes() != data for path, data in kept.items())
    return {"torn": torn, "lost": lost, "not_resumed": int(not resumed), "other_result": int(after != expected)}


def _acknowledged(place: Path) -> list[str]:
    """Clients whose line was printed before the end."""
    output = (place / "output.txt").read_text(errors="replace") if (place / "output.txt").exists() else ""
    return [line.split()[1] for line in output.splitlines() if line.startswith("accepted ") and len(line.split()) > 1]


def _spread(calls: int, points: int) -> list[int]:
    return sorted({1 + index * (calls - 1) // max(1, points - 1) for index in range(points)})


# --- disorder ----------------------------------------------------------------------------------------------------------


def disorder(states: dict[str, Path], root: Path, times: int) -> dict[str, int]:
    """Deliveries doubled, shuffled, cut off and mixed with other people's; the release must always be the same one."""
    expected, _ = _undisturbed(ROLES["server"], states, root)
    total: Counter[str] = Counter()
    for seed in range(times):
        place, rng = _fresh(states["sent"], root), random.Random(seed)
        bundles = [(place / "usb" / f"{client}{BUNDLES}").read_bytes() for client in CLIENTS]
        deliveries = [data for data in bundles for _ in range(rng.randint(1, 3))]
        deliveries += [data[: rng.randrange(len(data))] for data in bundles]
        rng.shuffle(deliveries)
        refused = 0
        for data in deliveries:
            try:
                coordinator.receive(place / "round", data)
            except Rejected:
                refused += 1
        run_command(ROLES["server"].arguments, place)
        same = _contents(ROLES["server"], place) == expected
        total.update(sequences=1, deliveries=len(deliveries), cut_off=len(bundles), refused=refused)
        total.update(other_release=int(not same))
    return dict(total)


# --- large bundles, many sites -----------------------------------------------------------------------------------------


def open_wide(folder: Path, clients: Sequence[str], elements: int) -> Plan:
    """A round whose uploads hold one tensor of this size."""
    plan = small_plan(clients)
    enrolled = {client: simulated_key(0, client).public_hex for client in plan.clients}
    agree(folder, plan, {"": {"w": Field("F32", (elements,))}}, enrolled, simulated_key(0, "server").public_hex)
    return plan


def wide_bundle(plan: Plan, client: str, body: bytes) -> bytes:
    return pack("upload", client, plan.digest, {"w": RawTensor("F32", (len(body) // 4,), body)}, {}, simulated_key(0, client))


def large(root: Path, bundles: int, size: int) -> dict[str, Any]:
    """One `osfl receive` of many large bundles: how much its memory grows, as a multiple of the largest."""
    clients = [f"site-{number:03}" for number in range(bundles)]
    plan = open_wide(root / "round", clients, size // 4)
    body = np.arange(size // 4, dtype=np.float32).tobytes()
    (root / "usb").mkdir()
    for client in clients:
        (root / "usb" / f"{client}{BUNDLES}").write_bytes(wide_bundle(plan, client, body))
    largest = max(path.stat().st_size for path in (root / "usb").iterdir())
    code = f"import benchmarks.roles_faults as r; r.receive_measured({str(root)!r})"
    start = time.perf_counter()
    status = os.spawnv(os.P_WAIT, sys.executable, [sys.executable, "-c", code])
    seconds = time.perf_counter() - start
    grown = json.loads((root / "memory.json").read_text())["grown"]
    kept = len(coordinator.status(root / "round").delivered)
    shutil.rmtree(root)
    return {
        "bundles": bundles,
        "largest_bytes": largest,
        "exit_code": status,
        "kept": kept,
        "memory_over_largest": round(grown / largest, 3),
        "receive_seconds": round(seconds, 1),
    }


def receive_measured(folder: str) -> None:
    """In a process of its own: everything is imported and the coordinator was used once before memory is counted."""
    root = Path(folder)
    sys.stdout = sys.stderr = Path(os.devnull).open("w")  # noqa: SIM115
    answer(["receive", str(root / "round"), str(root / "memory.json")])
    with suppress(OSError):  # what importing took is not what receiving takes
        Path("/proc/self/clear_refs").write_text("5")
    before = _peak()
    code = answer(["receive", str(root / "round"), str(root / "usb")])
    (root / "memory.json").write_text(json.dumps({"grown": _peak() - before}))
    os._exit(code)


def _peak() -> int:
    """The largest resident size so far, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def many(root: Path, sites: int) -> dict[str, Any]:
    """So many processes deliver at the same moment, each twice; everybody's upload is there once."""
    clients = [f"site-{number:03}" for number in range(sites)]
    plan = open_wide(root / "round", clients, 1000)
    bodies = {client: np.full(1000, number, np.float32).tobytes() for number, client in enumerate(clients)}
    data = {client: wide_bundle(plan, client, bodies[client]) for client in clients}
    start, children = time.time() + 1.0, {}
    for client in clients:
        child = os.fork()
        if child == 0:
            time.sleep(max(0.0, start - time.time()))
            with suppress(BaseException):
                first, again = (coordinator.receive(root / "round", data[client]) for _ in range(2))
                os._exit(int(first != again))
            os._exit(1)
        children[child] = client
    codes = {client: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child, client in children.items()}
    found = coordinator.status(root / "round")
    wrong = sum((root / "round" / "inbox" / f"{client}{BUNDLES}").read_bytes() != data[client] for client in found.delivered)
    leftovers = [path for path in (root / "round" / "inbox").iterdir() if path.suffix == ".tmp"]
    return {
        "sites": sites,
        "not_acknowledged": sum(map(bool, codes.values())),
        "delivered": len(found.delivered),
        "wrong": wrong,
        "leftovers": len(leftovers),
    }


# --- all of it ---------------------------------------------------------------------------------------------------------


def run(full: bool = True) -> dict[str, Any]:
    """Every figure by name; `full=False` is what the tests run."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        states = world(root / "world")
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "kills": lambda: killed(states, root, 40 if full else 6),
            "full_disk": lambda: full_disk(states, root, 20 if full else 3),
            "disorder": lambda: disorder(states, root, 20 if full else 3),
            "large": lambda: large(root / "large", 50 if full else 3, 100_000_000 if full else 40_000_000),
            "many_sites": lambda: many(root / "many", 100),
        }
        figures = {}
        for part, work in parts.items():
            start = time.perf_counter()
            figures[part] = {**work(), "seconds": round(time.perf_counter() - start, 1)}
        return figures


if __name__ == "__main__":
    print(json.dumps(run(full="--quick" not in sys.argv[1:]), indent=1))
