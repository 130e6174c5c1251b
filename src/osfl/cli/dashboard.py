"""`osfl dashboard`: serve the web page of a round to the coordinator's browser."""

from __future__ import annotations

import signal
import sys
import webbrowser
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.terminal import echo, errors, escape, put_json

if TYPE_CHECKING:
    from osfl.dashboard.server import Server

EXAMPLES = ("osfl run --method ensemble --smoke --out runs/seen", "osfl dashboard runs/seen")

Host = Annotated[str, typer.Option("--host", metavar="ADDRESS", help="Others than this machine itself need the token.")]
Port = Annotated[int, typer.Option("--port", metavar="P", min=0, max=65535, help="0: any that is free.")]
Token = Annotated[
    str | None,
    typer.Option(
        "--token",
        metavar="TEXT",
        envvar="OSFL_DASHBOARD_TOKEN",
        show_default=False,
        help="Token that visitors must enter; generated and printed where one is needed. Better in OSFL_DASHBOARD_TOKEN.",
    ),
]
Key = Annotated[
    Path | None,
    typer.Option(
        "--key",
        "-k",
        metavar="server.key",
        show_default=False,
        help="The server's private key, to run the server phase; without it the dashboard only receives and shows.",
    ),
]
NoBrowser = Annotated[bool, typer.Option("--no-browser", help="Print the address only.")]


def dashboard(
    fl_round: options.RoundFolder,
    host: Host = "127.0.0.1",
    port: Port = 0,
    token: Token = None,
    key: Key = None,
    no_browser: NoBrowser = False,
    workers: options.Workers = None,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    output_format: options.Format = "text",
) -> None:
    """Show a round in the browser: who delivered, who is missing, what was refused; drop bundles, run the server phase.

    It runs until Ctrl-C. The folder is the state: start it again, and everything goes on.
    """
    from osfl.dashboard.guard import is_loopback, token_for
    from osfl.dashboard.server import address, opened

    if key is not None:
        _check_key(fl_round, key)
    machine = (str(workers or ""), str(threads), device)
    with opened(fl_round, host=host, port=port, token=token_for(host, token), key=key, machine=machine) as server:
        where = address(server)
        if output_format == "json":
            put_json({"address": where, "round": server.controller.state().get("round", ""), "may_start": key is not None})
            sys.stdout.flush()
        else:
            echo(f"The dashboard is open at {escape(where)}")
            echo("Ctrl-C closes it. Nothing that was received is lost.")
        if not is_loopback(host):
            errors().print(
                "[yellow]Not encrypted:[/] whoever can read this network can read the token and the bundles. "
                "Across networks use a tunnel, such as ssh -L.",
                soft_wrap=True,
            )
        if not no_browser and output_format == "text":
            webbrowser.open(where)
        _serve(server)


def _check_key(fl_round: Path, key: Path) -> None:
    """Now, not when everybody has delivered and somebody presses the button."""
    from osfl.core.errors import UsageError
    from osfl.rounds.state import read_policy
    from osfl.wire.signing import SigningKey

    expected, got = read_policy(fl_round).server, SigningKey.load(key).public_hex
    if got != expected:
        raise UsageError(
            f"this key is not the server's: expected the private half of {expected}, got that of {got}",
            field="key",
            fix="Give the key with which the round was opened.",
        )


def _serve(server: Server) -> None:
    def stop(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, stop)
    try:
        server.serve_forever(poll_interval=0.2)
    except KeyboardInterrupt:
        errors().print("The dashboard is closed.")
    finally:
        signal.signal(signal.SIGTERM, before)
