"""Every address of the dashboard, used and abused."""

from __future__ import annotations

import json
import os
import re
import socket
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from osfl.core.errors import RoundError
from osfl.dashboard import intake
from osfl.dashboard.connection import HEAD_SECONDS, TimedReads
from osfl.dashboard.guard import HEADER
from osfl.dashboard.handler import GETS, POSTS
from osfl.dashboard.server import MOST_CONNECTIONS
from osfl.roles import coordinator
from osfl.rounds.state import JUDGMENT
from tests.dashboard.conftest import OpenDashboard, Visitor, World
from tests.roles.test_roles import CLIENTS


def spool(visitor: Visitor) -> list[str]:
    """What lies beside the round that should not stay there."""
    return [path.name for path in visitor.server.controller.folder.glob("incoming-*")]


# --- what it is for ----------------------------------------------------------------------------------------------------


def test_it_shows_who_is_missing_and_loads_nothing_from_elsewhere(open_dashboard: OpenDashboard) -> None:
    dashboard = open_dashboard()
    page = dashboard.get("/").body.decode()
    assert "0 of 3 sites have delivered." in page
    assert [(row["client"], row["state"]) for row in dashboard.state()["clients"]] == [
        (client, "missing") for client in CLIENTS
    ]
    links = re.findall(r'(?:href|src)="([^"]*)"', page)
    assert all(link.startswith(("/", "data:")) for link in links)
    for link in (link for link in links if link.endswith((".css", ".js"))):
        assert dashboard.get(link).status == 200


def test_a_bundle_is_received_and_can_be_looked_into(open_dashboard: OpenDashboard, world: World) -> None:
    dashboard = open_dashboard()
    data = world.bundles["north"].read_bytes()
    answer = dashboard.post("/bundles", data)
    assert answer.status == 200 and answer.json["client"] == "north" and answer.json["bytes"] == len(data)
    assert dashboard.post("/bundles", data).json == answer.json  # the same again, the same receipt
    stored = dashboard.server.controller.round / "inbox" / "north.safetensors"
    assert stored.read_bytes() == data and spool(dashboard) == []
    row = dashboard.state()["clients"][0]
    assert row["state"] == "delivered" and row["bytes"] == len(data)
    inside = dashboard.get("/inside/north")
    text = inside.body.decode()
    assert inside.status == 200 and "What north sends" in text and "is enrolled here" in text
    assert "script-src" not in inside.headers["Content-Security-Policy"]
    assert str(dashboard.server.controller.round) not in text


def test_refusals_are_shown_with_their_reason(open_dashboard: OpenDashboard, world: World) -> None:
    dashboard = open_dashboard()
    answer = dashboard.post("/bundles", world.bundles["foreign"].read_bytes())
    assert answer.status == 422 and answer.json["field"] == "plan" and "another round" in answer.json["message"]
    shown = dashboard.get("/board").body.decode()
    assert "it was made for another round" in shown and dashboard.state()["refused"][0]["client"] == "south"
    assert dashboard.post("/bundles", b"GIF89a" + bytes(200)).status == 422
    assert dashboard.post("/bundles", b"").status == 422
    assert dashboard.state()["refusals"] == 3 and spool(dashboard) == []


def test_suspected_sites_are_shown_with_the_reason_and_what_to_do(open_dashboard: OpenDashboard, world: World) -> None:
    dashboard = open_dashboard()
    assert dashboard.post("/bundles", world.bundles["north"].read_bytes()).status == 200
    assert "Suspected" not in dashboard.get("/board").body.decode()
    folder = dashboard.server.controller.round
    digests = coordinator.status(folder).digests
    found = {"client": "north", "upload": digests["north"], "rule": "contradiction", "text": "calls classes <b>otherwise</b>"}
    (folder / JUDGMENT).write_text(json.dumps({"judged": digests, "suspicions": [{**found, "value": -0.1, "bound": 0.1}]}))
    shown = dashboard.get("/board").body.decode()
    assert "Suspected (1)" in shown and "calls classes &lt;b&gt;otherwise&lt;/b&gt; (contradiction)" in shown
    assert "--exclude SITE" in shown and "--keep SITE" in shown
    (row,) = dashboard.state()["suspicions"]
    assert row["client"] == "north" and row["rule"] == "contradiction"
    (folder / JUDGMENT).write_text(json.dumps({"judged": {}, "suspicions": [{**found, "upload": "another"}]}))
    assert "Suspected" not in dashboard.get("/board").body.decode()  # it is about an upload that is no longer this one


