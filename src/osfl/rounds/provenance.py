"""Verify the origin of bundles: signatures and digests, and a release traced back to its uploads.

Anybody can ask, without a private key. What could not be checked, for want of a file or a key, is reported, never skipped.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from osfl.core.errors import Rejected
from osfl.core.types import ClientId
from osfl.wire.bundle import Bundle
from osfl.wire.envelope import read_envelope
from osfl.wire.gate import (
    RELEASE_LIMITS,
    AcceptancePolicy,
    open_stored,
    open_upload,
    read_manifest,
    verify_release,
    verify_total,
)
from osfl.wire.source import opened
from osfl.wire.window import of_unknown_kind
from osfl.wire.withdrawn import Withdrawal, Withdrawn

EXCLUDED = "excluded/"  # before a client's name, among what a release names: left out by the coordinator
VALID = "not withdrawn by a certificate of forgetting"

Answer: TypeAlias = Literal["yes", "no", "not checked", "within tolerance", "different"]
CLOSE: Final = "within tolerance"  # of a release that was repeated: other bits, which prove no fraud
DIFFERENT: Final = "different"


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
    digest: str = ""  # empty unless the file was verified
    checks: Sequence[Check] = ()
    content: str = ""  # digest of its tensors and facts alone

    @property
    def good(self) -> bool:
        """Its signature was checked, and nothing was answered with no."""
        return bool(self.digest) and all(check.answer != "no" for check in self.checks)

    @property
    def different(self) -> bool:
        """Repeated elsewhere, it came out otherwise than a tolerance allows."""
        return any(check.answer == DIFFERENT for check in self.checks)


@dataclass(frozen=True)
class Known:
    """What the one who asks knows of the round."""

    plan: str  # digest: the round
    server: str = ""  # public key; without it releases cannot be verified
    policy: AcceptancePolicy | None = None  # keys and contracts; without it uploads cannot be verified
    others: Mapping[str, str] = field(default_factory=dict)  # "upload/north" -> digest, from a round folder
    withdrawn: Withdrawn | None = None  # what certificates of forgetting took back; None: nobody knows of any certificates
    current: Mapping[str, str] = field(default_factory=dict)  # what the round's own release names: "personal/north" -> digest
    last: str = ""  # digest of that release
    late: bool = True  # whether uploads may join a finished round, so that a release of fewer is an earlier one
    whole: bool = False  # a whole round folder is asked about: what its release names has to be there


def examine(files: Sequence[Path], known: Known) -> list[Verdict]:
    """Each file by itself, then what they say about each other."""
    verified: dict[Path, Bundle] = {}
    single = {path: _verify(path, known, verified) for path in files}
    gone = {path: found for path, bundle in verified.items() if (found := _withdrawal(path, bundle, known))}
    valid = [bundle for path, bundle in verified.items() if path not in gone]
    parts = [bundle for bundle in valid if bundle.kind in ("upload", "personal")]
    digests = {**known.others, **{_name(bundle): bundle.digest for bundle in parts}}
    releases = [bundle for bundle in valid if bundle.kind == "release"]
    later = {
        **{release.digest: release.made_from for release in releases},
        **({known.last: known.current} if known.last else {}),
    }
    named = {*known.current.values(), *(digest for release in releases for digest in release.made_from.values())}
    verdicts = []
    for path, check in single.items():
        bundle = verified.get(path)
        if bundle is None:
            verdicts.append(Verdict(path, checks=[check]))
            continue
        if bundle.kind == "release":
            origin = [
                *_traced(bundle, digests, known.whole),
                *([] if path in gone else _in_place(bundle, later if known.late else {}, known.last)),
            ]
        elif bundle.kind == "total":
            origin = list(_summed(bundle, known))
        else:
            origin = list(_named(bundle, releases))
        forgotten = _forgotten(bundle, gone.get(path), known, named)
        checks = [check, *origin, forgotten]
        verdicts.append(Verdict(path, bundle.kind, bundle.client, bundle.digest, checks, bundle.content))
    return verdicts


def _withdrawal(path: Path, bundle: Bundle, known: Known) -> Withdrawal | None:
    """Why an upload or a release must not be used any more."""
    return None if known.withdrawn is None or bundle.kind == "personal" else known.withdrawn.of(read_manifest(path))


def _forgotten(bundle: Bundle, why: Withdrawal | None, known: Known, named: Collection[str]) -> Check:
    """Whether a certificate took it back. Personal parts that a valid release names are valid: not every one changes."""
    question = VALID
    if known.withdrawn is None:
        return Check(question, "not checked", "no certificates are at hand: give --round or --certificates")
    if bundle.kind == "personal" and bundle.digest not in named:
        why = known.withdrawn.personal.get(bundle.digest)
    if why is not None:
        return Check(question, "no", f"{why}. Its signature is good, and it must not be used: delete this copy")
    return Check(question, "yes", f"certificates read: {known.withdrawn.certificates}")


def _verify(path: Path, known: Known, verified: dict[Path, Bundle]) -> Check:
    question = "signature, round and content"
    try:
        kind, client = _kind_and_client(path)
        if kind == "upload":
            if known.policy is None:
                return Check(question, "not checked", "the clients' keys are not known: give --round or --keys")
            verified[path] = _upload(path, known, client)
        else:
            if not known.server:
                return Check(question, "not checked", "the server's key is not known: give --server")
            verified[path] = (verify_total if kind == "total" else verify_release)(path, known.server, known.plan)
    except Rejected as no:
        return Check(question, "no", str(no))
    return Check(question, "yes")


def _upload(path: Path, known: Known, client: ClientId) -> Bundle:
    """An upload that is valid, or that was when its client signed it."""
    assert known.policy is not None
    if known.withdrawn is not None and known.withdrawn.of(read_manifest(path)) is not None:
        return open_upload(path, known.policy)[0]
    return open_stored(path, known.policy, client)[0]


def _kind_and_client(path: Path) -> tuple[str, ClientId]:
    """Kind and client as the manifest has them; nothing of it is verified yet."""
    with of_unknown_kind(), opened(path) as file:
        manifest = read_envelope(file, RELEASE_LIMITS).manifest
    return (str(manifest.get("kind")), str(manifest.get("client"))) if isinstance(manifest, dict) else ("", "")


def _name(bundle: Bundle) -> str:
    """As `made_from` of a release has it."""
    return f"{bundle.kind}/{bundle.client}"


def _summed(total: Bundle, known: Known) -> Iterator[Check]:
    """Whether a kept sum is of the uploads that the round's own release names, and of no other."""
    if known.last:
        same = dict(total.made_from) == _uploads_of(known.current)
        question, why = "the sum of the release's uploads", "it is the sum of other uploads: an older copy"
        yield Check(question, "yes") if same else Check(question, "no", why)


