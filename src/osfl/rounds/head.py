"""The head of a round folder: what the folder held when the server last signed something, so that a later change shows.

head.json holds the digests of the release, of all certificates of forgetting and of the files that were agreed on, and of the
logs as far as they had been written. The server signs it before a release and after a certificate. Each head names the one
before it. Whoever keeps a copy can tell that a whole folder was put back to an older state; the folder alone cannot.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from osfl.core.errors import RoundError
from osfl.core.types import Json, canonical, digest_of
from osfl.rounds.provenance import Check, Verdict
from osfl.rounds.state import CERTIFICATES, read_json
from osfl.runtime.atomic import replace_atomically
from osfl.wire.refusals import HEAD, JOURNAL
from osfl.wire.signing import SigningKey, VerifyKey

FIXED_FILES = ("plan.json", "contract.json", "enrolled.json")
LOGS = ("journal.jsonl", JOURNAL)


def sign_head(folder: Path, plan: str, release: str, key: SigningKey) -> None:
    """Sign what the folder holds; `release` is the digest of the release that it has, or is about to get."""
    path = folder / HEAD
    before = read_head(path, key.public_hex) if path.exists() else {}
    head = {
        "plan": plan,
        "number": int(before.get("number", 0)) + 1,
        "before": digest_of(before) if before else "",
        "release": release,
        "certificates": _certificates(folder),
        "files": {name: _sha256(folder / name) for name in FIXED_FILES},
        "logs": {name: _written(folder / name) for name in LOGS},
        "numerics": _numerics(),
    }
    signed = {"head": head, "signature": key.sign(canonical(head))}
    replace_atomically(path, json.dumps(signed, indent=1, sort_keys=True).encode())


def _numerics() -> dict[str, str]:
    """Versions and instruction set that a release was computed with; empty for a process that computes nothing."""
    if "torch" not in sys.modules:
        return {}
    from osfl.runtime.environment import numerics

    return numerics()


def read_head(path: Path, server: str) -> Mapping[str, Json]:
    """A head, refused unless the server signed it."""
    content, good = read_json(path), False
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        good = VerifyKey(server).verify(canonical(content["head"]), content["signature"])
    if not good:
        raise RoundError(
            f"{path.name} is not what the server signed",
            field="head",
            expected=f"a signature by {server}",
            fix="It was edited or damaged: restore it from a copy, and ask who changed it.",
        )
    head: Mapping[str, Json] = content["head"]
    return head


def check_fixed_files(folder: Path, server: str) -> None:
    """Refuse a folder whose plan, contract or keys are not what the server signed; nothing else in it can be judged then."""
    if not (folder / HEAD).exists():
        return
    head = read_head(folder / HEAD, server)
    changed = [name for name in FIXED_FILES if head["files"][name] != _sha256(folder / name)]
    if changed:
        raise RoundError(
            f"{', '.join(changed)} in {folder} is not what the server signed",
            field=changed[0],
            expected=head["files"][changed[0]],
            got=_sha256(folder / changed[0]) or "nothing",
            fix="It was edited or damaged: restore it from a copy, and ask who changed it.",
        )


def examine_head(folder: Path, plan: str, server: str, release: str, copy: Path | None = None) -> Verdict | None:
    """Whether the folder still holds what the server last signed; None before it has signed anything here. `release` is the
    digest of the one that the folder has, or "".

    `copy`: a head of this round that somebody kept, which shows whether the folder was put back to an older state.
    """
    path, question = folder / HEAD, "the head is signed by the server, for this round"
    if not path.exists() and not release and copy is None:
        return None
    try:
        head = read_head(path, server)
        if head["plan"] != plan:
            return Verdict(path, "head", checks=[Check(question, "no", "it is of another round")])
        checks = [Check(question, "yes"), *_compared(folder, head, release, server), *_against(head, copy, server, plan)]
        return Verdict(path, "head", digest=digest_of(head), checks=checks)
    except (RoundError, AttributeError, KeyError, TypeError, ValueError) as error:
        return Verdict(path, "head", checks=[Check(question, "no", str(error).replace("\n", " "))])


def _compared(folder: Path, head: Mapping[str, Json], release: str, server: str) -> Iterator[Check]:
    yield _same("the release is the one that it names", head["release"], release, "an older copy, or a deleted file")
    certificates = _certificates(folder)
    yield _same("certificates of forgetting are those that it names", head["certificates"], certificates, "deleted or put back")
    check_fixed_files(folder, server)
    yield Check(f"{', '.join(FIXED_FILES)} are as they were", "yes")
    for name in LOGS:
        written = _written(folder / name, head["logs"][name]["bytes"])
        yield _same(f"{name} begins as it did", head["logs"][name], written, "lines were edited or deleted")


def _against(head: Mapping[str, Json], copy: Path | None, server: str, plan: str) -> Iterator[Check]:
    question = "no newer state of this round is known"
    if copy is None:
        yield Check(question, "not checked", "no copy of head.json was given (--head)")
        return
    known = read_head(copy, server)
    if known["plan"] != plan:
        yield Check(question, "not checked", "the copy is of another round")
    elif known["number"] > head["number"]:
        why = f"the copy is head number {known['number']}, this one number {head['number']}: the folder was put back"
        yield Check(question, "no", why)
    elif known["number"] == head["number"] and known != head:
        yield Check(question, "no", f"the server signed two different heads with number {head['number']}")
    else:
        yield Check(question, "yes", f"the copy is head number {known['number']}, this one number {head['number']}")


def computed_with(copy: Path, plan: str, server: str, release: str) -> Check:
    """What a release was computed with, for whoever has it and a head, but not the round's folder."""
    question = "what it was computed with is known"
    head = read_head(copy, server)
    if head["plan"] != plan or head["release"] != release:
        return Check(question, "not checked", f"{copy.name} is of another {'round' if head['plan'] != plan else 'release'}")
    computed = ", ".join(f"{name} {value}" for name, value in head.get("numerics", {}).items())
    if not computed:
        return Check(question, "not checked", f"{copy.name} does not say")
    return Check(question, "yes", f"{computed}; the server signed it")


def _same(question: str, named: Json, found: Json, otherwise: str) -> Check:
    return Check(question, "yes") if named == found else Check(question, "no", f"it is not: {otherwise}")


def _certificates(folder: Path) -> list[str]:
    return [digest_of(read_json(path)["certificate"]) for path in sorted((folder / CERTIFICATES).glob("*.json"))]


def _written(path: Path, count: int | None = None) -> dict[str, Json]:
    """How long a log is, and what it holds; of a longer one its first `count` bytes."""
    data = path.read_bytes() if path.exists() else b""
    return {"bytes": len(data[:count]), "sha256": hashlib.sha256(data[:count]).hexdigest()}


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else ""
