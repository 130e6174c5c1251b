"""What rounds over Flower withstand, in figures: the protocol under every fault, and real processes that are killed.

    python -m benchmarks.bench flower_faults      # half an hour or more on two idle cores; started again it goes on
    python -m benchmarks.flower_faults --quick
    python -m benchmarks.flower_faults tls        # one part; --quick makes it short

Real processes share one deployment and one round after the other; Flower's heartbeat is shortened to 10 seconds (its own
minimum, see tests/faults/hasty), because most of the time would go by until a death is noticed.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from osfl.core.result import write_json
from osfl.core.tensors import RawTensor
from osfl.core.types import Field, Plan
from osfl.deploy.flower.app import DONE
from osfl.deploy.flower.deployment import deploy
from osfl.deploy.flower.messages import MessageBody
from osfl.rounds.state import read_policy
from osfl.wire.bundle import pack
from osfl.wire.gate import AcceptancePolicy
from osfl.wire.inbox import Inbox
from osfl.wire.signing import SigningKey
from tests.faults import network
from tests.faults.hosts import NotAllowed, round_between_hosts
from tests.faults.machines import CLIENTS, SETTINGS, Machines, machines, make_plan, processes
from tests.faults.misuse import misuses
from tests.faults.scenario import POLICY
from tests.faults.ways import by_memory, released

PROGRAMS = {
    "superlink": "flower-superlink",
    "serverapp": "flwr-serverapp",
    "supernode": "flower-supernode",
    "clientapp": "flwr-clientapp",
}
HEARTBEAT = 10  # seconds; Flower misses a process after two
MOMENTS = 20  # seconds without progress after which somebody is killed all the same
TTL = 90.0  # seconds after which a question that Flower lost is asked again
FINISHED = Path("runs/flower_faults")  # parts of a whole run that was interrupted
PATIENCE = 600.0  # seconds in which a round that nobody disturbs has to end


def run(full: bool = True, only: str = "") -> dict[str, Any]:
    """Every figure by name; `full=False` is a look at the machinery, not evidence."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "steps_killed": lambda: _quietly(lambda: network.really_killed(folder / "steps", every=1 if full else 20)),
            "disk_full_steps": lambda: _quietly(lambda: network.full_disks(folder / "full", 60 if full else 5)),
            "bad_networks": lambda: _quietly(lambda: network.bad_networks(folder / "bad", 100 if full else 5)),
            "many_sites": lambda: _quietly(lambda: network.many_at_once(folder / "many", 100 if full else 10)),
            "large": lambda: large(folder / "large", 50 if full else 3, 100_000_000),
            "tls": lambda: refused(folder / "tls"),
            "killed": lambda: killed(folder / "killed", 20 if full else 1),
            "network_cut": lambda: cut(folder / "cut", 6 if full else 1),
            "disk_full": lambda: disk_full(folder / "disk"),
            "large_over_flower": lambda: large_over_flower(folder / "wide"),
            "namespaces": lambda: namespaces(folder / "hosts"),
        }
        if not full or only:
            return {part: _timed(part, work) for part, work in parts.items() if only in ("", part)}
        found = {part: _once(part, work) for part, work in parts.items()}
    shutil.rmtree(FINISHED)
    return found


# --- kill -9 of Flower's own processes ------------------------------------------------------------------------------------


def killed(folder: Path, kills: int, seed: int = 0) -> dict[str, int]:
    """Rounds during which every role dies so often, each time at another point; scripts start it again, nothing else helps.
    Something of the coordinator's and something of a site's die together."""
    found: Counter[str] = Counter({f"{role}_killed": 0 for role in PROGRAMS})
    rng = random.Random(seed)
    with machines(folder, ["fedavg"]) as (net, plans):
        _everything(net)
        for fl_round, plan in _rounds(net, plans[0]):
            net.run(fl_round.name)
            for _ in _moments(net, fl_round, plan, rng):
                for roles in (("supernode", "clientapp"), ("superlink", "serverapp")):
                    wanted = sorted(roles, key=lambda role: (found[f"{role}_killed"], rng.random()))
                    died = next((role for role in wanted if found[f"{role}_killed"] < kills and _kill(net, role, rng)), None)
                    found.update([f"{died}_killed"] if died else [])
            found.update(_judge(net, fl_round, plan, folder))
            if min(found[f"{role}_killed"] for role in PROGRAMS) >= kills:
                break
    return dict(found)


