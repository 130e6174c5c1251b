"""`osfl verify`: signatures, digests, and a release traced back to its uploads."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.enrol import gather
from osfl.cli.terminal import escape, put_json, say
from osfl.errors import RoundError, UsageError

if TYPE_CHECKING:
    from osfl.provenance import Known, Verdict
    from osfl.wire.gate import Desk

EXAMPLES = (
    "osfl run --method ensemble --smoke --out runs/first",
    "osfl verify --round runs/first",
    "osfl verify runs/first/release.safetensors --round runs/first",
)
STYLES = {"yes": "green", "no": "bold red", "not checked": "yellow"}

Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[FILE...]", help="Uploads, releases, personal parts; default: all of --round.", show_default=False),
]  # fmt: skip
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="plan.toml", show_default=False, help="The plan; default: that of --round.")
]
Server = Annotated[
    Path | None, typer.Option("--server", metavar="server.pub", show_default=False, help="The server's public key.")
]
Round = Annotated[
    Path | None,
    typer.Option("--round", metavar="ROUND", show_default=False, help="A round's folder: its plan, its keys and its inbox."),
]  # fmt: skip
Keys = Annotated[
    Path | None, typer.Option("--keys", metavar="DIR", show_default=False, help="A folder of NAME.pub files, for uploads.")
]


def verify(
    files: Files = None, plan: PlanFile = None, server: Server = None, round: Round = None, keys: Keys = None,
    format: options.Format = "text",
) -> None:  # fmt: skip
    """Say what can be believed of each file, and what could not be checked. Exit code 1 unless every signature is good."""
    from osfl.provenance import examine

    if plan is None and round is None:
        raise UsageError("which round?", field="plan", fix="Give --plan plan.toml, or --round with the round's folder.")
    if not files and round is None:
        raise UsageError("there is no file to verify", field="file", fix="Name bundles, or a round's folder with --round.")
    known = _known(plan, server, round, keys)
    verdicts = examine(files or _files_of(round or Path()), known)
    good = bool(verdicts) and all(verdict.good for verdict in verdicts)
    if format == "json":
        put_json({"round": known.plan, "good": good, "files": [_facts(verdict) for verdict in verdicts]})
    else:
        _show(verdicts, good)
    if not good:
        raise typer.Exit(1)


def _known(plan: Path | None, server: Path | None, round: Path | None, keys: Path | None) -> Known:
    from osfl.provenance import Known
    from osfl.wire.agreed import read_json, standing_desk
    from osfl.wire.inbox import Inbox
    from osfl.wire.signing import read_public

    public = read_public(server) if server else ""
    if not public and keys is not None and (keys / "server.pub").exists():
        public = read_public(keys / "server.pub")
    if round is None:
        assert plan is not None
        desk = _desk(plan, keys)
        return Known(desk.plan, public, desk if keys is not None else None)
    desk = standing_desk(round)
    if plan is not None and (asked := _desk(plan, None).plan) != desk.plan:
        raise RoundError(f"{round} holds another round than {plan}", field="plan", expected=asked, got=desk.plan,
                         fix="Give the plan with which it was opened, or leave --plan out.")  # fmt: skip
    for client, own in gather(keys, []).items():
        if (enrolled := desk.enrolled.get(client, own)) != own:
            raise RoundError(f"{round} was opened with another key of {client} than yours", field=f"clients.{client}",
                             expected=own, got=enrolled, client=client,
                             fix="Somebody may have posed as this site: ask it for its key on another way.")  # fmt: skip
    # digests of uploads whose every byte was checked again
    others = {f"upload/{receipt.client}": receipt.digest for receipt in Inbox(round / "inbox", desk).uploads()}
    return Known(desk.plan, public or read_json(round / "enrolled.json")["server"], desk, others)


def _desk(plan: Path, keys: Path | None) -> Desk:
    """What a plan and a folder of keys say about uploads."""
    from osfl.plan import read_plan
    from osfl.wire.gate import Desk

    agreed = read_plan(plan)
    if keys is None:
        return Desk(agreed.digest, {}, {}, len(agreed.task.classes), agreed.limits)
    from osfl.registry import load
    from osfl.round import contracts_of

    contracts = contracts_of(load(agreed.method)(agreed.task, agreed.settings))
    return Desk(agreed.digest, gather(keys, []), contracts, len(agreed.task.classes), agreed.limits)


def _files_of(round: Path) -> list[Path]:
    found = [*(round / "inbox").glob("*.safetensors"), *(round / "personal").glob("*.safetensors")]
    release = round / "release.safetensors"
    return sorted(found) + ([release] if release.exists() else [])


def _facts(verdict: Verdict) -> dict[str, object]:
    return {"path": str(verdict.path), "good": verdict.good, "kind": verdict.kind, "client": verdict.client,
            "digest": verdict.digest or None,
            "checks": [{"question": c.question, "answer": c.answer, "why": c.why} for c in verdict.checks]}  # fmt: skip


def _show(verdicts: Sequence[Verdict], good: bool) -> None:
    for verdict in verdicts:
        who = f"{verdict.kind} {verdict.client}".strip() or "a file"
        say(f"[bold]{escape(str(verdict.path))}[/]: {who}{f', {verdict.digest}' if verdict.digest else ''}")
        for check in verdict.checks:
            say(f"  [{STYLES[check.answer]}]{check.answer}[/]  {escape(check.question)}"
                + (f": {escape(check.why)}" if check.why else ""))  # fmt: skip
    open_questions = sum(check.answer == "not checked" for verdict in verdicts for check in verdict.checks)
    rest = f" Not checked: {open_questions}." if open_questions else ""
    say(f"[green]Every signature is good.[/]{rest}" if good else f"[bold red]Not everything can be believed.[/]{rest}")
