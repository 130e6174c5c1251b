"""Network namespaces as separate hosts: a coordinator and sites that share nothing but a bridge."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from osfl.deploy.flower.deployment import deploy
from osfl.rounds.state import read_policy
from osfl.wire.inbox import Inbox
from tests.faults.machines import CLIENTS, SETTINGS, Machines, make_plan, make_sites

PORT, INNER = 8000, 8001  # the same on every host, as it would be


class NotAllowed(Exception):
    """This machine makes no network namespaces, or connects none."""


@dataclass(frozen=True)
class Hosts:
    """Names of namespaces and their addresses, the coordinator's first."""

    names: tuple[str, ...]
    addresses: tuple[str, ...]

    def inside(self, number: int, *command: str | Path) -> list[str]:
        return ["ip", "netns", "exec", self.names[number], *map(str, command)]


@contextlib.contextmanager
def hosts(count: int) -> Iterator[Hosts]:
    """So many hosts on one bridge; gone afterwards. Raises `NotAllowed` where the kernel or its owner says no."""
    mark = f"o{os.getpid() % 10**6}"  # names of interfaces have at most 15 letters
    found = Hosts(tuple(f"{mark}-{n}" for n in range(count)), tuple(f"10.231.7.{n + 1}" for n in range(count)))
    bridge = f"{mark}-br"
    try:
        try:
            _connect(found, bridge)
        except (OSError, subprocess.CalledProcessError) as no:
            output = no.stderr.decode(errors="replace").strip() if isinstance(no, subprocess.CalledProcessError) else str(no)
            raise NotAllowed(f"this machine allows no network namespaces: {output[:160]}") from None
        yield found
    finally:
        for arguments in (*(["netns", "del", name] for name in found.names), ["link", "del", bridge]):
            with contextlib.suppress(OSError):
                subprocess.run(["ip", *arguments], capture_output=True)


def _connect(found: Hosts, bridge: str) -> None:
    _ip("link", "add", bridge, "type", "bridge")
    _ip("link", "set", bridge, "up")
    for name, address in zip(found.names, found.addresses, strict=True):
        _ip("netns", "add", name)
        _ip("link", "add", f"{name}-b", "type", "veth", "peer", "name", "eth0", "netns", name)
        _ip("link", "set", f"{name}-b", "master", bridge, "up")
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
        for device in ("eth0", "lo"):
            _ip("-n", name, "link", "set", device, "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def round_between_hosts(folder: Path, clients: Sequence[str] = CLIENTS[:2]) -> dict[str, Any]:
    """A whole round: how many delivered and took the release, and what a site's host reaches of the coordinator's."""
    with hosts(1 + len(clients)) as found:
        plan = make_plan("fedavg", clients)
        settings = {**SETTINGS, "chunk": 1 << 20}
        named = deploy(plan, folder / "deployed", found.addresses[0], PORT, settings=settings)
        net = Machines(folder / "deployed", make_sites(folder / "data", clients), PORT, dict.fromkeys(clients, 9094), INNER)
        fl_round = net.round(named.round)
        try:
            net.start("link", found.inside(0, net.coordinator / "start.sh"))
            net.start("run", found.inside(0, net.coordinator / "run.sh"))
            net.wait_registered()
            for number, client in enumerate(clients, 1):
                script = net.folder / "sites" / client / "start.sh"
                net.start(client, found.inside(number, script, net.data / f"{client}.npz"))
            reached = {port: _reaches(found, port) for port in (PORT, INNER)}
            net.wait_for("the release everywhere", (fl_round / "everyone-has-it").exists)
        finally:
            net.stop()
        models = list((net.folder / "sites").glob("*/work/*/*/model.safetensors"))
        delivered = Inbox(fl_round / "inbox", read_policy(fl_round)).delivered()
        return {
            "hosts": 1 + len(clients),
            "delivered": len(delivered),
            "models": len(models),
            "door_reached": reached[PORT],
            "superlink_reached": reached[INNER],
        }


def _reaches(found: Hosts, port: int) -> int:
    """Whether a program on the first site's host gets through to this port of the coordinator's."""
    knock = f"import socket; socket.create_connection(({found.addresses[0]!r}, {port}), 5)"
    return int(subprocess.run(found.inside(1, "python3", "-c", knock), capture_output=True).returncode == 0)
