"""A round with three finished uploads, trained once; and dashboards to talk to, each in a fresh folder."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from osfl.core.types import Plan
from osfl.dashboard.guard import HEADER
from osfl.dashboard.server import Server, opened
from osfl.roles import coordinator, site
from osfl.wire.signing import SigningKey
from tests.roles.test_roles import CLIENTS, ONE, keys, make_plan, make_sites


@dataclass(frozen=True)
class World:
    plan: Plan
    keys: dict[str, SigningKey]
    key_file: Path  # the server's
    bundles: dict[str, Path]  # by client; "foreign" was made for another round

    def new_round(self, folder: Path) -> Path:
        public = {client: self.keys[client].public_hex for client in CLIENTS}
        coordinator.open_new(folder, self.plan, public, self.keys["server"].public_hex)
        return folder


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    plan, sites, known = make_plan("fedavg"), make_sites(folder / "sites"), keys()
    known["server"].save(folder / "server.key")
    bundles = {c: site.make_upload(plan, c, sites / c, known[c], folder / "work", machine=ONE) for c in CLIENTS}
    other = replace(plan, seed=plan.seed + 1)
    bundles["foreign"] = site.make_upload(other, "south", sites / "south", known["south"], folder / "work", machine=ONE)
    return World(plan, known, folder / "server.key", bundles)


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Visitor:
    """Somebody with a browser; every request on a connection of its own."""

    server: Server

    @property
    def host(self) -> str:
        return f"127.0.0.1:{self.server.controller.guard.port}"

    def ask(self, verb: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.server.controller.guard.port, timeout=600)
        try:
            connection.request(verb, path, body=body, headers={key.replace("_", "-"): value for key, value in headers.items()})
            answer = connection.getresponse()
            return Answer(answer.status, dict(answer.getheaders()), answer.read())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Answer:
        return self.ask("GET", path, None, **headers)

    def post(self, path: str, body: bytes = b"", **headers: str) -> Answer:
        """As the page does it."""
        return self.ask("POST", path, body, **{HEADER: self.server.controller.guard.secret, **headers})

    def state(self) -> Any:
        return self.get("/state").json


OpenDashboard = Callable[..., Visitor]


@pytest.fixture
def open_dashboard(world: World, tmp_path: Path) -> Iterator[OpenDashboard]:
    with ExitStack() as stack:

        def opening(fl_round: Path | None = None, **options: Any) -> Visitor:
            server = stack.enter_context(opened(fl_round or world.new_round(tmp_path / "round"), **options))
            thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
            return Visitor(server)

        yield opening
