"""`osfl verify`: check signatures and digests, and trace a release back to its uploads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from osfl.cli import options
from osfl.cli.enroll import gather
from osfl.cli.progress import progress_display
from osfl.cli.terminal import echo, escape, put_json
from osfl.core.errors import Rejected, RoundError, UsageError
from osfl.core.types import Json, canonical

if TYPE_CHECKING:
    from osfl.rounds.provenance import Known, Verdict
    from osfl.wire.bundle import Bundle
    from osfl.wire.gate import AcceptancePolicy

EXAMPLES = (
    "osfl run --method ensemble --smoke --out runs/first",
    "osfl verify --round runs/first",
    "osfl verify runs/first/release.safetensors --round runs/first",
    "osfl verify --round runs/first --replay",
)
STYLES = {
    "yes": "green",
    "no": "bold red",
    "not checked": "yellow",
    "within tolerance": "green",
    "different": "bold yellow",
}
DIFFERENT = 3  # exit code: nothing is forged that could be checked, and a repetition came out otherwise

Files = Annotated[
    list[Path] | None,
    typer.Argument(metavar="[FILE...]", help="Uploads, releases, personal parts; default: all of --round.", show_default=False),
]
PlanFile = Annotated[
    Path | None, typer.Option("--plan", metavar="plan.toml", show_default=False, help="The plan; default: that of --round.")
]
Server = Annotated[
    Path | None, typer.Option("--server", metavar="server.pub", show_default=False, help="The server's public key.")
]
Round = Annotated[
    Path | None,
    typer.Option("--round", metavar="ROUND", show_default=False, help="A round's folder: its plan, its keys and its inbox."),
]
Keys = Annotated[
    Path | None, typer.Option("--keys", metavar="DIR", show_default=False, help="A folder of NAME.pub files, for uploads.")
]

Head = Annotated[
    Path | None,
    typer.Option(
        "--head",
        metavar="head.json",
        show_default=False,
        help="A copy that somebody kept: finds a folder that was put back; beside a release alone, what it was computed with.",
    ),
]
Replay = Annotated[
    bool, typer.Option("--replay", help="Repeat the server phase from the uploads of --round, and compare the release.")
]
Tolerance = Annotated[
    float,
    typer.Option(
        "--tolerance",
        metavar="SHARE",
        min=0.0,
        help="With --replay, where bits differ: how much numbers may, as a share of the largest of their tensor.",
    ),
]


def verify(
    files: Files = None,
    plan: PlanFile = None,
    server: Server = None,
    fl_round: Round = None,
    keys: Keys = None,
    certificates: options.Certificates = None,
    head: Head = None,
    replayed: Replay = False,
    tolerance: Tolerance = 1e-3,
    output_format: options.Format = "text",
) -> None:
    """Verify the signature and origin of each file, and list what could not be checked.

    Exit code 1 unless every signature is good, nothing was withdrawn by a certificate of forgetting, and the folder of --round
    holds what the server last signed; 3 if all that holds and --replay came to numbers beyond the tolerance.
    """
    from osfl.rounds.head import examine_head
    from osfl.rounds.provenance import examine

    if plan is None and fl_round is None:
        raise UsageError("which round?", field="plan", fix="Give --plan plan.toml, or --round with the round's folder.")
    if not files and fl_round is None:
        raise UsageError("there is no file to verify", field="file", fix="Name bundles, or a round's folder with --round.")
    paths = files or _files_of(fl_round or Path())
    known = _with_certificates(_known(plan, server, fl_round, keys), paths, fl_round, certificates)
    known = replace(known, whole=not files)
    verdicts = examine(paths, known)
    if fl_round is not None:
        judged = examine_head(fl_round, known.plan, known.server, known.last, head)
        verdicts += [judged] if judged else []
    else:
        verdicts = _with_numerics(verdicts, known, head)
    difference = None
    if replayed:
        verdicts, difference = _replayed(verdicts, fl_round, tolerance, output_format)
    good = bool(verdicts) and all(verdict.good for verdict in verdicts)
    if output_format == "json":
        put_json(
            {"round": known.plan, "good": good, "difference": difference, "files": [_facts(verdict) for verdict in verdicts]}
        )
    else:
        _show(verdicts, good)
    if not good:
        raise typer.Exit(1)
    if any(verdict.different for verdict in verdicts):
        raise typer.Exit(DIFFERENT)


def _with_numerics(verdicts: Sequence[Verdict], known: Known, head: Path | None) -> list[Verdict]:
    """Releases with what they were computed with, from a head that was given or lies beside them."""
    from osfl.rounds.head import computed_with

    if head is not None and not known.server:
        raise UsageError(
            "a head can be verified with the server's key only",
            field="server",
            fix="Give --server server.pub, or --round ROUND.",
        )
    found = []
    for one in verdicts:
        copy = head or one.path.parent / "head.json"
        if known.server and one.kind == "release" and one.digest and copy.exists():
            one = replace(one, checks=[*one.checks, computed_with(copy, known.plan, known.server, one.digest)])
        found.append(one)
    return found


def _replayed(
    verdicts: Sequence[Verdict], fl_round: Path | None, tolerance: float, output_format: str
) -> tuple[list[Verdict], float | None]:
    """The verdict about the folder's release, with the answer of a repeated server phase."""
    from osfl.roles.replay import replay

    if fl_round is None:
        raise UsageError("--replay needs the uploads of the round", field="round", fix="Give --round ROUND.")
    with progress_display(output_format == "json") as progress:
        check, difference = replay(fl_round, tolerance, progress=progress)
    released = fl_round / "release.safetensors"
    found = [replace(one, checks=[*one.checks, check]) if one.path == released else one for one in verdicts]
    return found, difference


