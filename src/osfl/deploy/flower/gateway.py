"""The gateway in front of a SuperLink: of all that it serves on one port, only what SuperNodes need is let through.

A SuperLink's port also takes runs, which are programs that execute at the sites, and hands out tasks; without Flower's
licensed edition anyone may ask for both. So the SuperLink listens on this machine only, and this program, which knows the
way to the fleet and no other, listens to the world with the same certificate. Requests pass unchanged: SuperNodes sign them.

    python -m osfl.deploy.flower.gateway --host 0.0.0.0 --port 8000 --inner 8001 --tls tls        (coordinator/start.sh does it)
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import os
import re
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any, TypeAlias

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers: TypeAlias = list[tuple[bytes, bytes]]
Answer: TypeAlias = tuple[int, Headers, bytes]
Forward: TypeAlias = Callable[[str, Headers, bytes], Awaitable[Answer]]

OPEN = re.compile(rb"/v1/fleet/[a-z-]{1,64}")  # the raw path, so that no spelling of another way fits
LARGEST = 64 << 20  # Flower sends objects in pieces of 5 MB
OF_THE_CONNECTION = {
    b"host",
    b"connection",
    b"content-length",
    b"transfer-encoding",
    b"keep-alive",
    b"upgrade",
    b"content-encoding",
    b"accept-encoding",
}
_PLAIN: Headers = [(b"content-type", b"text/plain")]


class Gateway:
    """An ASGI application in front of the SuperLink."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            await _answer(send, *await self._let_in(scope, receive))

    async def _let_in(self, scope: Scope, receive: Receive) -> Answer:
        path = scope.get("raw_path", b"")
        if scope["method"] != "POST" or not OPEN.fullmatch(path) or scope.get("query_string"):
            return 403, _PLAIN, b"Only SuperNodes are served here. Runs are started on the coordinator's own machine."
        body = await _read(receive)
        if body is None:
            return 413, _PLAIN, b"Too large."
        try:
            return await self.forward(path.decode(), _passed_on(scope["headers"]), body)
        except OSError:  # the SuperLink is being started again; nodes ask again on their own
            return 503, _PLAIN, b"The SuperLink is away."


async def _read(receive: Receive) -> bytes | None:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if len(body) > LARGEST or message["type"] == "http.disconnect":
            return None
        if not message.get("more_body"):
            return bytes(body)


def _passed_on(headers: Headers) -> Headers:
    return [(name, value) for name, value in headers if name.lower() not in OF_THE_CONNECTION]


async def _answer(send: Send, status: int, headers: Headers, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return


def to_superlink(inner: int, authority: Path) -> Forward:
    """Requests to the SuperLink of this machine, over TLS as well."""
    import httpx

    client = httpx.AsyncClient(verify=ssl.create_default_context(cafile=authority), timeout=60.0, trust_env=False)

    async def forward(path: str, headers: Headers, body: bytes) -> Answer:
        try:
            found = await client.post(f"https://127.0.0.1:{inner}{path}", headers=headers, content=body)
        except httpx.TransportError as error:
            raise ConnectionError(str(error)) from None
        return found.status_code, _passed_on(list(found.headers.raw)), found.content

    return forward


async def _until_parent_ends(server: Any, parent: int) -> None:
    """Stop the gateway when its SuperLink has gone."""
    while os.getppid() == parent and not server.should_exit:
        await asyncio.sleep(0.5)
    server.should_exit = True


async def listen(host: str, port: int, patience: float = 30.0) -> socket.socket:
    """A socket of our own at this port. The gateway of a SuperLink that has just died may need a moment to leave it."""
    until = time.monotonic() + patience
    while True:
        try:
            return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or time.monotonic() > until:
                raise
        await asyncio.sleep(0.2)


async def serve(host: str, port: int, inner: int, tls: Path) -> None:
    import uvicorn

    parent = os.getppid()
    config = uvicorn.Config(
        Gateway(to_superlink(inner, tls / "ca.crt")),
        host=host,
        port=port,
        log_level="warning",
        ssl_certfile=tls / "server.pem",
        ssl_keyfile=str(tls / "server.key"),
    )
    server = uvicorn.Server(config)
    await asyncio.gather(server.serve(sockets=[await listen(host, port)]), _until_parent_ends(server, parent))


def main() -> None:
    parser = argparse.ArgumentParser(description="Lets SuperNodes, and nobody else, through to the SuperLink.")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--inner", type=int, required=True, help="the SuperLink's port on this machine")
    parser.add_argument("--tls", type=Path, required=True, help="folder with ca.crt, server.pem and server.key")
    args = parser.parse_args()
    asyncio.run(serve(args.host, args.port, args.inner, args.tls))


if __name__ == "__main__":
    main()