def test_what_strangers_write_stays_text(open_dashboard: OpenDashboard) -> None:
    dashboard = open_dashboard()
    line = b'{"client": "<script>alert(1)</script>", "reason": "<img src=x onerror=alert(1)>", "time": "soon"}\n'
    (dashboard.server.controller.round / "rejected.jsonl").write_bytes(line)
    text = dashboard.get("/board").body.decode()
    assert "<script>" not in text and "<img" not in text and "&lt;script&gt;" in text


def test_the_board_is_sent_again_only_when_it_changed(open_dashboard: OpenDashboard, world: World) -> None:
    dashboard = open_dashboard()
    tag = dashboard.get("/board").headers["ETag"]
    assert dashboard.get("/board", If_None_Match=tag).status == 304
    dashboard.post("/bundles", world.bundles["west"].read_bytes())
    assert dashboard.get("/board", If_None_Match=tag).status == 200


def test_a_damaged_round_is_a_message(open_dashboard: OpenDashboard) -> None:
    dashboard = open_dashboard()
    (dashboard.server.controller.round / "enrolled.json").write_text("{")
    assert "damaged" in dashboard.get("/").body.decode()
    assert dashboard.post("/bundles", b"x" * 100).status == 409
    assert dashboard.post("/phase").status == 409


def test_one_dashboard_a_round(open_dashboard: OpenDashboard, tmp_path: Path) -> None:
    dashboard = open_dashboard()
    with pytest.raises(RoundError, match="another dashboard"):
        open_dashboard(dashboard.server.controller.round)
    with pytest.raises(RoundError, match="missing"):
        open_dashboard(tmp_path)


# --- attacks -----------------------------------------------------------------------------------------------------------

ELSEWHERE = (
    "/inside/../../server.key",
    "/inside/%2e%2e%2fplan",
    "/inside/..",
    "/inside/.lock",
    "/inside/con",
    "/inside/nobody",
    "/download/../plan.json",
    "/download/plan.json",
    "/download/.dashboard/phase.json",
    "/download/personal/..%2fx.safetensors",
    "/download/release.safetensors",
    "/download/personal/north.safetensors",
    "/release",
    "/release/north",
    "/plan.json",
    "//etc/passwd",
    "/dashboard.css/..",
    "/../../etc/passwd",
    "/state?x=1",
    "/inside/north%00",
    "/templates/dashboard.html",
    "/.dashboard/phase.log",
)


@pytest.mark.parametrize("path", ELSEWHERE)
def test_no_address_leads_out_of_what_is_meant(open_dashboard: OpenDashboard, path: str) -> None:
    answer = open_dashboard().get(path)
    assert answer.status in (404, 409)
    assert b"PRIVATE" not in answer.body and b"root:" not in answer.body and b'"clients"' not in answer.body


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "", "localhost.x:{port}"])
def test_other_names_for_this_address_are_refused(open_dashboard: OpenDashboard, host: str) -> None:
    dashboard = open_dashboard()
    answer = dashboard.get("/", Host=host.format(port=dashboard.server.controller.guard.port))
    assert answer.status == 421 and dashboard.server.controller.guard.secret.encode() not in answer.body


@pytest.mark.parametrize("path", ["/bundles", "/phase"])
@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site"},
        {"Sec_Fetch_Site": "same-site"},
        {HEADER: "guessed"},
        {HEADER: ""},
    ],
)
def test_requests_of_other_pages_do_nothing(
    open_dashboard: OpenDashboard, world: World, path: str, headers: dict[str, str]
) -> None:
    dashboard = open_dashboard()
    answer = dashboard.post(path, world.bundles["north"].read_bytes(), **headers)
    assert answer.status == 403
    assert dashboard.state()["delivered"] == 0 and dashboard.state()["phase"]["state"] == "none"


