"""What rounds over Flower withstand, in figures: the protocol under every fault, and real processes that are killed.

    python -m benchmarks.flower_faults            # about half an hour on two idle cores
    python -m benchmarks.flower_faults --quick
    python -m benchmarks.flower_faults tls        # one part; --quick makes it short
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import signal
import ssl
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from osfl.certificates import load_authority, make_authority, make_node_key, make_server_certificate, private_pem
from osfl.deployment import deploy
from osfl.protocol import Plan
from osfl.wire.agreed import standing_desk
from osfl.wire.inbox import Inbox
from tests.faults import network
from tests.faults.machines import CLIENTS, SETTINGS, Machines, free_ports, machines, make_plan, make_sites

PROGRAMS = {
    "superlink": "flower-superlink",
    "serverapp": "flwr-serverapp",
    "supernode": "flower-supernode",
    "clientapp": "flwr-clientapp",
}


def run(full: bool = True, only: str = "") -> dict[str, Any]:
    """Every figure by name; `full=False` is a look at the machinery, not evidence."""
    kills = 20 if full else 1
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "steps_killed": lambda: _quietly(lambda: network.really_killed(folder / "steps", every=1 if full else 20)),
            "bad_networks": lambda: _quietly(lambda: network.bad_networks(folder / "bad", 100 if full else 5)),
            "many_sites": lambda: _quietly(lambda: network.many_at_once(folder / "many", 100 if full else 10)),
            "tls": lambda: misuses(folder / "tls"),
            **{f"{role}_killed": lambda role=role: killed(folder / role, role, kills) for role in PROGRAMS},
            "network_cut": lambda: cut(folder / "cut", 6 if full else 1),
            "namespaces": lambda: namespaces(folder / "namespaces"),
        }
        return {part: _timed(part, work) for part, work in parts.items() if only in ("", part)}


# --- kill -9 of Flower's own processes ------------------------------------------------------------------------------------


def killed(folder: Path, role: str, kills: int, seed: int = 0) -> dict[str, int]:
    """Rounds during which this role dies again and again at random moments; scripts start it again, nothing else helps."""
    found: Counter[str] = Counter(kills=0, rounds=0, lost=0, missing=0, made_twice=0, not_finished=0)
    with machines(folder, ["fedavg"]) as (net, plans):
        _everything(net)
        for round, plan in _rounds(net, plans[0]):
            _let_die(net, role, round, kills, random.Random(f"{seed} {role} {round.name}"), found)
            found.update(_judge(net, round, plan))
            if found["kills"] >= kills:
                break
    return dict(found)


def _let_die(net: Machines, role: str, round: Path, kills: int, rng: random.Random, found: Counter[str]) -> None:
    net.run(round.name)
    until = time.monotonic() + 1200
    while not (round / "everyone-has-it").exists() and time.monotonic() < until:
        time.sleep(rng.uniform(1.0, 15.0))
        if found["kills"] < kills and not (round / "everyone-has-it").exists():
            clients = rng.sample(CLIENTS, 1 if role == "clientapp" else 2) if role in ("supernode", "clientapp") else [""]
            died = sum(net.kill(PROGRAMS[role], client) for client in clients)
            found["kills"] += died
            if role == "superlink" and died:
                net.link()
    found["not_finished"] += not (round / "everyone-has-it").exists()


def _everything(net: Machines) -> None:
    net.link()
    for client in CLIENTS:
        net.site(client)


def _rounds(net: Machines, first: Plan) -> Iterator[tuple[Path, Plan]]:
    """New rounds of the same machines, as many as are asked for."""
    for seed in range(1000):
        plan = replace(first, seed=seed)
        named = deploy(plan, net.folder, "127.0.0.1", net.port, settings=SETTINGS)
        yield net.round(named.round), plan


def _judge(net: Machines, round: Path, plan: Plan) -> dict[str, int]:
    """Counted as failures: what a site was told is in the inbox and is not, is missing, or was made twice."""
    standing = {receipt.client: receipt.digest for receipt in Inbox(round / "inbox", standing_desk(round)).uploads()}
    work = {client: net.folder / "sites" / client / "work" / plan.digest[:16] / client for client in CLIENTS}
    told = {c: json.loads((path / "receipt.json").read_text()) for c, path in work.items() if (path / "receipt.json").exists()}
    journals = {c: (path / "journal.jsonl") for c, path in work.items()}
    made = {c: path.read_text().count('"phase": "client"') for c, path in journals.items() if path.exists()}
    return {
        "rounds": 1,
        "lost": sum("digest" in said and standing.get(client) != said["digest"] for client, said in told.items()),
        "missing": len(set(CLIENTS) - standing.keys()),
        "made_twice": sum(count > 1 for count in made.values()),
    }


def cut(folder: Path, cuts: int) -> dict[str, int]:
    """The SuperLink is frozen, as a network that is cut looks from both sides, for 5 to 60 seconds at a time."""
    found: Counter[str] = Counter(cuts=0, rounds=0)
    rng = random.Random(0)
    with machines(folder, ["fedavg"]) as (net, plans):
        link = net.link()
        for client in CLIENTS:
            net.site(client)
        for round, plan in _rounds(net, plans[0]):
            net.run(round.name)
            until = time.monotonic() + 1200
            while not (round / "everyone-has-it").exists() and time.monotonic() < until:
                time.sleep(rng.uniform(2.0, 12.0))
                if found["cuts"] < cuts:
                    os.kill(link.pid, signal.SIGSTOP)
                    time.sleep(rng.choice((5.0, 15.0, 60.0)))
                    os.kill(link.pid, signal.SIGCONT)
                    found["cuts"] += 1
            found["not_finished"] += not (round / "everyone-has-it").exists()
            found.update(_judge(net, round, plan))
            if found["cuts"] >= cuts:
                break
    return dict(found)


# --- TLS and node keys used wrongly ---------------------------------------------------------------------------------------


def misuses(folder: Path) -> dict[str, Any]:
    """Each is tried with Flower's own SuperNode. Refused means: the node never gets an identity at the SuperLink."""
    with machines(folder, ["fedavg"]) as (net, _):
        good = net.port
        expired, selfsigned = free_ports(2)
        _start_link(net, "expired", expired, days=-1)
        _start_link(net, "selfsigned", selfsigned, days=30)
        net.start("link", [net.coordinator / "start.sh"], OSFL_BIND="0.0.0.0")
        net.start("register", [net.coordinator / "run.sh", "none"])  # registers the sites' keys; there is no such round
        net.wait_for("registered keys", lambda: len(list((net.coordinator / "link").glob("registered-*"))) == 3, 240)
        site = net.folder / "sites" / "north"
        stranger = make_authority("a stranger", 30)
        (site / "other-ca.crt").write_bytes(stranger.pem)
        (site / "other.key").write_bytes(make_node_key()[0])
        secure, key = ["--root-certificates", site / "ca.crt"], ["--auth-supernode-private-key", site / "node.key"]
        unknown = ["--auth-supernode-private-key", site / "other.key"]
        tries: dict[str, list[Any]] = {
            "another authority": [f"127.0.0.1:{good}", "--root-certificates", site / "other-ca.crt", *key],
            "expired certificate": [f"127.0.0.1:{expired}", *secure, *key],
            "self-signed server certificate": [f"127.0.0.1:{selfsigned}", *secure, *key],
            "a name that is not in the certificate": [f"127.0.0.2:{good}", *secure, *key],
            "plain HTTP to the TLS port": [f"127.0.0.1:{good}", "--insecure"],
            "no node key": [f"127.0.0.1:{good}", *secure],
            "a node key that nobody registered": [f"127.0.0.1:{good}", *secure, *unknown],
        }
        found = {what: _try_node(net, what, *words) for what, words in tries.items()}
        found |= {f"{way} from outside": _try_way(net, way) for way in ("/v1/control/start-run", "/v1/runtime/acquire-task")}
        control = _try_node(net, "control", f"127.0.0.1:{good}", *secure, *key)
    return {"misuses": len(found), "refused": sum(said != "accepted" for said in found.values()),
            "control": control, "said": found}  # fmt: skip


