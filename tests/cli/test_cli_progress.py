"""Progress is a few lines where there is no terminal, bars where there is one, and never torn by threads."""

from __future__ import annotations

import io
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from osfl.cli.progress import EVERY, Lines, by_run, progress_display


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def lines() -> tuple[Lines, Clock, io.StringIO]:
    text, clock = io.StringIO(), Clock()
    return Lines(Console(file=text, width=80), clock), clock, text


def test_many_steps_are_one_line() -> None:
    display, _, text = lines()
    for done in range(1, 1001):
        display("client-01 trains", done, 1000)
    assert text.getvalue() == "[    0 s] client-01 trains  1000/1000\n"


def test_something_long_is_reported_now_and_then_with_the_time_left() -> None:
    display, clock, text = lines()
    for done in range(101):
        clock.now = float(done)
        display("rounds", done, 100)
    reported = text.getvalue().splitlines()
    assert len(reported) == 100 / EVERY
    assert reported[0] == "[   10 s] rounds  10/100, about 90 s left"
    assert reported[-1] == "[  100 s] rounds  100/100"


def test_what_is_finished_over_and_over_is_reported_once_in_a_while() -> None:
    display, clock, text = lines()
    for step in range(1000):
        clock.now = step / 100
        display("teacher", 1, 1)
    assert text.getvalue() == "[    0 s] teacher  done\n"


def test_whole_runs_of_a_comparison() -> None:
    display, _, text = lines()
    reported = by_run(display)
    reported("fedavg seed 0: clients", 5, 5)
    reported("fedavg seed 0 done", 1, 2)
    assert text.getvalue().splitlines() == [
        "[    0 s] fedavg seed 0: clients  5/5",
        "[    0 s] fedavg seed 0 finished, 1 of 2 runs",
    ]


def test_square_brackets_are_shown_as_they_are() -> None:
    display, _, text = lines()
    display("[bold]odd[/nonsense]", 1, 1)
    assert "[bold]odd[/nonsense]" in text.getvalue()


def test_threads_do_not_tear_lines() -> None:
    display, _, text = lines()
    with ThreadPoolExecutor(8) as pool:
        for done in pool.map(lambda n: display(f"client-{n} trains", 20, 20), range(200)):
            assert done is None
    reported = text.getvalue().splitlines()
    assert len(reported) == 200 and all(line.endswith("20/20") for line in reported)


def test_bars_on_a_terminal_leave_only_finished_runs_behind() -> None:
    text = io.StringIO()
    console = Console(file=text, force_terminal=True, width=80, highlight=False)
    with progress_display(console=console) as display:
        reported = by_run(display)
        with ThreadPoolExecutor(4) as pool:
            for step in range(1, 21):
                list(pool.map(lambda n, s=step: reported(f"fedavg seed 0: client-{n} trains", s, 20), range(4)))
        reported("fedavg seed 0: server", 0, 1)
        reported("fedavg seed 0: server", 1, 1)
        reported("fedavg seed 0 done", 1, 1)
    assert "fedavg seed 0" in text.getvalue() and "1 of 1" in text.getvalue()
