"""Flower's grid as a post: retries while the SuperLink is busy or away, one reply at a time."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest

from osfl.core.errors import UsageError
from osfl.deploy.flower.grid import GridChannel, answer

flwr = pytest.importorskip("flwr.app", reason="needs osfl[flower]")
httpx = pytest.importorskip("httpx")


def status(code: int) -> Exception:
    request = httpx.Request("POST", "https://127.0.0.1/v1/runtime/pull-messages")
    error: Exception = httpx.HTTPStatusError("no", request=request, response=httpx.Response(code, request=request))
    return error


class Grid:
    """Fails as often as told, then works."""

    def __init__(self, failures: list[Exception]) -> None:
        self.failures, self.pushed, self.pulled = failures, [], []  # type: ignore[var-annotated]

    def _maybe(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

    def get_node_ids(self) -> list[int]:
        self._maybe()
        return [7]

    def push_messages(self, messages: list[Any]) -> list[str]:
        self.pushed += messages
        self._maybe()
        return [f"id-{len(self.pushed)}"]

    def pull_messages(self, tickets: list[str]) -> list[Any]:
        self._maybe()
        self.pulled.append(tickets)
        question = self.pushed[-1]
        question.metadata.__dict__["_message_id"] = tickets[0]
        return [flwr.Message(flwr.RecordDict({"osfl": flwr.ConfigRecord({"have": 5, "data": b"x"})}), reply_to=question)]


def channel(grid: Grid, patience: float = 100.0) -> tuple[GridChannel, list[float]]:
    naps: list[float] = []
    return GridChannel(grid, patience=patience, clock=lambda: sum(naps), sleep=naps.append), naps  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "trouble",
    [
        lambda: status(500),
        lambda: status(503),
        lambda: httpx.ConnectError("refused"),
        lambda: httpx.ReadTimeout("slow"),
        lambda: ConnectionResetError(),
    ],
)
def test_trouble_that_passes_is_waited_for(trouble: Callable[[], Exception]) -> None:
    grid = Grid([trouble(), trouble()])
    found, naps = channel(grid)
    assert found.nodes() == {7} and naps == [0.5, 1.0]


def test_a_push_is_a_new_message_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SuperLink may have kept the first one although its answer was an error."""
    identity = importlib.import_module("flwr.supercore.task_identity").TaskIdentity  # Flower sets it where it starts an app
    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(identity, name, 1)
    grid = Grid([status(500)])
    found, _ = channel(grid)
    ticket = found.send(7, "chunk", {"round": "r", "offset": 3, "data": b"abc"})
    assert len(grid.pushed) == 2 and grid.pushed[0] is not grid.pushed[1]
    assert dict(grid.pushed[1].content["osfl"]) == {"round": "r", "offset": 3, "data": b"abc"}
    (reply,) = found.replies()
    assert (reply.node, reply.ticket, reply.body) == (7, ticket, {"have": 5, "data": b"x"})
    assert not list(found.replies()), "each reply comes once"


def test_a_stopped_run_is_not_waited_for() -> None:
    found, naps = channel(Grid([status(403)]))
    with pytest.raises(httpx.HTTPStatusError):
        found.nodes()
    assert not naps


def test_patience_ends() -> None:
    found, naps = channel(Grid([status(500)] * 1000), patience=60.0)
    with pytest.raises(httpx.HTTPStatusError):
        found.nodes()
    assert 60 < sum(naps) < 100


def test_a_mistake_of_ours_is_not_repeated() -> None:
    found, naps = channel(Grid([TypeError("ours")]))
    with pytest.raises(TypeError):
        found.nodes()
    assert not naps


@pytest.mark.parametrize("problem", [UsageError("the key of /home/secret"), ValueError("patient 17 in /home/secret")])
def test_what_goes_wrong_at_a_site_stays_there(problem: Exception, capfd: pytest.CaptureFixture[str]) -> None:
    def open_site() -> Any:
        raise problem

    output = answer(open_site, "announce", {})
    assert set(output) == {"refused"} and "secret" not in str(output) and "17" not in str(output)
    shown = capfd.readouterr()
    assert "secret" in shown.out + shown.err
