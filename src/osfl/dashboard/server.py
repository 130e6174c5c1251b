"""The dashboard's web server: on this machine only by default, and for a few connections at once."""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

from osfl.core.errors import RoundError
from osfl.dashboard.board import Board
from osfl.dashboard.connection import Places
from osfl.dashboard.controller import Controller
from osfl.dashboard.guard import Guard
from osfl.dashboard.handler import Handler
from osfl.dashboard.intake import sweep
from osfl.dashboard.phase import Phase, try_lock
from osfl.rounds.state import read_policy
from osfl.wire.sealing import sealed_size

MOST_CONNECTIONS = 32


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int, controller: Callable[[int], Controller]) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.places = Places(MOST_CONNECTIONS)
        super().__init__((host, port), Handler)
        self.controller = controller(self.server_address[1])

    def server_bind(self) -> None:
        """Without asking the name service who we are, as the standard library does."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.places.take(request):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.leave(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):  # somebody went away
            super().handle_error(request, client_address)


@contextlib.contextmanager
def opened(
    fl_round: Path,
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    token: str = "",
    key: Path | None = None,
    machine: Sequence[str] = (),
) -> Iterator[Server]:
    """A dashboard that is ready to serve (`serve_forever`), one for each round. Its phase stops with it; the next continues
    it."""
    most = sealed_size(read_policy(fl_round).limits.upload_bytes)  # also fails at once if this is no round
    folder = fl_round / ".dashboard"
    folder.mkdir(mode=0o700, exist_ok=True)
    with try_lock(folder / "dashboard.lock") as free:
        if not free:
            raise RoundError(f"another dashboard is open for {fl_round}", field="round", fix="Use that one, or stop it first.")
        sweep(folder)
        phase = Phase(fl_round, folder, key, machine)
        try:
            server = Server(
                host, port, lambda bound: Controller(fl_round, phase, Board(fl_round), Guard(host, bound, token), most)
            )
        except OSError as error:
            raise RoundError(
                f"the dashboard cannot listen on {host}, port {port}: {error.strerror or error}",
                field="port",
                fix="Leave --port out for a free one; --host must be this machine.",
            ) from None
        with server:
            server.controller.resume()
            try:
                yield server
            finally:
                phase.stop()


def address(server: Server) -> str:
    """Where a browser finds it; with the token behind #, which browsers keep to themselves."""
    guard = server.controller.guard
    host = f"[{guard.host}]" if ":" in guard.host else guard.host
    shown = socket.gethostname() if guard.host in ("0.0.0.0", "::") else host
    return f"http://{shown}:{guard.port}/" + (f"#{guard.token}" if guard.token else "")
