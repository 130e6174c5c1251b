"""A task stays claimed while its program starts, however long that takes; a program that dies is missed as before."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from osfl.deploy.flower import tasks

pytest.importorskip("flwr")
httpx = pytest.importorskip("httpx")


class Link:
    """A SuperLink that counts heartbeats, and answers each as it is given."""

    def __init__(self, *answers: object) -> None:
        self.answers, self.beats, self.closed = list(answers), 0, False

    def SendTaskHeartbeat(self, _: object) -> Any:
        self.beats += 1
        found = self.answers.pop(0) if self.answers else True
        if isinstance(found, Exception):
            raise found
        return SimpleNamespace(success=found)

    def close(self) -> None:
        self.closed = True


def status(code: int) -> Exception:
    error: Exception = httpx.HTTPStatusError("no", request=httpx.Request("POST", "http://x"), response=httpx.Response(code))
    return error


def spec(**changed: object) -> Any:
    from flwr.supercore.constant import TaskType
    from flwr.supercore.superexec.executor.types import ExecutionSpec

    known = {
        "task_type": TaskType.CLIENT_APP,
        "runtime_api_address": "127.0.0.1:1",
        "token": "secret",
        "insecure": True,
        "root_certificates_path": None,
        "runtime_dependency_install": False,
        "parent_pid": 7,
        "suppress_output": True,
        "task_id": 1,
    }
    return ExecutionSpec(**{**known, **changed})  # type: ignore[arg-type]


@contextlib.contextmanager
def program(seconds: float) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-S", "-c", f"import time; time.sleep({seconds})"]) as process:
        yield process
        process.kill()


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Callable[[Link, float], None]:
    def keep(link: Link, seconds: float) -> None:
        monkeypatch.setattr("flwr.common.constant.HEARTBEAT_DEFAULT_INTERVAL", 0.06)
        monkeypatch.setattr(tasks, "runtime", lambda spec: link)
        with program(seconds) as process:
            tasks.keep(process, spec())
        assert link.closed

    return keep


def test_heartbeats_are_sent_until_the_program_ends(kept: Callable[[Link, float], None]) -> None:
    link = Link()
    kept(link, 0.5)
    assert link.beats >= 3
    before = link.beats
    time.sleep(0.1)
    assert link.beats == before, "nothing is sent for a program that has ended"


def test_a_busy_superlink_is_asked_again(kept: Callable[[Link, float], None]) -> None:
    link = Link(httpx.ReadTimeout("busy"), status(503), httpx.ConnectError("away"))
    kept(link, 0.6)
    assert link.beats > 3


@pytest.mark.parametrize("over", [False, status(401)])
def test_a_task_that_is_over_gets_no_more(kept: Callable[[Link, float], None], over: object) -> None:
    link = Link(True, over)
    kept(link, 0.5)
    assert link.beats == 2


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"insecure": False, "root_certificates_path": "tls/ca.crt"},
        {"runtime_dependency_install": True},
        {"parent_pid": None},
        {"suppress_output": False},
    ],
)
def test_programs_are_started_as_flower_starts_them(monkeypatch: pytest.MonkeyPatch, changed: dict[str, object]) -> None:
    """The same command line as Flower's own executor; this fails when a new version of Flower changes them."""
    from flwr.supercore.superexec.executor import subprocess_executor

    calls: list[list[str]] = []
    monkeypatch.setattr(subprocess, "Popen", lambda body, **_: calls.append(body))
    for kind in ("flwr-serverapp", "flwr-clientapp"):
        one = spec(**changed, task_type=kind)
        subprocess_executor.SubprocessExecutor().launch(one)
        assert calls.pop() == tasks.command(one) and not calls


def test_flower_asks_for_the_executor_where_we_put_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """This fails when a new version of Flower moves what is replaced."""
    import importlib
    import inspect

    superexec = importlib.import_module(tasks.SUPEREXEC)
    assert "get_executor(" in inspect.getsource(superexec.run_superexec)
    monkeypatch.setattr(superexec, "get_executor", superexec.get_executor)
    assert tasks.keep_claims()
    ours = superexec.get_executor("subprocess", executor_config=None, insecure=True, root_certificates_path=None)
    assert type(ours).__name__ == "Keeping" and type(ours).__mro__[1].__name__ == "SubprocessExecutor"


def test_another_flower_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(tasks, "SUPEREXEC", "types")
    assert not tasks.keep_claims() and "has no get_executor" in capsys.readouterr().out


def test_nobody_listens() -> None:
    client = tasks.runtime(spec())
    with contextlib.closing(client):
        assert tasks.beat(client), "the next heartbeat may arrive"
