"""`osfl exchange`: make a site's model from the uploads of its neighbors, without a server."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.arguments import machine_for
from osfl.cli.enroll import gather
from osfl.cli.personalize import placed
from osfl.cli.progress import progress_display
from osfl.cli.terminal import echo, errors, escape, put_json
from osfl.core.errors import RoundError, UsageError

if TYPE_CHECKING:
    from osfl.core.types import Plan
    from osfl.wire.inbox import Inbox
    from osfl.wire.signing import SigningKey

EXAMPLES = (
    "osfl new --method fol --dataset digits --clients north,south --samples 150 --smoke --sites sites --force",
    "osfl keys north south --out keys",
    "osfl client plan.toml --client south --data sites/south --key keys/south.key --out usb/south.safetensors",
    "osfl exchange plan.toml usb --client north --keys keys --data sites/north --out model",
    "osfl predict --run model sites/north",
)
EVERY = 5.0  # seconds between two looks at the files
Stamp = tuple[Path, int, int]  # a file, its size and when it was written

Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="FILE|FOLDER...", help="Neighbors' bundles, or folders with .safetensors files."),
]
Keys = Annotated[
    Path, typer.Option("--keys", metavar="DIR", rich_help_panel=options.SITE, help="A folder with NAME.pub of each neighbor.")
]
Key = Annotated[
    Path | None,
    typer.Option(
        "--key",
        "-k",
        metavar="FILE",
        rich_help_panel=options.SITE,
        show_default=False,
        help="This site's private key; only bundles that are sealed to it need it.",
    ),
]
WithoutMissing = Annotated[
    bool, typer.Option("--without-missing", help="Continue with the uploads that were received, even if there are none.")
]
Wait = Annotated[bool, typer.Option("--wait", help="Look again every few seconds until the uploads of all neighbors are here.")]


def exchange(
    plan: options.Plan,
    name: options.ClientName,
    keys: Keys,
    files: Files = None,
    data: options.Data = None,
    key: Key = None,
    work: options.Work = Path("work"),
    without_missing: WithoutMissing = False,
    wait: Wait = False,
    out: options.ModelOut = None,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    precision: options.Precision = "fp32",
    memory: options.Memory = "",
    no_cache: options.NoCache = False,
    output_format: options.Format = "text",
) -> None:
    """Check the bundles of this site's neighbors, as a coordinator would, and make the site's model of them.

    Unknown senders, clients that are no neighbors and damaged files are refused; a bundle that comes twice
    counts once. If a neighbor is missing, it is named: exit code 1, and what was received is kept.
    """
    from osfl.core.plan import read_plan
    from osfl.deploy.files import pick_up
    from osfl.roles.peer import exchange as make
    from osfl.roles.peer import left_out, missing_neighbors, own_inbox
    from osfl.wire.signing import SigningKey

    if wait and without_missing:
        raise UsageError("--wait waits for everybody, and --without-missing for nobody", field="wait", fix="Say one of them.")
    absent = [] if wait else [file.path for file in pick_up(files or [])[1] if file.absent]
    if absent:
        raise UsageError([f"there is no {path}" for path in absent], field="files", fix="Name files that are there, or --wait.")
    round_plan, own = read_plan(plan), SigningKey.load(key) if key else None
    inbox, judged = own_inbox(round_plan, name, gather(keys, []), work), dict[Stamp, dict[str, object] | None]()
    found = _receive_all(round_plan, name, inbox, own, files or [], output_format, judged)
    while wait and missing_neighbors(round_plan, name, inbox):
        errors().print(f"waiting for {', '.join(missing_neighbors(round_plan, name, inbox))}", soft_wrap=True)
        time.sleep(EVERY)
        found = _receive_all(round_plan, name, inbox, own, files or [], output_format, judged)
    try:
        with progress_display(output_format == "json") as progress:
            model = make(
                round_plan,
                name,
                inbox,
                work,
                data=data,
                without_missing=without_missing,
                machine=machine_for(device, precision, memory, threads=threads),
                progress=progress,
            )
    except RoundError as no:
        if output_format != "json":
            raise
        put_json(
            {
                **no.as_json(),
                "received": list(inbox.delivered()),
                **found,
                "missing": missing_neighbors(round_plan, name, inbox),
            }
        )
        raise typer.Exit(1) from None  # whoever is missing may have been refused: a script learns why
    folder, unused = placed(model, out), left_out(model)
    if output_format == "json":
        put_json(
            {
                "client": name,
                "round": round_plan.digest,
                "received": list(inbox.delivered()),
                **found,
                "left_out": unused,
                "missing": missing_neighbors(round_plan, name, inbox),
                "model": str(folder / "model.safetensors"),
            }
        )
        return
    echo(f"Received {', '.join(inbox.delivered()) or 'nobody'}")
    if unused:
        echo(
            f"[yellow]Left out {', '.join(unused)}[/]: its outputs on this site's images, before or after alignment, "
            "are no usable numbers. If that is so of everybody, a lower align_lr may help."
        )
    echo(f"Model    {escape(str(folder / 'model.safetensors'))}")
    echo(f"Ask it with `osfl predict --run {escape(str(folder))} IMAGE...`.")


def _receive_all(
    plan: Plan,
    client: str,
    inbox: Inbox,
    key: SigningKey | None,
    files: Sequence[Path],
    output_format: str,
    judged: dict[Stamp, dict[str, object] | None],
) -> dict[str, object]:
    """Every file through the gate, once as long as it stays the same; a line for each refusal. The site's own bundle may lie
    among them."""
    from osfl.deploy.files import pick_up

    taken, left = pick_up(files)
    stamps = [_stamp(path) for path in taken]
    for path, stamp in zip(taken, stamps, strict=True):
        if stamp not in judged:
            judged[stamp] = _refusal(plan, client, inbox, key, path, output_format)
    for file in left:
        stamp = _stamp(file.path)
        if stamp not in judged and output_format == "text":
            errors().print(f"[yellow]left[/]      {escape(str(file.path))}: {file.why}", soft_wrap=True)
        judged[stamp] = None
    return {
        "refused": [no for stamp in stamps if (no := judged[stamp]) is not None],
        "left": [{"path": str(file.path), "why": file.why} for file in left],
    }


def _refusal(
    plan: Plan, client: str, inbox: Inbox, key: SigningKey | None, path: Path, output_format: str
) -> dict[str, object] | None:
    """Print and return why a file was refused; None if it was accepted or is the site's own."""
    from osfl.core.errors import Rejected
    from osfl.roles.peer import receive_from_neighbor, sender

    if sender(path, inbox) == client:
        return None
    try:
        receive_from_neighbor(plan, client, inbox, path, key)
    except Rejected as no:
        if no.client == client:  # its own, sealed to itself
            return None
        if output_format == "text":
            errors().print(f"[bold red]refused[/]   {escape(str(path))}: {escape(str(no))}", soft_wrap=True)
        return {"path": str(path), **no.as_json(), "client": no.client}
    return None


def _stamp(path: Path) -> Stamp:
    """Path, size and time of change: differs once a file that was looked at has changed."""
    try:
        found = path.lstat()
    except OSError:
        return path, -1, -1
    return path, found.st_size, found.st_mtime_ns
