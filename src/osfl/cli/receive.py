"""`osfl receive`: check bundles and store the accepted ones in the inbox, one line each."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osfl.cli import options
from osfl.cli.terminal import echo, errors, escape, put_json

EXAMPLES = (
    "osfl run --method fedavg --smoke --out runs/first",
    "osfl receive runs/first runs/first/inbox",
    "osfl show runs/first",
)

Files = Annotated[list[Path], typer.Argument(metavar="FILE|FOLDER...", help="Bundles, or folders with .safetensors files.")]


Key = Annotated[
    Path | None,
    typer.Option(
        "--key",
        "-k",
        metavar="server.key",
        show_default=False,
        help="The server's private key, for sealed bundles; and for the next release, where the plan lets sites join late.",
    ),
]


def receive(fl_round: options.RoundFolder, files: Files, key: Key = None, output_format: options.Format = "text") -> None:
    """Check bundles and keep them; each is safe on disk before its line is printed. Exit code 1 if any was refused.

    What was received once may be received again: it counts once, and the first stands. Any number of processes may receive.
    After the release, where the plan says `late = true`, an upload makes the next release; that needs --key.
    """
    from osfl.core.errors import Rejected
    from osfl.deploy.files import pick_up
    from osfl.roles.coordinator import make_release, status, too_late
    from osfl.roles.coordinator import receive as through_the_gate
    from osfl.wire.signing import SigningKey

    opens = SigningKey.load(key) if key else None
    taken, left = pick_up(files)
    accepted: list[dict[str, object]] = []
    refused: list[dict[str, object]] = []
    for path in taken:
        try:
            receipt = through_the_gate(fl_round, path, opens)
        except Rejected as no:
            refused.append({"path": str(path), **no.as_json(), "client": no.client})
            if output_format == "text":
                errors().print(f"[bold red]refused[/]   {escape(str(path))}: {escape(str(no))}", soft_wrap=True)
            continue
        accepted.append({"path": str(path), "client": receipt.client, "bytes": receipt.bytes, "digest": receipt.digest})
        if output_format == "text":
            echo(f"[green]accepted[/]  {receipt.client:<16} {receipt.bytes:>13,} bytes  {receipt.digest}  {escape(str(path))}")
    late = too_late(fl_round, list(dict.fromkeys(str(one["client"]) for one in accepted)))
    joining = status(fl_round).joining if late else []
    release = make_release(fl_round, opens) if joining and opens is not None else None
    if output_format == "json":
        unused = [{"path": str(file.path), "why": file.why} for file in left]
        put_json({"accepted": accepted, "refused": refused, "left": unused, "late": late, "release": release})
    elif release is not None:
        echo(f"[green]released[/]  {release}  with {', '.join(joining)}; takes the place of {status(fl_round).supersedes}")
    elif joining:
        again = f"`osfl server {escape(str(fl_round))} --key server.key` makes the next release with it"
        errors().print(f"[yellow]late[/]      {', '.join(joining)}: kept; {again}", soft_wrap=True)
    elif late:
        errors().print(
            f"[yellow]too late[/]  {', '.join(late)}: kept, but the release is made and has no part of it", soft_wrap=True
        )
    for why in dict.fromkeys(file.why for file in left) if output_format == "text" else ():
        paths = ", ".join(str(file.path) for file in left if file.why == why)
        errors().print(f"[yellow]left[/]      {escape(paths)}: {why}", soft_wrap=True)
    absent = any(file.absent for file in left)
    if not taken and not absent and output_format == "text":
        errors().print("Nothing to receive.")
    if refused or absent or not taken:
        raise typer.Exit(1)
