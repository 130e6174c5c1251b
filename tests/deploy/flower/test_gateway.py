"""The door lets through what SuperNodes need, and nothing that could start a program at a site."""

from __future__ import annotations

import asyncio
import socket
from threading import Timer
from typing import Any

import pytest

from osfl.deploy.flower import gateway
from osfl.deploy.flower.gateway import Gateway

WENT: list[tuple[str, Any, bytes]] = []


async def inner(path: str, headers: Any, body: bytes) -> Any:
    WENT.append((path, headers, body))
    return 200, [(b"x-flwr", b"yes")], b"answer"


def knock(path: bytes, method: str = "POST", body: bytes = b"b", query: bytes = b"", forward: Any = inner) -> tuple[int, bytes]:
    WENT.clear()
    output: list[Any] = []
    headers = [(b"host", b"x"), (b"flwr-signature", b"s"), (b"Connection", b"close")]
    scope = {
        "type": "http",
        "method": method,
        "raw_path": path,
        "path": path.decode("latin1"),
        "query_string": query,
        "headers": headers,
    }

    async def receive() -> Any:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        output.append(message)

    asyncio.run(Gateway(forward)(scope, receive, send))
    return output[0]["status"], output[1]["body"]


@pytest.mark.parametrize("path", [b"/v1/fleet/pull-messages", b"/v1/fleet/activate-node", b"/v1/fleet/push-object"])
def test_nodes_come_in_with_their_signature(path: bytes) -> None:
    assert knock(path) == (200, b"answer")
    (went,) = WENT
    assert went == (path.decode(), [(b"flwr-signature", b"s")], b"b")


@pytest.mark.parametrize(
    "path",
    [
        b"/v1/control/start-run",
        b"/v1/runtime/acquire-task",
        b"/docs",
        b"/openapi.json",
        b"/",
        b"",
        b"/v1/fleet/",
        b"/v1/fleet",
        b"/v1/fleet/../control/start-run",
        b"/v1/fleet/%2e%2e/control/start-run",
        b"/v1/fleet/..%2fcontrol",
        b"/v1/fleet/a/../../control/start-run",
        b"/v1/fleet/pull\r\nx",
        b"/v1/FLEET/pull-messages",
        b"/v1/fleet/pull-messages/",
        b"//v1/control/start-run",
    ],
)
def test_every_other_way_is_closed(path: bytes) -> None:
    assert knock(path)[0] == 403 and not WENT


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "OPTIONS", "CONNECT"])
def test_only_post(method: str) -> None:
    assert knock(b"/v1/fleet/pull-messages", method)[0] == 403 and not WENT


def test_no_query_and_not_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    assert knock(b"/v1/fleet/pull-messages", query=b"a=b")[0] == 403 and not WENT
    monkeypatch.setattr(gateway, "LARGEST", 10)
    assert knock(b"/v1/fleet/pull-messages", body=bytes(11))[0] == 413 and not WENT


def test_a_superlink_that_is_away_is_stated_so() -> None:
    async def away(path: str, headers: Any, body: bytes) -> Any:
        raise ConnectionError

    assert knock(b"/v1/fleet/pull-messages", forward=away)[0] == 503


def test_a_door_waits_until_the_last_one_has_left() -> None:
    with socket.create_server(("127.0.0.1", 0)) as old:
        port = old.getsockname()[1]
        with pytest.raises(OSError):
            asyncio.run(gateway.listen("127.0.0.1", port, patience=0.1))
        Timer(0.5, old.close).start()
        with asyncio.run(gateway.listen("127.0.0.1", port)) as new:
            assert new.getsockname()[1] == port


def test_a_port_that_nobody_may_have_is_not_waited_for() -> None:
    with pytest.raises(OSError):
        asyncio.run(asyncio.wait_for(gateway.listen("203.0.113.1", 8000), 5))