def _kill(net: Machines, role: str, rng: random.Random) -> bool:
    """One process of this role, if there is one now."""
    homes = rng.sample(CLIENTS, len(CLIENTS)) if role in ("supernode", "clientapp") else [""]
    if not any(net.kill(PROGRAMS[role], client) for client in homes if processes(PROGRAMS[role], net.home(client))):
        return False
    if role == "superlink":
        net.link()  # as whoever looks after it would
    return True


def _moments(net: Machines, fl_round: Path, plan: Plan, rng: random.Random, most: int = 8) -> Iterator[None]:
    """Random moments of a round, as long as it has not ended: after each, it has to go on before there is another. After the
    last it is left alone, and has to end."""
    until, last, since = time.monotonic() + PATIENCE, frozenset[tuple[str, int]](), time.monotonic()
    while not (fl_round / DONE).exists() and time.monotonic() < until:
        now = _state(net, fl_round, plan)
        if most and (now != last or time.monotonic() > since + MOMENTS):
            time.sleep(rng.uniform(0.0, 3.0))
            if not (fl_round / DONE).exists():
                yield
            last, since, most = _state(net, fl_round, plan), time.monotonic(), most - 1
            until = since + PATIENCE
        time.sleep(0.2)


def _state(net: Machines, fl_round: Path, plan: Plan) -> frozenset[tuple[str, int]]:
    """What is on the disks of all machines: the round has gone on when this is another."""
    places = [fl_round, *(_work(net, client, plan) for client in CLIENTS)]
    found = set()
    for path in (path for place in places for path in place.rglob("*")):
        with contextlib.suppress(OSError):
            found.add((str(path), path.stat().st_size))
    return frozenset(found)


def _work(net: Machines, client: str, plan: Plan) -> Path:
    return net.folder / "sites" / client / "work" / plan.digest[:16] / client


def _everything(net: Machines) -> None:
    """All machines, up and known to each other."""
    net.heartbeat = HEARTBEAT
    net.link()
    net.run("--register")
    net.wait_registered()
    for client in CLIENTS:
        net.site(client)


def _rounds(net: Machines, first: Plan) -> Iterator[tuple[Path, Plan]]:
    """New rounds of the same machines, as many as are asked for."""
    for seed in range(1000):
        plan = replace(first, seed=seed)
        named = deploy(plan, net.folder, "127.0.0.1", net.port, settings={**SETTINGS, "ttl": TTL})
        yield net.round(named.round), plan


def _judge(net: Machines, fl_round: Path, plan: Plan, folder: Path) -> dict[str, int]:
    """Counted as failures: an upload that a site has a receipt for and the inbox lacks; what is missing, made twice, or not
    the release that one process with all images comes to."""
    stored = {receipt.client: receipt.digest for receipt in Inbox(fl_round / "inbox", read_policy(fl_round)).uploads()}
    work = {client: _work(net, client, plan) for client in CLIENTS}
    noted = {c: json.loads((path / "receipt.json").read_text()) for c, path in work.items() if (path / "receipt.json").exists()}
    journals = {c: (path / "journal.jsonl") for c, path in work.items()}
    made = {c: path.read_text().count('"phase": "client"') for c, path in journals.items() if path.exists()}
    return {
        "rounds": 1,
        "acknowledged": sum("digest" in receipt for receipt in noted.values()),
        "not_finished": int(not (fl_round / DONE).exists()),
        "lost": sum("digest" in receipt and stored.get(client) != receipt["digest"] for client, receipt in noted.items()),
        "missing": len(set(CLIENTS) - stored.keys()),
        "made_twice": sum(count > 1 for count in made.values()),
        "other_release": int(released(fl_round, plan) != by_memory(folder / "memory" / plan.digest[:16], plan, net.data)),
    }


def cut(folder: Path, cuts: int) -> dict[str, int]:
    """The door or the SuperLink is frozen, as a network that is cut looks from both sides, for longer than Flower's patience
    or for less."""
    found: Counter[str] = Counter(cuts=0)
    rng = random.Random(0)
    with machines(folder, ["fedavg"]) as (net, plans):
        _everything(net)
        for fl_round, plan in _rounds(net, plans[0]):
            net.run(fl_round.name)
            for _ in _moments(net, fl_round, plan, rng):
                if found["cuts"] < cuts:
                    _freeze(net, ("door", "superlink")[found["cuts"] % 2], (5.0, 12.0, 30.0)[found["cuts"] % 3])
                    found["cuts"] += 1
            found.update(_judge(net, fl_round, plan, folder))
            if found["cuts"] >= cuts:
                break
    return dict(found)


