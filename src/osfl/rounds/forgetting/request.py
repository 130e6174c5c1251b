"""What is to be forgotten, worked out and refused if need be, before anything is touched.

The answer is an intent: plain JSON that goes to `forgetting.json` and holds all that the later steps need, for they may
run in another process after a crash.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from osfl.core.errors import RoundError, UsageError, nearest
from osfl.core.method import Method
from osfl.core.registry import is_reference, load, names
from osfl.core.tensors import RawTensor
from osfl.core.types import ClientId, Payload, Plan
from osfl.rounds.folder import TOTAL, Round
from osfl.rounds.forgetting.traces import sample
from osfl.rounds.state import CERTIFICATES, INTENT, JUDGMENT, certificates, upload_hash_path
from osfl.rounds.storage import payload_of
from osfl.rounds.total import read_total
from osfl.runtime.atomic import TEMPORARY
from osfl.runtime.payloads import to_raw
from osfl.runtime.sbom import NAME as SBOM
from osfl.wire.bundle import pack
from osfl.wire.gate import open_upload, verify_release
from osfl.wire.refusals import HEAD, JOURNAL
from osfl.wire.repair import REPAIRS, REQUEST

FORMAT = 1
RELEASE = "release.safetensors"
MADE_OF_IT = (
    "personal",
    "models",
    "figures",
    "scratch",
    "report",
    "results.json",
    JUDGMENT,
    SBOM,
    "summaries",  # what sites measured about the old release
    "model_card.md",
    "fusion.json",
    "model.safetensors",
    "everyone-has-it",  # a note of osfl.deploy.flower.app about the old release
)
ROUND = (
    RELEASE,
    TOTAL,
    *MADE_OF_IT,
    "inbox",
    "partial",
    ".dashboard",
    "journal.jsonl",
    JOURNAL,
    HEAD,
    REQUEST,
    REPAIRS,
    CERTIFICATES,
    INTENT,
    "contract.json",
    "enrolled.json",
    "plan.json",
)  # all that osfl puts into a round's folder; the plan last, for without it there is no round


def intend(fl_round: Round, clients: Sequence[ClientId], class_name: str, withdraw: bool) -> dict[str, object]:
    """The intent to forget these clients, this class of everybody, or this class of these clients."""
    method = load(fl_round.plan.method)(fl_round.plan.task, fl_round.plan.settings)
    if not clients and not class_name:
        raise UsageError(
            "nothing was named that should be forgotten",
            field="client",
            fix="Say --client NAME, --class NAME, or both; --verify repeats the proof of what was.",
        )
    _check_clients(fl_round, clients)
    label = _label(method, fl_round.plan, class_name) if class_name else None
    uploads, gone = _changes(fl_round, method, clients, label)
    published = fl_round.release()
    shared = verify_release(fl_round.folder / RELEASE, fl_round.server, fl_round.plan.digest) if published else None
    made_from, known = shared.made_from if shared else {}, certificates(fl_round.folder, fl_round.server)
    kept = read_total(fl_round)
    made_of_it = [*(shared.tensors.values() if shared else ()), *to_raw(kept.total.tensors if kept else {}).values()]
    return {
        "format": FORMAT,
        "number": len(known) + 1,  # of the certificate
        "asked": {"clients": list(clients), "class": class_name},
        "label": label,
        "uploads": uploads,  # client -> digests before and after; "" after: nothing is left
        "release": shared.digest if shared else "",
        "personal": {name.removeprefix("personal/"): d for name, d in made_from.items() if name.startswith("personal/")},
        "replay": _replay(method, fl_round.plan, made_from, uploads, withdraw) if shared else None,
        "removed": [str(path.relative_to(fl_round.folder)) for path in doomed(fl_round.folder, uploads)],
        "stays": method.inseparable if label is not None else "",
        "again": _command(fl_round.folder) or next((c["again"] for c in reversed(known) if c["again"]), ""),
        "withdraw": withdraw,
        "traces": sample([tensor.data for tensor in [*gone, *made_of_it]]),
        "cleared": False,
    }


# --- who and what -------------------------------------------------------------------------------------------------------


def _check_clients(fl_round: Round, clients: Sequence[ClientId]) -> None:
    delivered = fl_round.delivered()
    for client in clients:
        if client not in fl_round.plan.clients:
            raise RoundError(
                f"{client!r} took no part in this round",
                field="client",
                expected=" or ".join(fl_round.plan.clients),
                got=client,
                fix=f"Name a client of this round's plan.{nearest(client, fl_round.plan.clients)}",
            )
        if client not in fl_round.present:
            raise RoundError(
                f"{client!r} was forgotten already",
                field="client",
                expected=" or ".join(fl_round.present) or "nobody, all were",
                got=client,
                fix=f"osfl forget {fl_round.folder} --verify repeats the proof.",
            )
        if has_uploads(fl_round) and client not in delivered:
            raise RoundError(
                f"{client!r} has no upload in this round",
                field="client",
                expected=" or ".join(delivered) or "a client that has delivered",
                got=client,
                fix="There is nothing to forget.",
            )


def has_uploads(fl_round: Round) -> bool:
    """Whether clients of this method upload anything; if not, the folder may still hold models of theirs."""
    return any(fl_round.policy.contracts.values())


def _label(method: Method, plan: Plan, name: str) -> int:
    if plan.secure_sum:
        raise UsageError(
            "masked uploads of a secure sum cannot be taken apart by class",
            field="class",
            fix="Take the release back with --client NAME --withdraw, and open a new round without these images.",
        )
    if not method.separable():
        able = [known for known in names() if load(known).provides("without_class")]
        settings = " with these settings" if method.provides("without_class") else ""
        raise UsageError(
            f"uploads of {plan.method}{settings} cannot be taken apart by class",
            field="class",
            fix=f"Forget the whole client with --client. By class it works for: {', '.join(able)}.",
        )
    if name not in plan.task.classes:
        raise RoundError(
            f"there is no class {name!r} in this round",
            field="class",
            expected=" or ".join(plan.task.classes),
            got=name,
            fix=f"Name a class of this round's plan.{nearest(name, plan.task.classes)}",
        )
    return plan.task.classes.index(name)


def _changes(
    fl_round: Round, method: Method, clients: Sequence[ClientId], label: int | None
) -> tuple[dict[ClientId, dict[str, str]], list[RawTensor]]:
    """Digests of the uploads before and after, and all that goes of them."""
    uploads: dict[ClientId, dict[str, str]] = {}
    gone: list[RawTensor] = []
    for client in clients or fl_round.delivered():
        bundle = fl_round.inbox.bundle(client) if has_uploads(fl_round) else None
        sent = dict(bundle.tensors) if bundle else {}
        rest = reduced(fl_round, method, client, label) if label is not None else None
        left = open_upload(rest, fl_round.policy, fl_round.server)[0] if rest else None
        if bundle and left and left.digest == bundle.digest:
            continue  # its upload holds nothing of this class
        uploads[client] = {"before": bundle.digest if bundle else "", "after": left.digest if left else ""}
        gone += [tensor for name, tensor in sent.items() if left is None or _other(tensor, left.tensors.get(name))]
        gone += _kept_for(fl_round.folder, client) if left is None else []
    if not uploads:
        raise RoundError(
            "no upload holds anything of this class",
            field="class",
            expected="a class in some upload",
            got=fl_round.plan.task.classes[label or 0],
            fix="There is nothing to forget.",
        )
    return uploads, gone


def _other(tensor: RawTensor, left: RawTensor | None) -> bool:
    return left is None or bytes(tensor.data) != bytes(left.data)


def reduced(fl_round: Round, method: Method, client: ClientId, label: int) -> bytes | None:
    """What is left of an upload without a class, as a bundle; None if that is nothing.

    The client cannot be asked to sign it, so the server does. What identifies it (the manifest) is that of the upload which
    a client without this class would have sent: the release made of it is then the same, too.
    """
    bundle = fl_round.inbox.bundle(client)
    payload: Payload = method.without_class(payload_of(bundle), label)
    if is_empty(payload):
        return None
    assert fl_round.server_key is not None
    return pack("upload", client, fl_round.plan.digest, to_raw(payload.tensors), dict(payload.facts), fl_round.server_key)


def is_empty(payload: Payload) -> bool:
    """Whether a client with this payload has no image left, and would not have joined. Small classes have no tensors."""
    return payload.facts["samples"] == 0 if "samples" in payload.facts else not payload.tensors


def _kept_for(folder: Path, client: ClientId) -> list[RawTensor]:
    """The client's own model and its own part of the release, as raw bytes without the file's header."""
    paths = [folder / kind / f"{client}.safetensors" for kind in ("models", "personal")]
    files = [path.read_bytes() for path in paths if path.exists()]
    bodies = [data[8 + int.from_bytes(data[:8], "little") :] for data in files]
    return [RawTensor("U8", (len(body),), body) for body in bodies]


# --- what follows from it -------------------------------------------------------------------------------------------------


def _replay(
    method: Method, plan: Plan, made_from: Mapping[str, str], uploads: Mapping[ClientId, Mapping[str, str]], withdraw: bool
) -> list[ClientId] | None:
    """Whose uploads the next release is made of; None: there will be none, or (references) only `osfl run` can make it.

    Uploads that came after the release stay out of it: forgetting one client lets no other one in.
    """
    if is_reference(method):
        return None
    before = [name.removeprefix("upload/") for name in made_from if name.startswith("upload/")]
    left = [client for client in before if uploads.get(client, {}).get("after") != ""]
    why = _impossible(method, plan, len(left)) if before else ""
    if why and not withdraw:
        raise RoundError(
            f"no release can be made of what would be left: {why}",
            field="client",
            expected="enough uploads for a release",
            got=f"{len(left)} of {len(before)} uploads without {', '.join(sorted(uploads))}",
            fix="Add --withdraw to delete it all the same: the release is taken back, and there is no new one.",
        )
    return None if why else left


def _impossible(method: Method, plan: Plan, left: int) -> str:
    if plan.secure_sum:
        return "its upload is masked, and nobody knows what it added to the secure sum"
    if left == 0:
        return "it is the last upload"
    if left < plan.quorum:
        return f"the plan's quorum is {plan.quorum} uploads"
    if plan.privacy is not None and plan.privacy.noise == "share":
        return "beside the release that was, it would show the sums of who left with a share of the noise alone"
    return "; ".join(method.problems(left))


def doomed(folder: Path, uploads: Mapping[ClientId, Mapping[str, str]]) -> list[Path]:
    """All that is removed, in this order: the release stands for the whole, so it goes first, and the uploads last."""
    inbox = folder / "inbox"
    paths = [folder / RELEASE, *(folder / name for name in MADE_OF_IT), *folder.glob(f".*{TEMPORARY}")]
    paths += (folder / ".dashboard").glob("*.part")  # half received by a coordinator that was killed; it can be sent again
    # how far the page's server phase was, and its errors, which name clients
    paths += [folder / ".dashboard" / name for name in ("phase.json", "phase.log")]
    for client, upload in uploads.items():
        paths += inbox.glob(f".{client}.safetensors.*{TEMPORARY}")  # of writers that died
        paths += [p for p in (folder / "partial").glob("*.part") if p.name.rsplit(".", 2)[0] == client]  # half a transfer
        paths += [upload_hash_path(folder, client)]
        paths += [folder / REPAIRS / f"{client}.safetensors"]
        paths += [inbox / f"{client}.safetensors"] if not upload["after"] else []
    return [path for path in paths if path.exists()]


def later(folder: Path, first: Path) -> list[Path]:
    """The encounters after the first, which were made of it, in the order in which they go. Whatever else lies in the folder
    was not put there by osfl and is nobody's upload."""
    between = [path for path in first.parent.iterdir() if path != first and path.name.isdecimal()]
    names = ROUND if (folder / "plan.json").exists() else ()  # the last encounter is the folder itself, once it has begun
    last = [path for name in names for path in (folder / name, *folder.glob(f".{name}.*{TEMPORARY}"))]
    return [path for path in (*last, *sorted(between)) if os.path.lexists(path)]


def _command(folder: Path) -> str:
    """The command that made this simulation, if it got that far."""
    with suppress(FileNotFoundError, json.JSONDecodeError, AttributeError):
        return str(json.loads((folder / "results.json").read_bytes()).get("command", ""))
    return ""
