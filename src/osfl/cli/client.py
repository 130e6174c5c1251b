"""`osfl client`: run the client phase at a site and write its signed upload."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.arguments import machine_for
from osfl.cli.enroll import gather
from osfl.cli.progress import progress_display
from osfl.cli.terminal import echo, escape, put_json
from osfl.core.errors import UsageError
from osfl.core.types import Json

if TYPE_CHECKING:
    from osfl.core.types import Plan

EXAMPLES = (
    "osfl new --method fedavg --dataset digits --clients north,south --samples 150 --smoke --sites sites --force",
    "osfl keys north --out keys",
    "osfl client plan.toml --client north --data sites/north --key keys/north.key --out north.safetensors",
)

Key = Annotated[
    Path, typer.Option("--key", "-k", metavar="FILE", rich_help_panel=options.SITE, help="The private key of `osfl keys`.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        parser=options.new_place,
        rich_help_panel=options.SITE,
        show_default=False,
        help="Also copy the bundle there, such as to a USB stick, and read it back.",
    ),
]

Seal = Annotated[
    Path | None,
    typer.Option(
        "--seal",
        metavar="server.pub",
        rich_help_panel=options.SITE,
        show_default=False,
        help="Encrypt the copy at --out to this key, the server's or a neighbor's: nobody else can read it.",
    ),
]


Keys = Annotated[
    Path | None,
    typer.Option(
        "--keys",
        metavar="DIR",
        rich_help_panel=options.SITE,
        show_default=False,
        help="For a secure sum: a folder with NAME.pub of every other site, to mask the upload with.",
    ),
]


def client(
    plan: options.Plan,
    name: options.ClientName,
    key: Key,
    data: options.Data = None,
    work: options.Work = Path("work"),
    out: Out = None,
    seal: Seal = None,
    keys: Keys = None,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    precision: options.Precision = "fp32",
    memory: options.Memory = "",
    no_cache: options.NoCache = False,
    output_format: options.Format = "text",
) -> None:
    """Train on this site's images and write one signed bundle: the site's only upload of the round.

    A bundle that is finished stands: the same command gives the same file again. Interrupted, it continues.
    """
    from osfl.core.plan import read_plan
    from osfl.deploy.files import check_replaceable
    from osfl.roles.site import make_upload, work_folder
    from osfl.wire.signing import SigningKey, read_public

    if seal is not None and out is None:
        raise UsageError(
            "--seal encrypts the copy that leaves, and --out is missing",
            field="out",
            fix="Name a file for it, such as --out usb/north.safetensors.",
        )
    if out is not None and out.is_dir():
        raise UsageError(
            f"--out {out} is a folder", field="out", fix=f"Name the file in it, such as --out {out / name}.safetensors."
        )
    if out is not None:
        check_replaceable(out, name)  # before it trains
    round_plan, signing, addressee = read_plan(plan), SigningKey.load(key), read_public(seal) if seal else ""
    kept = (work_folder(round_plan, name, work) / "upload.safetensors").exists()
    if data is None and not kept:
        raise UsageError("--data is missing", field="data", fix="Name the folder that holds one folder a class.")
    noticed: list[str] = []
    with progress_display(output_format == "json") as progress:
        bundle = make_upload(
            round_plan,
            name,
            data or Path(),
            signing,
            work,
            machine=machine_for(device, precision, memory, threads=threads),
            progress=progress,
            sealed=bool(addressee),
            notice=noticed.append,
            keys=gather(keys, []),
        )
    if out is not None:
        carry_out(bundle, out, addressee, name)
    facts = {**_facts(bundle, out, kept, addressee), "receivers": receivers(round_plan, name), "noticed": noticed}
    if output_format == "json":
        put_json(facts)
    else:
        _show(facts)


def carry_out(bundle: Path, out: Path, addressee: str, name: str) -> None:
    """The copy that leaves; if it is sealed, then anew each time, because one copy goes to each addressee."""
    from osfl.deploy.files import carry, check_replaceable
    from osfl.wire.sealing import seal

    check_replaceable(out, name)
    out.parent.mkdir(parents=True, exist_ok=True)
    if not addressee:
        carry(bundle, out)
        return
    with TemporaryDirectory(prefix=".sealing-", dir=bundle.parent) as aside:
        seal(bundle, Path(aside) / "sealed", addressee)
        carry(Path(aside) / "sealed", out)


def _facts(bundle: Path, out: Path | None, kept: bool, addressee: str) -> dict[str, Json]:
    from osfl.core.tensors import nbytes
    from osfl.wire.facts import KEYS
    from osfl.wire.window import look_at

    seen = look_at(bundle)
    tensors = {
        name: {"dtype": t.dtype, "shape": list(t.shape), "bytes": nbytes(t.dtype, t.shape)}
        for name, t in seen.bundle.tensors.items()
    }
    return {
        "masked": KEYS in seen.bundle.facts,
        "client": seen.bundle.client,
        "round": seen.bundle.plan,
        "digest": seen.bundle.digest,
        "bytes": (out or bundle).stat().st_size,
        "tensors": tensors,
        "facts": dict(seen.bundle.facts),
        "path": str(out or bundle),
        "kept": str(bundle),
        "finished_before": kept,
        "sealed_to": addressee,
    }


def receivers(plan: Plan, client: str) -> list[str] | None:
    """The neighbors that this bundle is for; None where the plan names none, and a coordinator collects."""
    from osfl.core.topology import neighbors

    if plan.topology is None:
        return None
    return [other for other in plan.clients if client in neighbors(plan, other)]


def _show(facts: dict[str, Json]) -> None:
    numbers = sum(tensor["bytes"] for tensor in facts["tensors"].values())
    before = " [dim](finished before; nothing was computed again)[/]" if facts["finished_before"] else ""
    echo(f"[bold]What leaves {facts['client']}[/]: one file of {facts['bytes']:,} bytes{before}")
    echo(f"  {len(facts['tensors'])} tensors, {numbers:,} bytes: {escape(_names(list(facts['tensors'])))}")
    if facts["masked"]:
        echo("  masked: the server learns the sum of all sites only. All sites must see the same `keys` as here:")
    for name, value in facts["facts"].items():
        echo(f"  {escape(name)}: {escape(str(value))}")
    echo(f"  digest {facts['digest']}")
    for line in facts["noticed"]:
        echo(f"  [yellow]Data: {escape(line)}[/]")
    echo(f"Bundle  {escape(facts['path'])}")
    inside = facts["kept"] if facts["sealed_to"] else facts["path"]
    echo(f"Look inside it with `osfl inspect {escape(inside)}`. {_what_next(facts['receivers'], bool(facts['sealed_to']))}")


def _what_next(receivers: list[str] | None, sealed: bool) -> str:
    """To whom the file goes. A sealed copy has one reader only; each neighbor needs its own."""
    if receivers == []:
        return "No site receives this upload in this round: there is nobody to give it to."
    if receivers is None:
        receiver, reader = "the coordinator", "the server"
    elif sealed:
        receiver, reader = "the site whose key was given", "that site"
    else:
        receiver, reader = ", ".join(receivers), ""
    secret = f"only {reader} can read it" if sealed else "it is signed, but not secret"
    return f"Then give it to {receiver}, on any medium and under any name: {secret}."


def _names(names: list[str], most: int = 4) -> str:
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")