def _freeze(net: Machines, what: str, seconds: float) -> None:
    found = processes(PROGRAMS["superlink"], net.coordinator)
    if what == "door":
        found = [pid for pid in processes("", net.coordinator) if b"osfl.deploy.flower.gateway" in _command(pid)]
    for pid in found:
        os.kill(pid, signal.SIGSTOP)
    time.sleep(seconds)
    for pid in found:
        os.kill(pid, signal.SIGCONT)


def _command(pid: int) -> bytes:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


# --- a disk that is too small -------------------------------------------------------------------------------------------------


def disk_full(folder: Path) -> dict[str, Any]:
    """The round folder is on a disk with room for a part of an upload; after each run that ended there is some more room."""
    found: Counter[str] = Counter(disks_full=0)
    with machines(folder, ["fedavg"]) as (net, plans):
        fl_round, plan = next(_rounds(net, plans[0]))
        pages = 14  # 4 KB each; the agreed files take five, an upload eight
        kept = folder / "agreed"
        shutil.copytree(fl_round, kept)
        no = subprocess.run(
            ["mount", "-t", "tmpfs", "-o", f"size={pages * 4}k", "none", fl_round], capture_output=True, text=True
        )
        if no.returncode:
            return {"skipped": f"this machine mounts nothing: {no.stderr.strip()}"[:160]}
        try:
            shutil.copytree(kept, fl_round, dirs_exist_ok=True)
            _everything(net)
            net.run(fl_round.name)
            ended = _runs_ended(net)
            while not (fl_round / DONE).exists() and found["disks_full"] < 40:
                net.wait_for("the end", lambda ended=ended: _runs_ended(net) > ended or (fl_round / DONE).exists(), 300)  # type: ignore[misc]
                if _runs_ended(net) > ended:
                    ended, pages = _runs_ended(net), pages + 10
                    found["disks_full"] += 1
                    subprocess.run(["mount", "-o", f"remount,size={pages * 4}k", fl_round], check=True)
            found.update(_judge(net, fl_round, plan, folder))
        finally:
            net.stop()
            subprocess.run(["umount", fl_round], check=True)
    return dict(found)


def _runs_ended(net: Machines) -> int:
    return net.log("run").count("the run ended before")


# --- large uploads ------------------------------------------------------------------------------------------------------------


def large(folder: Path, bundles: int, size: int) -> dict[str, Any]:
    """Sealed uploads of this size come in pieces, one site after the other: how much memory the coordinator's program takes,
    as a multiple of the largest. The sites answer in the same process, so theirs is counted too."""
    folder.mkdir(parents=True)
    code = f"import benchmarks.flower_faults as f; f.collect_measured({str(folder)!r}, {bundles}, {size})"
    start = time.perf_counter()
    status = subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL).returncode
    found = json.loads((folder / "memory.json").read_text()) if not status else {}
    shutil.rmtree(folder)
    return {"bundles": bundles, "exit_code": status, **found, "receive_seconds": round(time.perf_counter() - start, 1)}


def collect_measured(name: str, bundles: int, size: int) -> None:
    """In a process of its own: a first small round has imported everything before memory is counted."""
    folder = Path(name)
    _wide(folder / "warm", 1, 1000)()
    collect = _wide(folder / "wide", bundles, size)
    with contextlib.suppress(OSError):  # what importing took is not what receiving takes
        Path("/proc/self/clear_refs").write_text("5")
    before = peak(os.getpid())
    largest, kept = collect()
    figures = {"largest_bytes": largest, "kept": kept, "memory_over_largest": round((peak(os.getpid()) - before) / largest, 3)}
    (folder / "memory.json").write_text(json.dumps(figures))


def _wide(folder: Path, bundles: int, size: int) -> Callable[[], tuple[int, int]]:
    """A round of so many sites that have made their uploads; collecting them gives the bytes of the largest, and how many."""
    names = tuple(f"hospital-{number:03d}" for number in range(bundles))
    scenario = WideScenario(
        folder, names, keys={name: SigningKey.from_seed(name.encode().ljust(32)) for name in names}, server=network.SERVER
    )
    scenario.size = size
    for name in names:
        path = scenario.kept(name)
        path.parent.mkdir(parents=True)
        path.write_bytes(scenario.upload_bytes(name))
    net = scenario.network(network.Clock(), network.Faults())
    present = net.nodes
    # one after the other: a real network holds pieces on disk, this one in memory
    net.nodes = lambda: set(sorted(present())[len(scenario.receipts) :][:1]) or present()  # type: ignore[method-assign]

    def collect() -> tuple[int, int]:
        assert scenario.log(network=net, collector_config=replace(network.QUICK, chunk=16 << 20, window=2))
        sizes = scenario.inbox.delivered()
        return max(sizes.values()), len(sizes)

    return collect


