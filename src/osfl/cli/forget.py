"""`osfl forget`: exact unlearning of a client's upload, or of one class in it; `--verify` checks it again."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.arguments import machine_for
from osfl.cli.progress import progress_display
from osfl.cli.terminal import echo, escape, put_json
from osfl.core.errors import UsageError
from osfl.core.types import Json

if TYPE_CHECKING:
    from osfl.rounds.forgetting import Finding

EXAMPLES = (
    "osfl run --method ensemble --smoke --out runs/taught",
    "osfl forget runs/taught --client client-02",
    "osfl forget runs/taught --verify",
    "osfl run --method federated_factory --clients 3 --smoke --out runs/made",
    "osfl forget runs/made --class 7",
)

Clients = Annotated[
    list[str] | None,
    typer.Option("--client", "-c", metavar="NAME", show_default=False, help="Whose upload is forgotten; repeatable."),
]
Class = Annotated[
    str,
    typer.Option(
        "--class",
        metavar="NAME",
        show_default=False,
        help="Only this class: of the clients named, or of everybody. For methods that send classes apart.",
    ),
]
Key = Annotated[
    Path | None,
    typer.Option(
        "--key",
        "-k",
        metavar="server.key",
        show_default=False,
        help="The server's private key, which signs the new release; simulated rounds need none.",
    ),
]
Withdraw = Annotated[
    bool, typer.Option("--withdraw", help="Where too little is left for a release, take the old one back without a new one.")
]
Verify = Annotated[bool, typer.Option("--verify", help="Repeat the proof of everything that was forgotten here.")]


def forget(
    fl_round: options.RoundFolder,
    clients: Clients = None,
    class_name: Class = "",
    key: Key = None,
    withdraw: Withdraw = False,
    verify: Verify = False,
    workers: options.Workers = None,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    precision: options.Precision = "fp32",
    memory: options.Memory = "",
    output_format: options.Format = "text",
) -> None:
    """Delete uploads and make the release again, bit for bit as if they had never been sent. Writes a certificate.

    If interrupted, run it again. --verify changes nothing, needs no key, and answers 1 if something does not hold.
    """
    from osfl.rounds import forgetting
    from osfl.rounds.folder import first_encounter
    from osfl.wire.signing import SigningKey

    if verify:
        if clients or class_name or withdraw:
            raise UsageError(
                "--verify repeats the proof of all that was forgotten, and forgets nothing",
                field="verify",
                fix="Leave --client, --class and --withdraw out.",
            )
        with progress_display(output_format == "json") as progress:
            findings = forgetting.verify(fl_round, workers=workers, progress=progress)
        _answer(findings, output_format)
        return
    signing = SigningKey.load(key) if key else None
    machine = machine_for(device, precision, memory, workers=workers, threads=threads)
    with progress_display(output_format == "json") as progress:
        certificate = forgetting.forget(
            fl_round,
            signing,
            clients=clients or (),
            class_name=class_name,
            withdraw=withdraw,
            machine=machine,
            progress=progress,
        )
    path = first_encounter(fl_round) / "forgotten" / f"{certificate['number']:04}.json"
    if output_format == "json":
        put_json({**certificate, "path": str(path)})
    else:
        _show(certificate, path, fl_round)


def _show(certificate: Mapping[str, Json], path: Path, fl_round: Path) -> None:
    for client, upload in certificate["uploads"].items():
        left = f"class {escape(certificate['asked']['class'])} is gone from its upload" if upload["after"] else "forgotten"
        echo(f"[bold]{client}[/]: {left}")
    release, replace = certificate["release"], certificate["replace"]
    if not release["after"]:
        why = "the release was taken back" if release["before"] else "there was none yet"
        echo(f"Release      none: {why}")
    else:
        same = "  (the same as before)" if release["after"] == release["before"] else ""
        echo(f"Release      {release['after']}{same}")
    if replace:
        who = ", ".join(row["who"] for row in replace)
        echo(f"To replace   {who} may hold release {release['before'][:16]}... or models of it")
    if certificate["stays"]:
        echo(f"[yellow]Stays[/]        {escape(certificate['stays'])}")
    for found in certificate["elsewhere"]:
        echo(f"[yellow]Elsewhere[/]    {escape(os.path.normpath(fl_round / found))} holds the same bytes; remove it, too")
    echo(f"Certificate  {escape(str(path))}")
    echo(f"Verify       osfl forget {escape(str(fl_round))} --verify")
    if certificate["again"]:
        echo(f"Evaluate     {escape(certificate['again'])}")


def _answer(findings: Sequence[Finding], output_format: str) -> None:
    good = all(finding.good for finding in findings)
    if output_format == "json":
        rows = [{"check": f.check, "good": f.good, "detail": f.detail} for f in findings]
        put_json({"good": good, "checks": rows})
    else:
        for finding in findings:
            mark = "[green]PASS[/]" if finding.good else "[bold red]FAIL[/]"
            echo(f"{mark}  {finding.check:<12} {escape(finding.detail)}")
    if not good:
        raise typer.Exit(1)
