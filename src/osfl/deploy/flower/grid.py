"""Send messages through a Flower grid: https://flower.ai, `pip install 'osfl[flower]'`.

    coordinator  SuperLink (always on) and, for each run, a ServerApp: the grid behind `GridChannel`
    site         SuperNode (always on) and, for each message, a ClientApp: `site_node_app`

Flower's own state is never relied upon: what it loses is asked for again.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Collection, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from osfl.core.errors import UsageError
from osfl.deploy.flower import messages
from osfl.deploy.flower.messages import MessageBody, Reply

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid

    from osfl.deploy.flower.site_node import SiteNode

Out = TypeVar("Out")
RECORD = "osfl"


def require_flower() -> None:
    """Flower is an extra; without it an error names what to install."""
    if importlib.util.find_spec("flwr") is None:
        raise UsageError("Flower is not installed here", field="flower", fix="Install it with: pip install 'osfl[flower]'")


class GridChannel:
    """A Flower grid as a `Channel`: every call is repeated while the SuperLink is busy or being restarted."""

    def __init__(
        self,
        grid: Grid,
        *,
        patience: float = 600.0,
        long_ttl: float = 1800.0,
        short_ttl: float = 300.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.grid, self.patience = grid, patience
        self.long_ttl, self.short_ttl = long_ttl, short_ttl  # a question that is not answered by then is asked again
        self.clock, self.sleep = clock, sleep
        self.waiting: dict[str, int] = {}  # ticket -> node

    def nodes(self) -> Collection[int]:
        return set(self._patiently(self.grid.get_node_ids))

    def send(self, node: int, kind: str, body: MessageBody) -> str:
        ttl = self.long_ttl if kind in messages.LONG else self.short_ttl
        # A new message for each try: the SuperLink may have kept the first although it answered with an error.
        (ticket,) = self._patiently(lambda: self.grid.push_messages([_question(node, kind, body, ttl)]))
        self.waiting[ticket] = node
        return str(ticket)

    def replies(self) -> Iterator[Reply]:
        """What has arrived, message by message: Flower builds all that it is asked for in memory."""
        for ticket, node in list(self.waiting.items()):
            for message in self._patiently(partial(self.grid.pull_messages, [ticket])):
                self.waiting.pop(ticket, None)
                yield _reply(node, ticket, message)

    def _patiently(self, call: Callable[[], Out]) -> Out:
        until, pause = self.clock() + self.patience, 0.5
        while True:
            try:
                return call()
            except Exception as error:
                if not _passes(error) or self.clock() > until:
                    raise
                print(f"[osfl] the SuperLink is busy or away ({type(error).__name__}); tried again", flush=True)
            self.sleep(pause)
            pause = min(2 * pause, 20.0)


def _passes(error: Exception) -> bool:
    """Trouble that goes away: no connection, HTTP 5xx (such as a locked database). A run that was stopped gets 4xx."""
    import httpx

    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= 500
    return isinstance(error, (httpx.TransportError, OSError))


def _question(node: int, kind: str, body: MessageBody, ttl: float) -> Message:
    from flwr.app import ConfigRecord, Message, RecordDict

    return Message(RecordDict({RECORD: ConfigRecord(dict(body))}), node, f"query.{kind}", ttl=ttl)


def _reply(node: int, ticket: str, message: Message) -> Reply:
    if message.has_error():
        return Reply(node, ticket, None, f"no answer ({message.error.reason}, code {message.error.code})")
    record = message.content.config_records.get(RECORD)
    return Reply(node, ticket, None, "an answer without content") if record is None else Reply(node, ticket, dict(record))  # type: ignore[arg-type]


def site_node_app(open_site: Callable[[Any], SiteNode]) -> ClientApp:
    """The ClientApp of a site. `open_site` reads the node's own configuration, never the message."""
    from flwr.clientapp import ClientApp

    app = ClientApp()
    for kind in messages.KINDS:
        app.query(kind)(_handler(open_site, kind))
    return app


def _handler(open_site: Callable[[object], SiteNode], kind: str) -> Callable[[Message, Context], Message]:
    def handle(message: Message, context: Context) -> Message:
        from flwr.app import ConfigRecord, Message, RecordDict

        body = answer(lambda: open_site(context.node_config), kind, dict(message.content.config_records[RECORD]))  # type: ignore[arg-type]
        return Message(RecordDict({RECORD: ConfigRecord(dict(body))}), reply_to=message)

    return handle


def answer(open_site: Callable[[], SiteNode], kind: str, body: MessageBody) -> MessageBody:
    """The site's answer. Errors go to the site's log only: a message may quote its data or paths."""
    import traceback

    from osfl.core.errors import OsflError

    try:
        return open_site().handle(kind, body)
    except OsflError as no:
        print(f"[osfl] {no}", flush=True)
        return {"refused": type(no).__name__}
    except Exception:
        traceback.print_exc()
        return {"refused": "an unexpected error"}