class WideScenario(network.Scenario):
    """Uploads of one tensor of `size` bytes; what a site has sent is deleted there, for the sake of the disk."""

    size: int = 0

    @property
    def policy(self) -> AcceptancePolicy:
        return replace(super().policy, contracts={"": {"w": Field("U8", (self.size,))}})

    def kept(self, client: str) -> Path:
        return self.site(client).folder(POLICY.plan) / "upload.safetensors"

    def upload_bytes(self, client: str) -> bytes:
        tensor = RawTensor("U8", (self.size,), bytes(self.size))
        return pack("upload", client, POLICY.plan, {"w": tensor}, {}, self.keys[client])

    def answer(self, client: str) -> Callable[[str, MessageBody], MessageBody]:
        answers = super().answer(client)

        def answer(kind: str, body: MessageBody) -> MessageBody:
            reply = answers(kind, body)
            if client in self.receipts:
                self.kept(client).write_bytes(b"")
                for sealed in self.kept(client).parent.glob("*.sealed"):
                    sealed.unlink()
            return reply

        return answer


def large_over_flower(folder: Path, width: int = 528) -> dict[str, Any]:
    """One round of a model of 100 MB over real processes: it arrives, and what each program's memory came to (MB)."""
    clients = CLIENTS[:2]
    with machines(folder, ["fedavg"], clients) as (net, _):
        plan = make_plan("fedavg", clients, architecture=f"cnn-w{width}")
        named = deploy(plan, net.folder, "127.0.0.1", net.port, settings={**SETTINGS, "chunk": 16 << 20})
        place = net.round(named.round)
        net.link()
        net.run(named.round)
        net.wait_registered()
        for client in clients:
            net.site(client)
        with watched(net) as peaks:
            start = time.perf_counter()
            net.wait_for("the release everywhere", (place / DONE).exists, 1200)
            seconds = time.perf_counter() - start
        sizes = Inbox(place / "inbox", read_policy(place)).delivered()
        pieces = -(-max(sizes.values()) // (16 << 20))
    return {
        "sites": len(clients),
        "delivered": len(sizes),
        "upload_bytes": max(sizes.values()),
        "pieces": pieces,
        "round_seconds": round(seconds, 1),
        "peak_mb": {name: size >> 20 for name, size in peaks.items()},
    }


@contextlib.contextmanager
def watched(net: Machines) -> Iterator[dict[str, int]]:
    """The largest resident size that any process of each program had."""
    peaks: dict[str, int] = {}
    done = threading.Event()

    def watch() -> None:
        homes = [net.coordinator, *(net.home(path.name) for path in (net.folder / "sites").iterdir())]
        while not done.wait(0.3):
            for name in PROGRAMS.values():
                for pid in (pid for home in homes for pid in processes(name, home)):
                    peaks[name] = max(peaks.get(name, 0), peak(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield peaks
    finally:
        done.set()
        thread.join()


def peak(pid: int) -> int:
    """The largest resident size of a process so far, in bytes."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


# --- TLS, node keys, hosts ----------------------------------------------------------------------------------------------------


def refused(folder: Path) -> dict[str, Any]:
    """Refused means: the node gets no identity at the SuperLink, the request no answer. `none` is the one that must not be."""
    with machines(folder, ["fedavg"]) as (net, _):
        net.link()
        net.run("--register")
        net.wait_registered()
        received = misuses(net)
    control = received.pop("none")
    refusals = sum(reply != "accepted" for reply in received.values())
    return {"misuses": len(received), "refused": refusals, "control": control, "said": received}


def namespaces(folder: Path) -> dict[str, Any]:
    try:
        return round_between_hosts(folder)
    except NotAllowed as no:
        return {"skipped": str(no)}


def _quietly(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()):  # sites talk to their own logs
        return work()


def _once(part: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A part that was finished is not repeated: the whole takes long, and may be interrupted."""
    path = FINISHED / f"{part}.json"
    if not path.exists():
        found = _timed(part, work)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, found)
    return dict(json.loads(path.read_text(encoding="utf-8")))


def _timed(part: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    start = time.perf_counter()
    found = {**work(), "seconds": round(time.perf_counter() - start, 1)}
    print(part, json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    chosen = [word for word in sys.argv[1:] if not word.startswith("--")]
    print(json.dumps(run("--quick" not in sys.argv[1:], *chosen), indent=1))