def test_other_pages_may_not_even_ask(open_dashboard: OpenDashboard) -> None:
    dashboard = open_dashboard()
    answer = dashboard.ask("OPTIONS", "/bundles", Origin="http://evil.example", Access_Control_Request_Method="POST")
    assert answer.status == 501 and not any(name.lower().startswith("access-control") for name in answer.headers)
    assert dashboard.get("/state", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors").status == 403
    assert dashboard.get("/", Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="navigate").status == 200  # a link


def test_every_answer_carries_its_guards(open_dashboard: OpenDashboard) -> None:
    dashboard = open_dashboard()
    for answer in (
        dashboard.get("/"),
        dashboard.get("/nothing"),
        dashboard.get("/dashboard.js"),
        dashboard.ask("DELETE", "/"),
        dashboard.post("/phase"),
    ):
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "unsafe-eval" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff" and answer.headers["Cache-Control"] == "no-store"
        assert answer.headers["Server"] == "osfl"


def test_too_large_is_refused_before_it_is_read(open_dashboard: OpenDashboard) -> None:
    dashboard = open_dashboard()
    most = dashboard.server.controller.most_bytes
    with socket.create_connection(("127.0.0.1", dashboard.server.controller.guard.port), timeout=600) as wire:
        wire.sendall(_head(dashboard, "/bundles", f"Content-Length: {most + 1}"))
        assert b" 413 " in wire.recv(4096)
    assert spool(dashboard) == []
    assert dashboard.post("/phase", b"x" * 2000).status == 413


@pytest.mark.parametrize("length", ["", "Content-Length: -1", "Content-Length: 1e9", "Transfer-Encoding: chunked"])
def test_a_body_must_say_how_long_it_is(open_dashboard: OpenDashboard, length: str) -> None:
    dashboard = open_dashboard()
    with socket.create_connection(("127.0.0.1", dashboard.server.controller.guard.port), timeout=600) as wire:
        wire.sendall(_head(dashboard, "/bundles", length))
        assert b" 411 " in wire.recv(4096)


def test_a_transfer_that_breaks_off_leaves_nothing(open_dashboard: OpenDashboard, world: World) -> None:
    dashboard, data = open_dashboard(), world.bundles["north"].read_bytes()
    with socket.create_connection(("127.0.0.1", dashboard.server.controller.guard.port), timeout=600) as wire:
        wire.sendall(_head(dashboard, "/bundles", f"Content-Length: {len(data)}") + data[: len(data) // 2])
        wire.shutdown(socket.SHUT_WR)
        answer = b"".join(iter(lambda: wire.recv(65536), b""))
    assert b" 400 " in answer and b"cut off" in answer
    assert spool(dashboard) == [] and dashboard.state()["delivered"] == 0 and dashboard.state()["refusals"] == 0
    assert dashboard.post("/bundles", data).status == 200


def test_only_a_piece_is_in_memory_while_it_is_streamed(tmp_path: Path, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Stream:
        def read(self, count: int) -> bytes:
            asked.append(count)
            return bytes(count)

    monkeypatch.setattr(intake, "receive", lambda fl_round, path, key: path.stat().st_size)
    size = 5 * intake.CHUNK + 7
    assert intake.take_in(tmp_path, tmp_path, b"start", Stream(), size) == size  # type: ignore[arg-type, comparison-overlap]
    assert max(asked) == intake.CHUNK and sum(asked) == size - len(b"start") and list(tmp_path.iterdir()) == []


def test_a_bundle_is_refused_by_its_header_before_the_rest_has_come(open_dashboard: OpenDashboard, world: World) -> None:
    dashboard, data = open_dashboard(), world.bundles["foreign"].read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    with socket.create_connection(("127.0.0.1", dashboard.server.controller.guard.port), timeout=600) as wire:
        wire.sendall(_head(dashboard, "/bundles", f"Content-Length: {len(data)}") + data[:header])
        assert b" 422 " in wire.recv(4096)
    assert spool(dashboard) == [] and "another round" in dashboard.state()["refused"][0]["reason"]


# --- slow senders ------------------------------------------------------------------------------------------------------


def test_connections_with_half_a_request_do_not_close_the_page(open_dashboard: OpenDashboard) -> None:
    dashboard = open_dashboard(token=TOKEN)
    with ExitStack() as stack:
        for _ in range(MOST_CONNECTIONS + 5):
            wire = stack.enter_context(
                socket.create_connection(("127.0.0.1", dashboard.server.controller.guard.port), timeout=600)
            )
            wire.sendall(b"GET / HTTP/1.1\r\nHost: ")
        assert dashboard.get("/").status == 401


@pytest.mark.parametrize("path", ["/login", "/bundles"])
def test_half_a_body_without_the_token_does_not_close_the_page(open_dashboard: OpenDashboard, path: str) -> None:
    """A token that is never finished, and a bundle that is refused before it is read."""
    dashboard = open_dashboard(token=TOKEN)
    port = dashboard.server.controller.guard.port
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n{HEADER}: x\r\nContent-Length: 1000\r\n\r\nguess"
    with ExitStack() as stack:
        wires = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=600)) for _ in range(MOST_CONNECTIONS)
        ]
        for wire in wires:
            wire.sendall(head.encode())
        until = time.monotonic() + 600
        while len(dashboard.server.places._taken) < MOST_CONNECTIONS:
            assert time.monotonic() < until, "not all of them were let in"
            time.sleep(0.01)
        time.sleep(0.3)  # their heads have been read: each waits for the rest of its body
        started = time.monotonic()
        assert dashboard.get("/").status == 401 and time.monotonic() - started < HEAD_SECONDS  # when they would be closed


def test_bytes_now_and_then_do_not_keep_a_connection_open() -> None:
    here, there = socket.socketpair()
    with here, there:
        reads = TimedReads(here)
        reads.allow(0.2)
        started, seen = time.monotonic(), bytearray(1)
        with pytest.raises(TimeoutError):
            while time.monotonic() < started + 60:
                there.sendall(b"x")  # always something to read
                reads.readinto(seen)
        reads.allow(60)
        there.sendall(b"y")
        assert reads.readinto(seen) == 1


def test_leftovers_of_a_killed_dashboard_are_swept(open_dashboard: OpenDashboard, world: World, tmp_path: Path) -> None:
    fl_round = world.new_round(tmp_path / "swept")
    (fl_round / ".dashboard").mkdir()
    (fl_round / ".dashboard" / "incoming-0123.part").write_bytes(b"half")
    assert spool(open_dashboard(fl_round)) == []


def test_a_full_disk_is_reported_and_nothing_is_acknowledged(
    open_dashboard: OpenDashboard, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    dashboard = open_dashboard()
    real = os.open

    def full(path: object, flags: int, *more: int) -> int:
        if "incoming-" in str(path):
            raise OSError(28, "No space left on device")
        return real(path, flags, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", full)
    answer = dashboard.post("/bundles", world.bundles["north"].read_bytes())
    assert answer.status == 507 and "No space left" in answer.json["reason"]
    assert dashboard.state()["delivered"] == 0


# --- the token ---------------------------------------------------------------------------------------------------------

TOKEN = "correct horse battery"


def test_with_a_token_everything_is_shut_until_it_is_given(open_dashboard: OpenDashboard, world: World) -> None:
    dashboard = open_dashboard(token=TOKEN)
    secret = dashboard.server.controller.guard.secret.encode()
    for path in ("/", "/board", "/state", "/inside/north", "/download/release.safetensors", "/dashboard.js"):
        answer = dashboard.get(path)
        assert answer.status == 401 and secret not in answer.body and b"north" not in answer.body
    assert b"needs its token" in dashboard.get("/").body
    assert dashboard.post("/bundles", world.bundles["north"].read_bytes()).status == 401
    for wrong in (b"", b"correct horse batterx", TOKEN.encode() + b"x", "pässwörd-pässwörd".encode(), b"\xff\xfe"):
        assert dashboard.post("/login", wrong).status == 401
    assert dashboard.post("/login", TOKEN.encode(), Origin="http://evil.example").status == 403
    opened = dashboard.post("/login", TOKEN.encode())
    cookie = opened.headers["Set-Cookie"]
    assert opened.status == 204 and "HttpOnly" in cookie and "SameSite=Strict" in cookie and TOKEN not in cookie
    session = cookie.split(";")[0]
    assert dashboard.get("/state", Cookie=session).status == 200
    assert dashboard.post("/bundles", world.bundles["north"].read_bytes(), Cookie=session).status == 200
    assert dashboard.get("/state", Cookie=session[:-1] + "0x").status == 401
    assert dashboard.get("/state", Cookie=f"{session.split('=')[0]}={TOKEN}").status == 401


def test_nothing_is_logged(open_dashboard: OpenDashboard, capfd: pytest.CaptureFixture[str]) -> None:
    dashboard = open_dashboard(token=TOKEN)
    dashboard.post("/login", TOKEN.encode())
    dashboard.get(f"/?token={TOKEN.replace(' ', '')}")
    output = capfd.readouterr()
    assert output.out == output.err == ""


def test_the_routes_are_the_ones_that_are_tested_here() -> None:
    assert len(GETS) == 8 and len(POSTS) == 3


def _head(dashboard: Visitor, path: str, length: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", f"Host: {dashboard.host}", f"{HEADER}: {dashboard.server.controller.guard.secret}"]
    return "\r\n".join([*lines, *([length] if length else []), "", ""]).encode()
