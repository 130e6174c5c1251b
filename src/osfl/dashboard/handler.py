"""HTTP handler of the dashboard: a few fixed addresses, each checked by the guard, none of them a path on the disk.

GET  /                              the page           GET  /board   its changing part
GET  /state                         the same as JSON   GET  /dashboard.css, /dashboard.js, /login.js
GET  /inside/<client>, /release     what a bundle contains (the inspect page)
GET  /download/...                  the release and its personal parts
POST /bundles                       one bundle, streamed, through the gate
POST /phase                         start or continue the server phase
POST /login                          the token, once; the browser then keeps a session
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, BinaryIO, cast

from osfl.core.errors import OsflError, Rejected, RoundError
from osfl.core.names import is_client_id
from osfl.core.types import Json
from osfl.dashboard import pages
from osfl.dashboard.connection import HEAD_SECONDS, QUIET_SECONDS, SLOWEST, Places, TimedReads
from osfl.dashboard.controller import Controller
from osfl.dashboard.guard import No
from osfl.dashboard.intake import CutOff, take_in, take_start

MOST_BODY = 1024  # bytes of a request that is not a bundle
LINGER_SECONDS = 2.0
_CLIENT = r"([a-z0-9][a-z0-9._-]{0,63})"
OURS = "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src 'self'"
STILL = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # a page of the reports: it runs nothing
HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "X-Frame-Options": "DENY",
}
NOTHING_FRAMED = "; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    timeout = QUIET_SECONDS

    @property
    def dashboard(self) -> Controller:
        return cast("Any", self.server).controller  # type: ignore[no-any-return]

    @property
    def places(self) -> Places:
        return cast("Any", self.server).places  # type: ignore[no-any-return]

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self._timed = TimedReads(self.connection)
        self.rfile = io.BufferedReader(self._timed)

    def handle_one_request(self) -> None:
        self._timed.allow(HEAD_SECONDS)
        self.places.waits(self.connection)
        super().handle_one_request()

    def parse_request(self) -> bool:
        whole = super().parse_request()  # reads the rest of the head
        self.places.works(self.connection)
        return whole

    def do_GET(self) -> None:
        self._answer("GET", GETS)

    def do_POST(self) -> None:
        self._answer("POST", POSTS)

    def _answer(self, method: str, routes: Sequence[tuple[re.Pattern[str], Callable[..., None]]]) -> None:
        no = self.dashboard.guard.check(method, self.path, cast("Any", self.headers))
        if no is not None:
            self._refuse(no)
            return
        for pattern, act in routes:
            found = pattern.fullmatch(self.path)  # as it came: nothing is decoded, so nothing can climb out of a folder
            if found:
                with self._answering_errors():
                    act(self, *found.groups())
                return
        self._refuse(No(404, "there is nothing here"))

    @contextlib.contextmanager
    def _answering_errors(self) -> Iterator[None]:
        """Refusals and users' mistakes as JSON with a fitting status."""
        try:
            yield
        except (Rejected, CutOff) as no:
            self.close_connection |= isinstance(no, CutOff)
            self._json(422 if isinstance(no, Rejected) else 400, {**no.as_json(), "message": str(no)})
        except OsflError as error:
            self._json(409, {**error.as_json(), "message": str(error)})
        except OSError as error:
            if isinstance(error, ConnectionError | TimeoutError):  # somebody went away
                raise
            why = f"the disk failed: {error.strerror}"
            self._refuse(No(507, f"{why}. Nothing was acknowledged; free some disk space or repair it, then try again"))

    # --- looking ---

    def page(self) -> None:
        text = pages.render(
            "dashboard.html", state=self.dashboard.state(), secret=self.dashboard.guard.secret, most=self.dashboard.most_bytes
        )
        self._html(200, text, OURS)

    def fragment(self) -> None:
        body = pages.render("board.html", state=self.dashboard.state()).encode()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            self._send(304, b"", "text/html; charset=utf-8", {"ETag": tag})
        else:
            self._send(200, body, "text/html; charset=utf-8", {"ETag": tag})

    def state(self) -> None:
        self._json(200, self.dashboard.state())

    def style(self) -> None:
        self._send(200, pages.style().encode(), "text/css; charset=utf-8")

    def script(self, name: str) -> None:
        self._send(200, pages.source(name).encode(), "text/javascript; charset=utf-8")

    def inside(self, client: str) -> None:
        self._look(self.dashboard.round / "inbox" / f"{_client(client)}.safetensors")

    def inside_release(self, client: str | None = None) -> None:
        name = "release.safetensors" if client is None else f"personal/{_client(client)}.safetensors"
        self._look(self.dashboard.round / name)

    def _look(self, path: Path) -> None:
        if path.is_file():
            self._html(200, self.dashboard.look(path), STILL)
        else:
            self._refuse(No(404, "nothing has been delivered under this name"))

    def download(self, name: str, client: str | None = None) -> None:
        if client is not None:
            _client(client)
        if name not in [row["name"] for row in self.dashboard.state().get("downloads", [])]:
            self._refuse(No(404, "there is no such file"))
            return
        with (self.dashboard.round / name).open("rb") as file:
            left = os.fstat(file.fileno()).st_size
            self._head(
                200,
                "application/octet-stream",
                left,
                {"Content-Disposition": f'attachment; filename="{name.rpartition("/")[2]}"'},
            )
            while left and (piece := file.read(min(1 << 20, left))):
                self.wfile.write(piece)
                left -= len(piece)

    # --- doing ---

    def receive(self) -> None:
        length = self._length(self.dashboard.most_bytes)
        if length is None:
            return
        stream, dashboard = cast("BinaryIO", self.rfile), self.dashboard
        try:
            start = take_start(dashboard.round, stream, length)
        except Rejected as no:
            self.close_connection = True  # the rest need not come
            self._json(422, {**no.as_json(), "message": str(no)})
            self._drain()
            return
        receipt = take_in(dashboard.round, dashboard.folder, start, stream, length, dashboard.phase.key)
        self._json(200, {"client": receipt.client, "bytes": receipt.bytes, "digest": receipt.digest})

    def start(self) -> None:
        if self._body() is not None:
            self.dashboard.start_phase()
            self._json(202, {"state": "running"})

    def login(self) -> None:
        self.places.waits(self.connection)  # whoever has no token yet gives way to others until the body is here
        content = self._body()
        if content is None:
            return
        self.places.works(self.connection)
        if not self.dashboard.guard.opens(content.strip()):
            time.sleep(0.5)  # guessing is slow, too
            self._refuse(No(401, "this is not the token"))
            return
        guard = self.dashboard.guard
        kept = f"{guard.cookie_name}={guard.session}; Path=/; HttpOnly; SameSite=Strict"
        self._send(204, b"", "text/plain", {"Set-Cookie": kept})

    def _body(self) -> str | None:
        """A short body as text; None if it was refused."""
        length = self._length(MOST_BODY)
        return None if length is None else self.rfile.read(length).decode("utf-8", "replace")

    def _length(self, most: int) -> int | None:
        """How many bytes will come; refused before any is read if that is unknown or too many."""
        declared = self.headers.get("Content-Length", "")
        if self.headers.get("Transfer-Encoding") or not re.fullmatch(r"[0-9]{1,15}", declared):
            self._refuse(No(411, "the request does not say how long it is"))
        elif int(declared) > most:
            self._refuse(No(413, f"it is too large: expected at most {most} bytes, got {declared}"))
        else:
            self._timed.allow(HEAD_SECONDS + int(declared) / SLOWEST)
            return int(declared)
        return None

    # --- answers ---

    def _refuse(self, no: No) -> None:
        self.close_connection = True  # a body may follow that nobody will read
        if no.login and self.command == "GET" and self.path in ("/", "/login.js", "/dashboard.css"):
            self._door()
            return
        self._json(no.status, {"error": "Refused", "reason": no.reason, "message": f"{no.reason[:1].upper()}{no.reason[1:]}."})
        if self.command == "POST":
            self._drain()

    def _door(self) -> None:
        """Where a token can be given; these three need none."""
        if self.path == "/":
            self._html(401, pages.render("login.html"), OURS)
        elif self.path == "/dashboard.css":
            self.style()
        else:
            self.script("login.js")

    def _drain(self) -> None:
        """Read a little of what nobody wants, so that the sender sees the answer instead of a broken connection."""
        until = time.monotonic() + LINGER_SECONDS
        self.places.waits(self.connection)  # it has its answer, and gives way to others
        with contextlib.suppress(OSError):
            self.connection.settimeout(LINGER_SECONDS)
            self.wfile.flush()
            self.connection.shutdown(socket.SHUT_WR)
            while time.monotonic() < until and self.connection.recv(1 << 16):
                pass

    def _json(self, status: int, value: Json) -> None:
        self._send(status, json.dumps(value).encode(), "application/json")

    def _html(self, status: int, text: str, policy: str) -> None:
        self._send(status, text.encode("utf-8", "replace"), "text/html; charset=utf-8", policy=policy)

    def _send(self, status: int, body: bytes, kind: str, more: dict[str, str] | None = None, policy: str = OURS) -> None:
        self._head(status, kind, len(body), more or {}, policy)
        self.wfile.write(body)

    def _head(self, status: int, kind: str, length: int, more: dict[str, str], policy: str = OURS) -> None:
        self.send_response(status)
        if status not in (204, 304):  # they have no body
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(length))
        for name, value in {**HEADERS, "Content-Security-Policy": policy + NOTHING_FRAMED, **more}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses by itself: broken requests and other verbs."""
        self.close_connection = True
        if not hasattr(self, "headers"):
            self.request_version = self.protocol_version
        self._json(code, {"error": "Refused", "reason": "this request is not understood"})

    def version_string(self) -> str:
        return "osfl"

    def log_message(self, output_format: str, *args: object) -> None:
        """Nothing is logged: addresses may hold what is nobody else's business."""


def _client(name: str) -> str:
    if not is_client_id(name):
        raise RoundError("there is no such client", field="client", fix="Choose one from the list.")
    return name


GETS: list[tuple[re.Pattern[str], Callable[..., None]]] = [
    (re.compile(r"/"), Handler.page),
    (re.compile(r"/board"), Handler.fragment),
    (re.compile(r"/state"), Handler.state),
    (re.compile(r"/dashboard\.css"), Handler.style),
    (re.compile(r"/((?:dashboard|login)\.js)"), Handler.script),
    (re.compile(rf"/inside/{_CLIENT}"), Handler.inside),
    (re.compile(rf"/release(?:/{_CLIENT})?"), Handler.inside_release),
    (re.compile(rf"/download/(release\.safetensors|personal/{_CLIENT}\.safetensors)"), Handler.download),
]
POSTS: list[tuple[re.Pattern[str], Callable[..., None]]] = [
    (re.compile(r"/bundles"), Handler.receive),
    (re.compile(r"/phase"), Handler.start),
    (re.compile(r"/login"), Handler.login),
]