def _traced(release: Bundle, digests: Mapping[str, str], whole: bool) -> Iterator[Check]:
    """Each part that the release lists as its source, or comes with; a `whole` folder has to hold them all."""
    if not any(name.startswith("upload/") for name in release.made_from):
        yield Check("made from uploads", "not checked", "the release names none, as in a simulation that pools images")
    for name, digest in sorted(release.made_from.items()):
        if name.startswith(EXCLUDED):
            yield _left_out(name.removeprefix(EXCLUDED), digest, digests)
            continue
        question = f"made from {name}" if name.startswith("upload/") else f"comes with {name}"
        if name not in digests and whole:
            yield Check(question, "no", f"the folder lacks that file, deleted or damaged: it has the digest {digest}")
        elif name not in digests:
            yield Check(question, "not checked", f"that file was not given: it has the digest {digest}")
        elif digests[name] == digest:
            yield Check(question, "yes", digest)
        else:
            yield Check(question, "no", f"the release names {digest}, the file is {digests[name]}")


def _left_out(client: ClientId, digest: str, digests: Mapping[str, str]) -> Check:
    """Somebody whose upload was there, and whom the coordinator left out: the server signed that."""
    question, found = f"left out by the coordinator: {client}", digests.get(f"upload/{client}", digest)
    if found != digest:
        return Check(question, "no", f"the release names {digest}, the file is {found}")
    return Check(question, "yes", f"its upload was {digest}")


def _in_place(release: Bundle, later: Mapping[str, Mapping[str, str]], last: str) -> Iterator[Check]:
    """Whether it is the round's own release (`last`, where the folder is known), or another one took its place: one made from
    the same uploads and more, as where sites join late."""
    question, own = "a release of this round", _uploads_of(release.made_from)
    more = {digest: _uploads_of(made_from) for digest, made_from in later.items()}
    larger = {digest: uploads for digest, uploads in more.items() if own and own.items() < uploads.items()}
    if larger:
        final = max(larger, key=lambda digest: len(larger[digest]))
        joined = ", ".join(sorted(larger[final].keys() - own.keys()))
        yield Check(question, "yes", f"superseded by {final}, which is made from {joined}, too")
    elif last and release.digest != last:
        why = f"the round's folder has {last}, and no upload joined it: the folder was put back to an older state, or is a copy"
        yield Check(question, "no", why)


def _uploads_of(made_from: Mapping[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in made_from.items() if name.startswith("upload/")}


def _named(bundle: Bundle, releases: Sequence[Bundle]) -> Iterator[Check]:
    """Whether the release lists this upload or personal part."""
    for release in releases:
        if release.made_from.get(_name(bundle)) == bundle.digest:
            yield Check("named by the release", "yes")
        elif release.made_from.get(f"{EXCLUDED}{bundle.client}") == bundle.digest:
            yield Check("named by the release", "yes", "as one that the coordinator left out")
        elif bundle.kind == "personal":
            yield Check("named by the release", "no", "this part belongs to another release")
        else:
            yield Check("named by the release", "not checked", "it is no part of it: it came too late, or was left out")