def _start_link(net: Machines, name: str, port: int, days: int) -> None:
    """A second coordinator whose server certificate is bad: expired, or signed by itself."""
    home = net.folder / name
    shutil.copytree(net.coordinator, home)
    tls = home / "tls"
    if days < 0:
        pem, key = make_server_certificate(load_authority(tls / "ca.crt", tls / "ca.key"), ["127.0.0.1"], days)
    else:
        alone = make_authority("127.0.0.1", days)
        pem, key = alone.pem, private_pem(alone.key)
    (tls / "server.pem").write_bytes(pem)
    (tls / "server.key").write_bytes(key)
    net.start(f"link-{name}", [home / "start.sh"], OSFL_PORT=str(port), OSFL_INNER=str(free_ports(1)[0]))


def _try_node(net: Machines, what: str, address: str, *words: Any) -> str:
    """What the node says last; `accepted` when the SuperLink gave it an identity."""
    name = f"try-{what.replace(' ', '-')}"
    port = free_ports(1)[0]
    soon = ["--max-retries", "2", "--max-wait-time", "20"]
    process = net.start(name, ["flower-supernode", "--superlink", address, "--port", str(port), *soon, *words])
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(60)
    log = net.log(name)
    if "SuperNode ID:" in log:
        return "accepted"
    telling = ("code:", "certificate", "SSL", "Error", "error")
    lines = [line.strip() for line in log.splitlines() if any(word in line for word in telling)]
    return lines[-1][:160] if lines else "no identity"


