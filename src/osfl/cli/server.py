"""`osfl server`: run the server phase once enough uploads have arrived."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.arguments import machine_for
from osfl.cli.progress import progress_display
from osfl.cli.terminal import echo, errors, escape, put_json

if TYPE_CHECKING:
    from osfl.roles.coordinator import Status
    from osfl.runtime.machine import Machine

# the smallest whole round there is: one site
EXAMPLES = (
    "osfl new --method fedavg --dataset digits --clients north --samples 150 --smoke --sites sites --force",
    "osfl keys server north --out keys",
    "osfl enroll plan.toml --keys keys --out round",
    "osfl client plan.toml --client north --data sites/north --key keys/north.key --out usb/north.safetensors",
    "osfl receive round usb",
    "osfl server round --key keys/server.key",
)
EVERY = 5.0  # seconds between two looks at the inbox

Key = Annotated[
    Path,
    typer.Option(
        "--key", "-k", metavar="server.key", show_default=False, help="The server's private key: it signs the release."
    ),
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude",
        "--without",
        metavar="SITE",
        show_default=False,
        help="Leave this site's upload out: one that is suspected, or that the server phase failed at. The release names it as "
        "left out; repeat it for more.",
    ),
]
Keep = Annotated[
    list[str] | None,
    typer.Option(
        "--keep",
        metavar="SITE",
        show_default=False,
        help="Use this site's upload though it is suspected; repeat it for more.",
    ),
]
WithoutMissing = Annotated[
    bool,
    typer.Option(
        "--without-missing",
        help="In a secure sum: ask those who delivered for repairs. Final: the missing sites cannot deliver after that.",
    ),
]
Wait = Annotated[bool, typer.Option("--wait", help="Look again every few seconds until the server phase may begin.")]


def server(
    fl_round: options.RoundFolder,
    key: Key,
    wait: Wait = False,
    exclude: Exclude = None,
    keep: Keep = None,
    without_missing: WithoutMissing = False,
    workers: options.Workers = None,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    precision: options.Precision = "fp32",
    memory: options.Memory = "",
    output_format: options.Format = "text",
) -> None:
    """Make the release once all have delivered, or the plan's quorum has and its deadline, if any, is over (by this clock).

    Otherwise say who is missing: exit code 1. Killed, the same command continues; a release that is there stands, unless the
    plan says `late = true` and uploads came after it: then the next release takes its place.
    A server phase that fails names the upload that it failed at, where that is known: go on with --exclude.
    Before it, uploads are compared: where one contradicts the others, it says so and waits for --exclude or --keep.
    """
    if without_missing:
        _ask_for_repairs(fl_round, key, output_format)
        return
    machine = machine_for(device, precision, memory, workers=workers, threads=threads)
    _run_server_phase(fl_round, key, wait, exclude or [], keep or [], machine, output_format)


def _ask_for_repairs(fl_round: Path, key: Path, output_format: str) -> None:
    from osfl.roles.coordinator import request_repairs
    from osfl.wire.repair import REQUEST
    from osfl.wire.signing import SigningKey

    request, path = request_repairs(fl_round, SigningKey.load(key)), fl_round / REQUEST
    if output_format == "json":
        put_json({"round": request.plan, "path": str(path), "missing": request.missing, "delivered": dict(request.delivered)})
        return
    echo(f"Request  {escape(str(path))}: {', '.join(request.missing)} missing, and cannot deliver in this round any more")
    echo(f"Give it to {', '.join(request.delivered)}; each runs `osfl repair`. Then `osfl receive` with --key what they send,")
    echo(f"and `osfl server {escape(str(fl_round))} --key server.key`.")


def _run_server_phase(
    fl_round: Path,
    key: Path,
    wait: bool,
    without: Sequence[str],
    keep: Sequence[str],
    machine: Machine,
    output_format: str,
) -> None:
    from osfl.roles.coordinator import make_release, status
    from osfl.wire.signing import SigningKey

    signing = SigningKey.load(key)
    if wait:
        until_ready(lambda: status(fl_round, without=without))
    with progress_display(output_format == "json") as progress:
        digest = make_release(fl_round, signing, machine=machine, progress=progress, without=without, keep=keep)
    found = status(fl_round)
    if output_format == "json":
        put_json(
            {
                "round": found.plan,
                "release": digest,
                "content": found.content,
                "path": str(fl_round / "release.safetensors"),
                "personal": list(found.personal),
                "late": list(found.late),
                "left_out": list(found.left_out),
                "suspicions": [dict(one) for one in found.suspicions],
                "supersedes": found.supersedes or None,
            }
        )
        return
    echo(f"Release  {digest}")
    echo(f"Content  {found.content}")
    made_from = len(found.delivered) - len(found.late) - len(found.left_out)
    left_out = f", without {', '.join(found.left_out)}" if found.left_out else ""
    echo(f"         made from {made_from} of {len(found.delivered) + len(found.missing)} uploads{left_out}")
    if found.supersedes:
        echo(f"         takes the place of {found.supersedes}")
    parts = f" and, to each site, its own file of {escape(str(fl_round / 'personal'))}" if found.personal else ""
    echo(f"Give {escape(str(fl_round / 'release.safetensors'))} to every site{parts}; they run `osfl personalize`.")


def until_ready(look: Callable[[], Status], pause: Callable[[float], None] = time.sleep) -> None:
    """Return when the server phase may begin; a line whenever something has changed."""
    reported = ""
    while True:
        found = look()
        if found.ready or found.released:
            return
        if found.waits_for != reported:
            reported = found.waits_for
            who = ", ".join(found.repairs_due or found.missing)
            errors().print(f"{datetime.now(UTC):%H:%M:%S} UTC  waiting: {escape(reported)}; missing: {who}", soft_wrap=True)
        pause(EVERY)