def _known(plan: Path | None, server: Path | None, fl_round: Path | None, keys: Path | None) -> Known:
    from osfl.rounds.head import check_fixed_files
    from osfl.rounds.provenance import Known
    from osfl.rounds.state import check_whole, read_json, read_policy
    from osfl.wire.inbox import Inbox
    from osfl.wire.signing import read_public

    public = read_public(server) if server else ""
    if not public and keys is not None and (keys / "server.pub").exists():
        public = read_public(keys / "server.pub")
    if fl_round is None:
        assert plan is not None
        policy = _policy(plan, keys)
        return Known(policy.plan, public, policy if keys is not None else None)
    check_whole(fl_round)
    policy = read_policy(fl_round)
    if public and public != policy.server:
        raise RoundError(
            f"{fl_round} names another key of the server than yours",
            field="enrolled.server",
            expected=public,
            got=policy.server,
            fix="Somebody may have opened a round in the server's name: ask it for its key on another way.",
        )
    check_fixed_files(fl_round, policy.server)
    if plan is not None and (asked := _policy(plan, None).plan) != policy.plan:
        raise RoundError(
            f"{fl_round} holds another round than {plan}",
            field="plan",
            expected=asked,
            got=policy.plan,
            fix="Give the plan with which it was opened, or leave --plan out.",
        )
    for client, own in gather(keys, []).items():
        if (enrolled := policy.enrolled.get(client, own)) != own:
            raise RoundError(
                f"{fl_round} was opened with another key of {client} than yours",
                field=f"clients.{client}",
                expected=own,
                got=enrolled,
                client=client,
                fix="Somebody may have posed as this site: ask it for its key on another way.",
            )
    # digests of uploads whose every byte was checked again
    inbox = Inbox(fl_round / "inbox", policy)
    valid = [client for client in inbox.delivered() if inbox.digest(client) not in policy.withdrawn.digests]
    others = {f"upload/{client}": inbox.bundle(client).digest for client in valid}
    late = bool(read_json(fl_round / "plan.json").get("round", {}).get("late"))
    return Known(policy.plan, public or policy.server, policy, others, late=late)


def _with_certificates(known: Known, files: Sequence[Path], fl_round: Path | None, copies: Path | None) -> Known:
    """What was forgotten, from the round's folder, the folder in which a file lies, and copies that were kept elsewhere."""
    from osfl.rounds.state import CERTIFICATES, beside, certificates, certificates_at, removed_uploads
    from osfl.wire.withdrawn import withdrawn_by

    near = list(dict.fromkeys(place for path in files if fl_round is None and (place := beside(path)) is not None))
    if copies is None and fl_round is None and not (near and known.server):
        return known
    if not known.server:
        raise UsageError(
            "certificates of forgetting can be verified with the server's key only",
            field="server",
            fix="Give --server server.pub.",
        )
    own = certificates(fl_round, known.server) if fl_round else []
    kept = [entry for place in [*near, *filter(None, [copies])] for entry in certificates_at(place, known.server, known.plan)]
    if fl_round is not None:
        _check_complete(fl_round / CERTIFICATES, own, kept, known.plan)
        last = _release_of(fl_round, known)
        known = replace(known, current=last.made_from if last else {}, last=last.digest if last else "")
    every = {canonical(entry): entry for entry in [*own, *kept]}.values()
    if known.policy is not None and fl_round is not None and not every:
        return replace(known, withdrawn=known.policy.withdrawn)  # perhaps of the first encounter
    ordered = sorted(every, key=lambda entry: int(entry["number"]))
    policy = (
        replace(known.policy, server=known.server, forgotten=removed_uploads(ordered)) if known.policy is not None else None
    )
    return replace(known, policy=policy, withdrawn=withdrawn_by(ordered))


