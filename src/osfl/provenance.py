"""Who said it, and what it was made of: signatures and digests of bundles, and a release traced back to its uploads.

Anybody can ask, without a private key. What could not be checked, for want of a file or a key, is said, never passed over.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeAlias

from osfl.errors import Rejected
from osfl.protocol import ClientId
from osfl.wire.bundle import Bundle
from osfl.wire.envelope import read_envelope
from osfl.wire.gate import RELEASE_LIMITS, Desk, open_standing, verify_release
from osfl.wire.source import opened
from osfl.wire.window import of_unknown_kind

Answer: TypeAlias = Literal["yes", "no", "not checked"]


@dataclass(frozen=True)
class Check:
    """One question about a file, and its answer."""

    question: str
    answer: Answer
    why: str = ""


@dataclass(frozen=True)
class Verdict:
    """What is known about one file."""

    path: Path
    kind: str = ""
    client: ClientId = ""
    digest: str = ""  # empty unless the file was believed
    checks: Sequence[Check] = ()

    @property
    def good(self) -> bool:
        """Its signature was checked, and nothing was answered with no."""
        return bool(self.digest) and all(check.answer != "no" for check in self.checks)


@dataclass(frozen=True)
class Known:
    """What the one who asks knows of the round."""

    plan: str  # digest: the round
    server: str = ""  # public key; without it releases cannot be believed
    desk: Desk | None = None  # keys and contracts; without it uploads cannot be believed
    others: Mapping[str, str] = field(default_factory=dict)  # "upload/north" -> digest, from a round folder


def examine(files: Sequence[Path], known: Known) -> list[Verdict]:
    """Each file by itself, then what they say about each other."""
    believed: dict[Path, Bundle] = {}
    alone = {path: _believe(path, known, believed) for path in files}
    digests = {**known.others, **{_name(bundle): bundle.digest for bundle in believed.values() if bundle.kind != "release"}}
    releases = [bundle for bundle in believed.values() if bundle.kind == "release"]
    verdicts = []
    for path, check in alone.items():
        bundle = believed.get(path)
        if bundle is None:
            verdicts.append(Verdict(path, checks=[check]))
            continue
        origin = _traced(bundle, digests) if bundle.kind == "release" else _named(bundle, releases)
        verdicts.append(Verdict(path, bundle.kind, bundle.client, bundle.digest, [check, *origin]))
    return verdicts


def _believe(path: Path, known: Known, believed: dict[Path, Bundle]) -> Check:
    question = "signature, round and content"
    try:
        kind, client = _said(path)
        if kind == "upload":
            if known.desk is None:
                return Check(question, "not checked", "the clients' keys are not known: give --round or --keys")
            believed[path] = open_standing(path, known.desk, client)[0]
        else:
            if not known.server:
                return Check(question, "not checked", "the server's key is not known: give --server")
            believed[path] = verify_release(path, known.server, known.plan)
    except Rejected as no:
        return Check(question, "no", str(no))
    return Check(question, "yes")


def _said(path: Path) -> tuple[str, ClientId]:
    """Kind and client as the manifest has them; nothing of it is believed yet."""
    with of_unknown_kind(), opened(path) as file:
        manifest = read_envelope(file, RELEASE_LIMITS).manifest
    return (str(manifest.get("kind")), str(manifest.get("client"))) if isinstance(manifest, dict) else ("", "")


def _name(bundle: Bundle) -> str:
    """As `made_from` of a release has it."""
    return f"{bundle.kind}/{bundle.client}"


def _traced(release: Bundle, digests: Mapping[str, str]) -> Iterator[Check]:
    """Each part that the release says it was made of, or comes with."""
    if not any(name.startswith("upload/") for name in release.made_from):
        yield Check("made from uploads", "not checked", "the release names none, as in a simulation that pools images")
    for name, digest in sorted(release.made_from.items()):
        question = f"made from {name}" if name.startswith("upload/") else f"comes with {name}"
        if name not in digests:
            yield Check(question, "not checked", f"that file was not given: it has the digest {digest}")
        elif digests[name] == digest:
            yield Check(question, "yes", digest)
        else:
            yield Check(question, "no", f"the release names {digest}, the file is {digests[name]}")


def _named(bundle: Bundle, releases: Sequence[Bundle]) -> Iterator[Check]:
    """Whether the release speaks of this upload or personal part."""
    for release in releases:
        if release.made_from.get(_name(bundle)) == bundle.digest:
            yield Check("named by the release", "yes")
        elif bundle.kind == "personal":
            yield Check("named by the release", "no", "this part belongs to another release")
        else:
            yield Check("named by the release", "not checked", "it is no part of it: it came too late, or was left out")