def _try_way(net: Machines, path: str) -> str:
    """Submitting a run, or taking a task, at the port that is open to the sites."""
    import httpx

    context = ssl.create_default_context(cafile=net.coordinator / "tls" / "ca.crt")
    said = httpx.post(f"https://127.0.0.1:{net.port}{path}", verify=context, content=b"")
    return f"HTTP {said.status_code}" if said.status_code == 403 else "accepted"


# --- separate hosts ----------------------------------------------------------------------------------------------------------


def namespaces(folder: Path) -> dict[str, Any]:
    """A coordinator and two sites in network namespaces of their own, which share nothing but a bridge."""
    names, addresses = ["osfl-c", "osfl-n", "osfl-s"], ["10.231.7.1", "10.231.7.2", "10.231.7.3"]
    try:
        _bridge(names, addresses)
    except (OSError, subprocess.CalledProcessError) as error:
        _unbridge(names)
        return {"skipped": f"this machine allows no network namespaces: {error}"[:200]}
    clients = CLIENTS[:2]
    plan = make_plan("fedavg", clients)
    try:
        named = deploy(plan, folder / "deployed", addresses[0], 8000, settings=SETTINGS)
        net = Machines(folder / "deployed", make_sites(folder / "data", clients), 8000, dict.fromkeys(clients, 9094))
        try:
            net.start("link", _inside(names[0], net.coordinator / "start.sh"))
            for name, client in zip(names[1:], clients, strict=True):
                net.start(client, _inside(name, net.folder / "sites" / client / "start.sh", net.data / f"{client}.npz"))
            net.start("run", _inside(names[0], net.coordinator / "run.sh"))
            net.wait_for("the release everywhere", (net.round(named.round) / "everyone-has-it").exists, 600)
        finally:
            net.stop()
        round = net.round(named.round)
        return {"hosts": 3, "finished": 1, "delivered": len(Inbox(round / "inbox", standing_desk(round)).uploads())}
    finally:
        _unbridge(names)


def _inside(name: str, *command: Path) -> list[str]:
    return ["ip", "netns", "exec", name, *map(str, command)]


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _bridge(names: list[str], addresses: list[str]) -> None:
    _ip("link", "add", "osfl-br", "type", "bridge")
    _ip("link", "set", "osfl-br", "up")
    for name, address in zip(names, addresses, strict=True):
        _ip("netns", "add", name)
        _ip("link", "add", f"{name}-b", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", f"{name}-b", "master", "osfl-br", "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", name, "link", "set", device, "up")


def _unbridge(names: list[str]) -> None:
    for words in (*(["netns", "del", name] for name in names), ["link", "del", "osfl-br"]):
        with contextlib.suppress(OSError):
            subprocess.run(["ip", *words], capture_output=True)


def _quietly(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    with contextlib.redirect_stdout(io.StringIO()):  # sites talk to their own logs
        return work()


def _timed(part: str, work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    start = time.perf_counter()
    found = {**work(), "seconds": round(time.perf_counter() - start, 1)}
    print(part, json.dumps(found), flush=True)
    return found


if __name__ == "__main__":
    chosen = [word for word in sys.argv[1:] if not word.startswith("--")]
    print(json.dumps(run("--quick" not in sys.argv[1:], *chosen), indent=1))
