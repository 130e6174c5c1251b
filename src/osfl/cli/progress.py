"""`progress(what, done, total)` as bars on a terminal and as a few plain lines elsewhere. Called from worker threads too."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Protocol, Self

from osfl.cli.terminal import INTERRUPTED, complain, errors

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import TaskID

EVERY = 10.0  # seconds between two lines about the same thing
WORKING = "working"  # shown while no step has been reported


class ProgressDisplay(Protocol):
    """A display of how far a run is."""

    def __call__(self, what: str, done: int, total: int) -> None: ...
    def run(self, label: str, done: int, total: int) -> None: ...
    def close(self) -> None: ...


@contextmanager
def progress_display(as_json: bool = False, console: Console | None = None) -> Iterator[ProgressDisplay]:
    """Bars or lines on stderr during a run; Ctrl-C stops at once, because the folder is the state."""
    console = console or errors()
    with Bars(console) if console.is_terminal else Lines(console) as display, _stopping(display, as_json):
        yield display


@contextmanager
def _stopping(display: ProgressDisplay, as_json: bool) -> Iterator[None]:
    """Waiting for workers to finish their clients could take minutes; a killed round continues where it was."""

    def stop(number: int, frame: FrameType | None) -> None:
        display.close()
        complain(INTERRUPTED, {"error": "Interrupted", "reason": INTERRUPTED}, as_json)
        sys.stdout.flush()
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    with suppress(ValueError):  # not in the main thread: whoever called us handles signals
        signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        with suppress(ValueError):
            signal.signal(signal.SIGINT, before)


def by_run(display: ProgressDisplay) -> Callable[[str, int, int], None]:
    """`compare` reports `fedavg seed 0: clients` for a step inside a run and `fedavg seed 0 done` at its end."""

    def report(what: str, done: int, total: int) -> None:
        if ": " in what:
            display(what, done, total)
        else:
            display.run(what.removesuffix(" done"), done, total)

    return report


class Lines:
    """One line when something is finished, and one now and then while something long goes on."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self.console, self.clock = console, clock
        self.begun = clock()
        self._lock = threading.Lock()
        self._first: dict[str, tuple[float, int]] = {}  # what -> when it was first reported, and how far it was
        self._reported: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        pass

    def __call__(self, what: str, done: int, total: int) -> None:
        with self._lock:
            now = self.clock()
            since, start = self._first.setdefault(what, (now, done))
            key = f"{what} finished" if done >= total else what
            silent = now - self._reported.get(key, since if done < total else float("-inf"))
            if silent < EVERY:
                return
            self._reported[key] = now
            left = "" if done >= total else _left(now - since, done - start, total - done)
            self._print(f"{what}  {done}/{total}{left}" if total > 1 else f"{what}  {'done' if done else '…'}")

    def run(self, label: str, done: int, total: int) -> None:
        with self._lock:
            self._print(f"{label} finished, {done} of {total} runs")

    def _print(self, text: str) -> None:
        self.console.print(f"[{self.clock() - self.begun:5.0f} s] {text}", markup=False, soft_wrap=True)


def _left(seconds: float, done: int, waiting: int) -> str:
    return f", about {seconds / done * waiting:.0f} s left" if done > 0 else ""


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


class Bars:
    """A bar for each thing that goes on; what is finished disappears, and whole runs leave a line behind."""

    def __init__(self, console: Console) -> None:
        from rich.progress import BarColumn, Progress, SpinnerColumn, Task, TextColumn, TimeElapsedColumn
        from rich.table import Column
        from rich.text import Text

        class Count(TextColumn):
            """`3/20, 0:12 left`; a single step has neither."""

            def render(self, task: Task) -> Text:
                if task.total is None:
                    return Text("")
                left = "" if task.time_remaining is None else f", {_clock(task.time_remaining)} left"
                return Text(f"{task.completed:.0f}/{task.total:.0f}{left}", style="cyan")

        name = TextColumn("{task.description}", table_column=Column(width=36, no_wrap=True, overflow="ellipsis"))
        self._shown = Progress(
            SpinnerColumn(), name, BarColumn(bar_width=12), TimeElapsedColumn(), Count(""), console=console, transient=True
        )
        self._lock = threading.Lock()
        self._tasks: dict[str, TaskID] = {}
        self._begun = time.monotonic()

    def __enter__(self) -> Self:
        self._shown.start()
        self._show(WORKING, 0, 1)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._shown.stop()

    def __call__(self, what: str, done: int, total: int) -> None:
        with self._lock:
            self._show(what, done, total)
            self._hide(WORKING)
            if not self._tasks:
                self._show(WORKING, 0, 1)

    def run(self, label: str, done: int, total: int) -> None:
        with self._lock:
            took, self._begun = time.monotonic() - self._begun, time.monotonic()
            self._shown.console.print(f"[green]✓[/] {label:<48} [dim]{took:7.1f} s   {done:>2} of {total}[/]")

    def _show(self, what: str, done: int, total: int) -> None:
        if done >= total:
            self._hide(what)
        elif what in self._tasks:
            self._shown.update(self._tasks[what], completed=done)
        else:  # a single step has no share done: the bar pulses
            self._tasks[what] = self._shown.add_task(what, completed=done, total=total if total > 1 else None)

    def _hide(self, what: str) -> None:
        task = self._tasks.pop(what, None)
        if task is not None:
            self._shown.remove_task(task)
