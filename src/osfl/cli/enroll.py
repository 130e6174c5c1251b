"""`osfl enroll`: open a round folder with the plan and the participants' public keys."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.arguments import Mistakes
from osfl.cli.terminal import echo, errors, escape, put_json
from osfl.core.errors import UsageError

if TYPE_CHECKING:
    from osfl.core.types import ClientId, Plan

EXAMPLES = (
    "osfl new --method fedavg --classes cat,dog --clients north,south --out plan.toml --force",
    "osfl keys server north south --out keys",
    "osfl enroll plan.toml --keys keys --out round",
)

Out = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        metavar="ROUND",
        parser=options.new_folder,
        rich_help_panel=options.COORDINATOR,
        help="The round's folder; it is made.",
    ),
]
Server = Annotated[
    Path | None,
    typer.Option(
        "--server",
        metavar="server.pub",
        rich_help_panel=options.COORDINATOR,
        show_default=False,
        help="The server's key, either half; default server.pub in --keys.",
    ),
]
Clients = Annotated[
    list[str] | None,
    typer.Option(
        "--client",
        "-c",
        metavar="NAME=FILE",
        rich_help_panel=options.COORDINATOR,
        show_default=False,
        help="A client's public key, such as north=north.pub; repeatable.",
    ),
]
Keys = Annotated[
    Path | None,
    typer.Option(
        "--keys", metavar="DIR", rich_help_panel=options.COORDINATOR, show_default=False, help="A folder of NAME.pub files."
    ),
]


def enroll(
    plan: options.Plan,
    out: Out,
    server: Server = None,
    clients: Clients = None,
    keys: Keys = None,
    output_format: options.Format = "text",
) -> None:
    """Open a round: its folder will hold the plan, what an upload may contain, and the public keys of all who take part."""
    from osfl.core.plan import read_plan
    from osfl.roles.coordinator import open_new
    from osfl.wire.signing import read_public

    mistakes = Mistakes()
    enrolled: dict[ClientId, str] = {}
    public = ""
    with mistakes.noted():
        round_plan = read_plan(plan)
    with mistakes.noted():
        enrolled = gather(keys, clients or [])
    with mistakes.noted():
        public = read_public(_server(server, keys))
    mistakes.check()
    open_new(out, round_plan, enrolled, public)
    warnings = _doubts(round_plan)
    if output_format == "json":
        put_json(
            {
                "round": str(out),
                "plan": round_plan.digest,
                "clients": dict(sorted(enrolled.items())),
                "server": public,
                "warnings": warnings,
            }
        )
        return
    echo(f"Opened {escape(str(out))}: {round_plan.method}, round {round_plan.digest[:12]}")
    for name, key in [*sorted(enrolled.items()), ("server", public)]:
        echo(f"  {name:<16} {key}")
    for warning in warnings:
        errors().print(f"[yellow]Warning:[/] {escape(warning)}", soft_wrap=True)
    echo(
        f"Send {escape(str(plan))} and the server's .pub file to every site; each runs `osfl client`. "
        f"Then `osfl receive {escape(str(out))} FILE...`."
    )


def _doubts(plan: Plan) -> list[str]:
    """What is allowed, and seldom meant."""
    now = datetime.now(UTC)
    if not plan.deadline or datetime.fromisoformat(plan.deadline) > now:
        return []
    needed = plan.quorum or len(plan.clients)
    return [
        f"the deadline {plan.deadline} is over (this clock says {now.isoformat(timespec='seconds')}): the server phase may "
        f"begin as soon as {needed} of {len(plan.clients)} uploads are there, and waits for nobody else. "
        "Another deadline is another plan, and another round."
    ]


def gather(keys: Path | None, clients: Sequence[str]) -> dict[ClientId, str]:
    """Public keys by client: all of a folder, and those that are named one by one, which count more."""
    from osfl.wire.signing import read_public

    if keys is not None and not keys.is_dir():
        raise UsageError(f"--keys {keys} is not a folder", field="keys", fix="Name the folder that holds the .pub files.")
    files = {path.stem: path for path in sorted(keys.glob("*.pub"))} if keys else {}
    files.pop("server", None)
    for text in clients:
        name, equals, path = text.partition("=")
        if not (name and equals and path):
            raise UsageError(f"--client {text!r}: expected NAME=FILE, for example --client north=north.pub", field="client")
        files[name] = Path(path)
    return {name: read_public(path) for name, path in files.items()}


def _server(server: Path | None, keys: Path | None) -> Path:
    if server is None and keys is None:
        raise UsageError(
            "the server's key is missing", field="server", fix="Make one with `osfl keys server`; give it as --server."
        )
    return server or (keys or Path()) / "server.pub"
