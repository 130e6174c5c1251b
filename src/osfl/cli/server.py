"""`osfl server`: the server phase, when enough have spoken."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.progress import telling
from osfl.cli.terminal import errors, escape, put_json, say

if TYPE_CHECKING:
    from osfl.coordinator import Status

# the smallest whole round there is: one site
EXAMPLES = (
    "osfl new --method fedavg --dataset digits --clients north --samples 150 --smoke --sites sites --force",
    "osfl keys server north --out keys",
    "osfl enrol plan.toml --keys keys --out round",
    "osfl client plan.toml --client north --data sites/north --key keys/north.key --out usb/north.safetensors",
    "osfl receive round usb",
    "osfl server round --key keys/server.key",
)
EVERY = 5.0  # seconds between two looks at the inbox

Key = Annotated[Path, typer.Option("--key", "-k", metavar="server.key", help="The server's private key: it signs the release.")]
Wait = Annotated[bool, typer.Option("--wait", help="Look again every few seconds until the server phase may begin.")]


def server(
    round: options.RoundFolder,
    key: Key,
    wait: Wait = False,
    workers: options.Workers = None,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    format: options.Format = "text",
) -> None:
    """Make the release once all have delivered, or the plan's quorum has and its deadline has passed (by this clock).

    Otherwise say who is missing: exit code 1. Killed, the same command continues; a release that is there stands.
    """
    from osfl.coordinator import serve, status
    from osfl.phases import Machine
    from osfl.wire.signing import SigningKey

    signing = SigningKey.load(key)
    if wait:
        until_ready(lambda: status(round))
    with telling(format == "json") as progress:
        digest = serve(round, signing, machine=Machine(workers=workers, threads=threads, device=device), progress=progress)
    found = status(round)
    if format == "json":
        put_json({"round": found.plan, "release": digest, "path": str(round / "release.safetensors"),
                  "personal": list(found.personal), "late": list(found.late)})  # fmt: skip
        return
    say(f"Release  {digest}")
    say(f"         made from {len(found.delivered) - len(found.late)} of {len(found.delivered) + len(found.missing)} uploads")
    parts = f" and, to each site, its own file of {escape(str(round / 'personal'))}" if found.personal else ""
    say(f"Give {escape(str(round / 'release.safetensors'))} to every site{parts}; they run `osfl personalize`.")


def until_ready(look: Callable[[], Status], pause: Callable[[float], None] = time.sleep) -> None:
    """Return when the server phase may begin; a line whenever something has changed."""
    told = ""
    while True:
        found = look()
        if found.ready or found.released:
            return
        if found.waits_for != told:
            told = found.waits_for
            who = ", ".join(found.missing)
            errors().print(f"{datetime.now(UTC):%H:%M:%S} UTC  waiting: {escape(told)}; missing: {who}", soft_wrap=True)
        pause(EVERY)