def _check_complete(place: Path, own: Sequence[Mapping[str, Json]], kept: Sequence[Mapping[str, Json]], plan: str) -> None:
    """A certificate of another round, or one that is gone. That the last ones are gone shows in copies only."""
    from osfl.wire.withdrawn import missing_numbers

    strange = [entry["number"] for entry in own if entry["plan"] != plan]
    if strange:
        raise RoundError(
            f"{place} holds certificates of another round",
            field="certificate",
            expected=plan,
            got=f"number {', '.join(map(str, strange))}",
            fix="Somebody put them there: remove them.",
        )
    there = {entry["number"] for entry in own}
    missing = sorted({*missing_numbers(own), *(entry["number"] for entry in kept if entry["number"] not in there)})
    if missing:
        raise RoundError(
            f"{place} lacks certificates of forgetting that the server signed",
            field="certificate",
            expected=f"number {', '.join(map(str, missing))}",
            got=f"{len(own)} certificate(s)",
            fix="Somebody deleted them: restore them from a copy, and do not use this folder before.",
        )


def _release_of(fl_round: Path, known: Known) -> Bundle | None:
    """The round's own release, if there is one that is valid."""
    from osfl.wire.gate import verify_release

    assert known.policy is not None
    try:
        return verify_release(fl_round / "release.safetensors", known.server, known.plan, withdrawn=known.policy.withdrawn)
    except Rejected:  # it is judged as a file, if somebody asks for it
        return None


def _policy(plan: Path, keys: Path | None) -> AcceptancePolicy:
    """What a plan and a folder of keys say about uploads."""
    from osfl.core.plan import read_plan
    from osfl.wire.gate import AcceptancePolicy

    round_plan = read_plan(plan)
    if keys is None:
        return AcceptancePolicy(
            round_plan.digest, {}, {}, len(round_plan.task.classes), round_plan.limits, several=round_plan.task.several
        )
    from osfl.core.registry import load
    from osfl.rounds.folder import contracts_of
    from osfl.wire.masks import keys_digest

    contracts = contracts_of(load(round_plan.method)(round_plan.task, round_plan.settings), round_plan)
    enrolled = gather(keys, [])
    policy = AcceptancePolicy(
        round_plan.digest, enrolled, contracts, len(round_plan.task.classes), round_plan.limits, several=round_plan.task.several
    )
    return replace(policy, keys=keys_digest(enrolled)) if round_plan.secure_sum else policy


def _files_of(fl_round: Path) -> list[Path]:
    found = [*(fl_round / "inbox").glob("*.safetensors"), *(fl_round / "personal").glob("*.safetensors")]
    kept = [fl_round / name for name in ("release.safetensors", "total.safetensors")]
    return sorted(found) + [path for path in kept if path.exists()]


def _facts(verdict: Verdict) -> dict[str, object]:
    return {
        "path": str(verdict.path),
        "good": verdict.good,
        "kind": verdict.kind,
        "client": verdict.client,
        "digest": verdict.digest or None,
        "content": verdict.content or None,
        "checks": [{"question": c.question, "answer": c.answer, "why": c.why} for c in verdict.checks],
    }


def _show(verdicts: Sequence[Verdict], good: bool) -> None:
    from osfl.rounds.provenance import VALID

    for verdict in verdicts:
        who = f"{verdict.kind} {verdict.client}".strip() or "a file"
        echo(f"[bold]{escape(str(verdict.path))}[/]: {who}{f', {verdict.digest}' if verdict.digest else ''}")
        if verdict.kind == "release" and verdict.content:
            echo(f"  content {verdict.content}")
        for check in verdict.checks:
            echo(
                f"  [{STYLES[check.answer]}]{check.answer}[/]  {escape(check.question)}"
                + (f": {escape(check.why)}" if check.why else "")
            )
    open_questions = sum(check.answer == "not checked" for verdict in verdicts for check in verdict.checks)
    rest = f" Not checked: {open_questions}." if open_questions else ""
    asked = all(check.answer == "yes" for verdict in verdicts for check in verdict.checks if check.question == VALID)
    withdrawn = " Nothing was withdrawn." if asked else ""
    text = f"[green]Every signature is good.{withdrawn}[/]" if good else "[bold red]Not everything could be verified.[/]"
    echo(f"{text}{rest}")
    if any(verdict.different for verdict in verdicts):
        echo("[bold yellow]Repeated here, the release has other numbers: repeat it on the server's kind of machine.[/]")
