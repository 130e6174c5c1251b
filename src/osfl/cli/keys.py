"""`osfl keys`: make a key pair: the private key stays here, the public key goes to the other participants."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from osfl.cli import options
from osfl.cli.terminal import echo, escape, put_json

EXAMPLES = ("osfl keys north --out keys", "osfl keys server --out keys", "osfl keys south west --out keys --format json")

Names = Annotated[list[str], typer.Argument(metavar="NAME...", help="A client's name in the plan, or server.")]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="DIR", parser=options.new_folder, help="Where the two files go.")]


def keys(names: Names, out: Out = Path(), output_format: options.Format = "text") -> None:
    """Make NAME.key, which stays here, and NAME.pub, which the coordinator gets. A key that is there is kept."""
    from osfl.core.names import check_client_id
    from osfl.wire.signing import SigningKey, save_public

    made = []
    for name in names:
        if name != "server":
            check_client_id(name)
    out.mkdir(parents=True, exist_ok=True)
    for name in names:
        private, public = out / f"{name}.key", out / f"{name}.pub"
        kept = private.exists()
        key = SigningKey.load(private) if kept else SigningKey.generate()
        if not kept:
            key.save(private)
        save_public(public, key.public_hex)
        made.append({"name": name, "public_key": key.public_hex, "private": str(private), "public": str(public), "kept": kept})
    if output_format == "json":
        put_json({"keys": made})
        return
    for row in made:
        echo(f"[bold]{row['name']}[/]  {row['public_key']}{'  [dim](kept: it was there)[/]' if row['kept'] else ''}")
    echo(
        f"Private halves (.key) in {escape(str(out.resolve()))} never leave this machine: keep a copy in a safe place, because "
        "a lost key cannot be made again."
    )
    echo("Public halves (.pub) go to the coordinator, and server.pub goes to every site. Read them out to each other once.")
