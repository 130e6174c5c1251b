"""Verify certificates of forgetting: check signatures and uploads, repeat the server phase, search for left-over bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from osfl.core.errors import OsflError, RoundError
from osfl.core.method import Context, Method, add_up, quiet
from osfl.core.plan import plan_from
from osfl.core.registry import is_reference, load
from osfl.core.types import ClientId, Json, Plan, Progress
from osfl.rounds.folder import TOTAL, Round, first_encounter
from osfl.rounds.forgetting.execution import left_over
from osfl.rounds.forgetting.request import RELEASE
from osfl.rounds.phases import computing
from osfl.rounds.state import CERTIFICATES, certificates, check_whole, read_json, read_policy
from osfl.rounds.total import read_total
from osfl.runtime.machine import Machine
from osfl.wire.gate import verify_release
from osfl.wire.signing import SigningKey


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    check: str
    good: bool
    detail: str


def verify(folder: Path, *, workers: int | None = None, progress: Progress = quiet) -> list[Finding]:
    """Repeat the proof of all that was forgotten here. Needs no private key, and changes nothing in the folder."""
    folder = first_encounter(folder)
    check_whole(folder)
    plan = plan_from(read_json(folder / "plan.json"), str(folder / "plan.json"))
    policy = read_policy(folder)  # refuses certificates that the server did not sign
    fl_round, known = Round(folder, plan, policy, policy.server), certificates(folder, policy.server)
    if not known:
        raise RoundError(
            "nothing was forgotten in this round",
            field="round",
            expected=f"certificates in {CERTIFICATES}/",
            got="none",
            fix="Forget something first: osfl forget ROUND --client NAME.",
        )
    machine = Machine(workers=workers, **known[-1]["machine"])
    return [
        _looked("certificates", lambda: _chain(plan, known)),
        _looked("uploads", lambda: _uploads(fl_round)),
        _looked("release", lambda: _release(fl_round, known[-1], machine, progress)),
        *([_looked("total", lambda: _total(fl_round))] if (folder / TOTAL).exists() else []),
        _looked("parts", lambda: _parts(fl_round)),
        _looked("bytes", lambda: _bytes(fl_round, known)),
    ]


def _looked(check: str, work: Callable[[], str]) -> Finding:
    """What a check found, whichever way it ends."""
    try:
        return Finding(check, True, work())
    except OsflError as no:
        return Finding(check, False, str(no).replace("\n", " "))


def _chain(plan: Plan, known: Sequence[Mapping[str, Json]]) -> str:
    """Certificates are of this round, none is missing, and each one begins with the release where the one before ended."""
    for number, (before, certificate) in enumerate(zip([None, *known], known, strict=False), start=1):
        if certificate["number"] != number or certificate["plan"] != plan.digest:
            raise _wrong(
                "certificate",
                "a certificate is missing, or of another round",
                f"number {number} of {plan.digest}",
                f"number {certificate['number']} of {certificate['plan']}",
            )
        ended = before["release"]["after"] if before else ""
        if ended and certificate["release"]["before"] != ended and not plan.late:  # else sites may have joined between
            raise _wrong(
                "certificate",
                f"certificate {number} does not go on from the one before",
                ended,
                certificate["release"]["before"],
            )
    return f"{len(known)} signed by the server"


def _uploads(fl_round: Round) -> str:
    """Nothing of the forgotten is in the inbox; what is left of others is what the certificate names."""
    back = [client for client in fl_round.policy.gone if fl_round.inbox.path(client).exists()]
    if back:
        raise RoundError(
            "there is an upload of a client that was forgotten",
            field="inbox",
            expected="none",
            got=", ".join(sorted(back)),
            fix="It arrived while it was forgotten, or somebody put it there: remove that file.",
        )
    reduced = [fl_round.inbox.bundle(client).client for client, left in sorted(fl_round.policy.forgotten.items()) if left]
    gone = len(fl_round.policy.forgotten) - len(reduced)
    return f"{gone} gone, {len(reduced)} without a class as certified"


def _release(fl_round: Round, last: Mapping[str, Json], machine: Machine, progress: Progress) -> str:
    """The server phase on the uploads that are left gives this very release."""
    path, certified = fl_round.folder / RELEASE, last["release"]["after"]
    if not path.exists():
        if certified:
            raise _wrong("release", "the certified release is missing", certified, "nothing")
        return "there is none, as certified"
    shared = verify_release(path, fl_round.server, fl_round.plan.digest)
    if certified and shared.digest != certified and not fl_round.plan.late:
        raise _wrong("release", "it is not the release that was certified", certified, shared.digest)
    method = load(fl_round.plan.method)(fl_round.plan.task, fl_round.plan.settings)
    if is_reference(method):
        return f"{shared.digest}; {fl_round.plan.method} learns from images: repeat it with `{last['again'] or 'osfl run'}`"
    made_from = [name.removeprefix("upload/") for name in shared.made_from if name.startswith("upload/")]
    repeated = _repeated(fl_round, method, made_from, machine, progress)
    if repeated != shared.digest:
        raise _wrong("release", "the server phase on what is left gives another release", repeated, shared.digest)
    later = f"; sites joined after the certified {certified}" if certified and shared.digest != certified else ""
    return f"{shared.digest}, again from {len(made_from)} uploads{later}"


def _repeated(fl_round: Round, method: Method, among: Sequence[ClientId], machine: Machine, progress: Progress) -> str:
    """The digest of a release made once more, outside the round folder. A key of no importance signs it: digests know none."""
    uploads, made_from = fl_round.uploads(among)
    with TemporaryDirectory(prefix="osfl-verify-") as scratch:
        key = SigningKey.generate()
        aside = replace(fl_round, folder=Path(scratch), server=key.public_hex, server_key=key)
        with computing(fl_round.plan, machine, progress, aside.scratch) as ctx:
            aside.publish(method.server_phase(uploads, ctx), made_from, fl_round.excluded(made_from))
        published = aside.release()
    assert published is not None
    return published[1]


def _total(fl_round: Round) -> str:
    """The kept sum is that of the uploads which it names, all of them left."""
    kept = read_total(fl_round)
    if kept is None:
        raise _wrong("total", "it is not what the server signed", f"a signature by {fl_round.server}", "another, or damage")
    uploads, made_from = fl_round.uploads(kept.made_from)
    method = load(fl_round.plan.method)(fl_round.plan.task, fl_round.plan.settings)
    if made_from != kept.made_from:
        raise _wrong("total", "it is the sum of other uploads than are left", sorted(made_from), sorted(kept.made_from))
    again = add_up(method, uploads, Context(fl_round.plan, torch.device("cpu")))
    if again.images != kept.total.images or any(
        not torch.equal(value, kept.total.tensors[name]) for name, value in again.tensors.items()
    ):
        raise _wrong("total", "it is not the sum of the uploads that it names", "their sum", "another")
    return f"the sum of {len(made_from)} uploads, added up again"


def _parts(fl_round: Round) -> str:
    """Every personal part is one that the release names, and it is that one."""
    published = fl_round.release()
    named = {f"{client}.safetensors" for client in published[0].personal} if published else set()
    there = {path.name for path in (fl_round.folder / "personal").glob("*")}
    if there != named:
        raise _wrong(
            "personal",
            "the personal parts are not those of the release",
            ", ".join(sorted(named)) or "none",
            ", ".join(sorted(there)) or "none",
        )
    return f"{len(named)}, as the release names them"


def _bytes(fl_round: Round, known: Sequence[Mapping[str, Json]]) -> str:
    traces = sorted({trace for certificate in known for trace in certificate["traces"]})
    left_over(fl_round, traces)
    return f"none of {len(traces)} fingerprints under the round folder"


def _wrong(field: str, reason: str, expected: object, got: object) -> RoundError:
    return RoundError(
        reason,
        field=field,
        expected=expected,
        got=got,
        fix="This folder is not what was certified: forget again in a copy, or ask who changed it.",
    )
