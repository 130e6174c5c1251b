"""`osfl server`: the server phase, when enough have spoken; or of models that anybody offers (`--models`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import market, options
from osfl.cli.progress import telling
from osfl.cli.terminal import errors, escape, put_json, say
from osfl.cli.words import with_smoke
from osfl.errors import UsageError

if TYPE_CHECKING:
    from osfl.coordinator import Status
    from osfl.phases import Machine

# the smallest whole round there is: one site
EXAMPLES = (
    "osfl new --method fedavg --dataset digits --clients north --samples 150 --smoke --sites sites --force",
    "osfl keys server north --out keys",
    "osfl enrol plan.toml --keys keys --out round",
    "osfl client plan.toml --client north --data sites/north --key keys/north.key --out usb/north.safetensors",
    "osfl receive round usb",
    "osfl server round --key keys/server.key",
    "osfl run --method local_only --set architecture=cnn-w8 --clients 2 --image-size 8 --samples 100 --smoke --out runs/sites",
    "python -c \"print(*range(10), sep='\\n', file=open('classes.txt', 'w'))\"",
    "osfl server --models runs/sites/models/client-01.safetensors runs/sites/models/client-02.safetensors --method ensemble"
    " --architecture cnn-w8 --image-size 8 --channels 1 --classes classes.txt --smoke --out runs/fused",
)
EVERY = 5.0  # seconds between two looks at the inbox

Places = Annotated[
    list[Path] | None,
    typer.Argument(metavar="ROUND|MODEL...", readable=False, show_default=False,
                   help="The round's folder; `osfl enrol` makes one. After --models: more files."),
]  # fmt: skip
Key = Annotated[
    Path | None,
    typer.Option("--key", "-k", metavar="server.key", show_default=False,
                 help="The server's private key: it signs the release."),
]  # fmt: skip
Without = Annotated[
    list[str] | None,
    typer.Option("--without", metavar="SITE", show_default=False,
                 help="Leave this site's upload out, as one that the server phase failed at; repeat it for more."),
]  # fmt: skip
Wait = Annotated[bool, typer.Option("--wait", help="Look again every few seconds until the server phase may begin.")]


def server(
    places: Places = None,
    key: Key = None,
    wait: Wait = False,
    without: Without = None,
    models: market.Models = None,
    architecture: market.Architecture = None,
    classes: market.Classes = None,
    out: market.Out = None,
    method: market.FusedBy = "fedmitr",
    preset: market.Preset = "cpu",
    smoke: market.Smoke = False,
    changes: market.Changes = None,
    seed: market.Seed = 0,
    image_size: market.ImageSize = None,
    channels: market.Channels = None,
    pixels: market.Pixels = None,
    workers: options.Workers = None,
    threads: options.Threads = 1,
    device: options.Device = "cpu",
    format: options.Format = "text",
) -> None:
    """Make the release once all have delivered, or the plan's quorum has and its deadline, if any, is over (by this clock).

    Otherwise say who is missing: exit code 1. Killed, the same command continues; a release that is there stands.
    A server phase that fails names the upload that it failed at, where that is known: go on with --without.
    With --models there is no round to wait for: the files are checked, refused ones are named (exit code 1), the others fused.
    """
    from osfl.phases import Machine

    machine = Machine(workers=workers, threads=threads, device=device)
    if models:
        from osfl.market import Market
        from osfl.plan import parse_changes

        asked = _asked({"--architecture": architecture, "--classes": classes, "--out": out})
        files, listed = [*models, *(places or [])], Path(asked["--classes"])
        named = market.read_classes(listed)
        wanted = Market(files, str(asked["--architecture"]), named, method, with_smoke(preset, smoke), seed,
                        parse_changes(changes or ()), image_size, channels, pixels)  # fmt: skip
        market.fuse_models(wanted, listed, Path(asked["--out"]), machine, key, format)
        return
    _refuse_market_words()
    asked = _asked({"ROUND": places[0] if places and len(places) == 1 else None, "--key": key})
    _serve_round(Path(asked["ROUND"]), Path(asked["--key"]), wait, without or [], machine, format)


def _serve_round(round: Path, key: Path, wait: bool, without: Sequence[str], machine: Machine, format: str) -> None:
    from osfl.coordinator import serve, status
    from osfl.wire.signing import SigningKey

    signing = SigningKey.load(key)
    if wait:
        until_ready(lambda: status(round, without=without))
    with telling(format == "json") as progress:
        digest = serve(round, signing, machine=machine, progress=progress, without=without)
    found = status(round)
    if format == "json":
        put_json({"round": found.plan, "release": digest, "path": str(round / "release.safetensors"),
                  "personal": list(found.personal), "late": list(found.late),
                  "left_out": list(found.left_out)})  # fmt: skip
        return
    say(f"Release  {digest}")
    made_from = len(found.delivered) - len(found.late) - len(found.left_out)
    left_out = f", without {', '.join(found.left_out)}" if found.left_out else ""
    say(f"         made from {made_from} of {len(found.delivered) + len(found.missing)} uploads{left_out}")
    parts = f" and, to each site, its own file of {escape(str(round / 'personal'))}" if found.personal else ""
    say(f"Give {escape(str(round / 'release.safetensors'))} to every site{parts}; they run `osfl personalize`.")


def _asked(words: Mapping[str, str | Path | None]) -> dict[str, str | Path]:
    """What cannot be left out, all of it in one message."""
    missing = [word for word, value in words.items() if value is None]
    if missing:
        raise UsageError([f"{word} is missing" for word in missing], field=missing[0],
                         fix="For a round: osfl server ROUND --key server.key. For a market: osfl server --models FILE... "
                             "--architecture NAME --classes classes.txt --out DIR.")  # fmt: skip
    return {word: value for word, value in words.items() if value is not None}


def _refuse_market_words() -> None:
    """A round's plan says how its uploads are fused; words that say it again would be ignored, so they are refused."""
    said = [one.opts[0] for one in options.spoken() if getattr(one, "rich_help_panel", None) == market.MARKET]
    if said:
        raise UsageError(f"{', '.join(said)} belong to a market of models: the round's plan says how uploads are fused",
                         field="models", fix="Add --models FILE..., or leave that out.")  # fmt: skip


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
