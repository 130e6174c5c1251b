"""The three ways of one round: all in one process, as files that are carried, between programs over Flower."""

from __future__ import annotations

from pathlib import Path

from osfl.core.types import Plan
from osfl.roles import coordinator, site
from osfl.rounds.state import read_json
from osfl.runtime.machine import Machine
from osfl.simulate.run import run_federation
from osfl.simulate.simulation import rehearsal
from osfl.wire.gate import verify_release
from osfl.wire.signing import SigningKey


def by_memory(folder: Path, plan: Plan, data: Path) -> str:
    """The release's digest in a simulation on the sites' images."""
    return str(
        run_federation(rehearsal(plan, data), folder, {"preset": "", "command": ""}, machine=Machine(1))["release_digest"]
    )


def by_files(folder: Path, plan: Plan, data: Path) -> str:
    """The same round without any network; keys are others, digests are not."""
    keys = {name: SigningKey.generate() for name in (*plan.clients, "server")}
    public = {client: keys[client].public_hex for client in plan.clients}
    coordinator.open_new(folder, plan, public, keys["server"].public_hex)
    for client in plan.clients:
        path = site.make_upload(plan, client, data / f"{client}.npz", keys[client], folder / "work", machine=Machine(1))
        coordinator.receive(folder, path)
    return coordinator.make_release(folder, keys["server"], machine=Machine(1))


def released(folder: Path, plan: Plan) -> str:
    """The digest of the release in a round folder, verified; "" if there is none."""
    path = folder / "release.safetensors"
    return verify_release(path, read_json(folder / "enrolled.json")["server"], plan.digest).digest if path.exists() else ""
