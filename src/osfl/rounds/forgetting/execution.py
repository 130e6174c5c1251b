"""The steps of forgetting, in an order that makes a kill harmless.

forgetting.json       what is about to go; from here on nobody takes the round for finished, and the gate refuses
clear                 the old release first, then all that was made of it, then the upload (or its part of a class)
replay                the server phase on what is left; it continues where it was killed
search                no bytes of what was removed are left under the round folder
forgotten/NNNN.json   the certificate, signed by the server; then forgetting.json goes
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from osfl.core.errors import OsflError, RoundError, TrainingError, UsageError
from osfl.core.method import quiet
from osfl.core.plan import plan_from
from osfl.core.registry import load
from osfl.core.types import ClientId, Json, Plan, Progress, Upload, canonical
from osfl.rounds.folder import TOTAL, Round, check_server_key, first_encounter, simulated_key
from osfl.rounds.forgetting.request import RELEASE, doomed, intend, later, reduced
from osfl.rounds.forgetting.traces import search
from osfl.rounds.head import sign_head
from osfl.rounds.lock import folder_lock
from osfl.rounds.phases import computing, run_server_phase
from osfl.rounds.state import (
    CERTIFICATES,
    INTENT,
    KEPT,
    LEFT_OUT,
    certificates,
    forget_options,
    pending_removal,
    read_json,
    read_policy,
    removed_uploads,
)
from osfl.rounds.storage import payload_of
from osfl.rounds.total import drop_total, keep_total, read_total
from osfl.runtime.atomic import make_folder, replace_atomically, sync_folder
from osfl.runtime.environment import describe_environment
from osfl.runtime.machine import Machine
from osfl.runtime.workers import default_workers
from osfl.wire.gate import verify_release
from osfl.wire.refusals import JOURNAL
from osfl.wire.signing import SigningKey
from osfl.wire.withdrawn import withdrawn_by

STILL_NAMED = {
    "plan.json": "the names of all clients are part of the plan, whose digest is the round's name",
    "enrolled.json": "public keys are agreed when a round opens; the gate must know whom it refuses",
    f"{CERTIFICATES}/": "this certificate: names, digests, and fingerprints that find left-over bytes but do not reveal them",
    JOURNAL: "if the client tries to deliver again, that it was refused",
}


def forget(
    folder: Path,
    server_key: SigningKey | None = None,
    *,
    clients: Sequence[ClientId] = (),
    class_name: str = "",
    withdraw: bool = False,
    machine: Machine = Machine(),
    progress: Progress = quiet,
) -> dict[str, Json]:
    """Forget clients, a class of everybody, or a class of some clients; the certificate. Simulated rounds need no key.

    `withdraw`: where no release can be made of what is left, the old one is taken back without a new one. Where clients met
    several times, they are forgotten from the first encounter on, and the same `osfl run` command repeats the later ones.
    """
    first = first_encounter(folder)
    if first != folder:
        _clear_later(folder, first, server_key, sorted(set(clients)), class_name, withdraw)
        folder = first
    plan = plan_from(read_json(folder / "plan.json"), str(folder / "plan.json"))
    key = server_key or _simulated(folder, plan)
    asked = sorted(set(clients))
    with folder_lock(folder):
        intent = pending_removal(folder)
        if intent is None:
            intent = intend(_opened(folder, plan, key), asked, class_name, withdraw)
        else:
            _check_same(intent, asked, class_name, folder)
            wayout = withdraw and (intent.get("failed") or not intent.get("withdraw"))  # else it means what it meant before
            intent = {**intent, "replay": None if wayout else intent["replay"]}
        _keep(folder, intent)
        if not intent["cleared"]:
            _clear(_opened(folder, plan, key), intent)
            _keep(folder, {**intent, "cleared": True})
        try:
            after = _replay(_opened(folder, plan, key), intent, machine, progress)
        except (RoundError, TrainingError) as error:  # all that was asked for is deleted by now; a new release is missing
            _keep(folder, {**intent, "cleared": True, "failed": True})
            error.fix = f"{error.fix or ''} Or finish without a new release: the same command with --withdraw.".strip()
            raise
        return _certify(_opened(folder, plan, key), intent, after, machine)


def _simulated(folder: Path, plan: Plan) -> SigningKey:
    """The key of a simulated round's server is derived; a real one has to be given."""
    key = simulated_key(plan.seed, "server")
    if read_json(folder / "enrolled.json")["server"] != key.public_hex:
        raise UsageError(
            "this is a real round: what is released again must be signed by its server",
            field="key",
            fix="Give the server's private key with --key server.key.",
        )
    return key


def _opened(folder: Path, plan: Plan, key: SigningKey) -> Round:
    """The round as it is now, in the middle of a forgetting too."""
    policy = read_policy(folder)
    fl_round = Round(folder, plan, policy, policy.server, key)
    check_server_key(fl_round)
    return fl_round


def _keep(folder: Path, intent: Mapping[str, object]) -> None:
    replace_atomically(folder / INTENT, json.dumps(intent, indent=1, sort_keys=True).encode())


def _check_same(intent: Mapping[str, object], clients: Sequence[ClientId], class_name: str, folder: Path) -> None:
    asked = {"clients": list(clients), "class": class_name}
    if intent["asked"] != asked:
        raise RoundError(
            "another forgetting has begun here and not ended",
            field="round",
            expected=forget_options(intent),
            got=forget_options({"asked": asked}) or "nothing",
            fix=f"Finish it first: osfl forget {folder} {forget_options(intent)}",
        )


def _clear_later(
    folder: Path, first: Path, server_key: SigningKey | None, clients: Sequence[ClientId], class_name: str, withdraw: bool
) -> None:
    """Remove the encounters after the first, which were all made of it; but only if that one can forget what is asked."""
    plan = plan_from(read_json(first / "plan.json"), str(first / "plan.json"))
    with folder_lock(folder):
        if pending_removal(first) is None:
            intend(_opened(first, plan, server_key or _simulated(first, plan)), clients, class_name, withdraw)
        for path in later(folder, first):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        sync_folder(folder)


# --- clear --------------------------------------------------------------------------------------------------------------


def _clear(fl_round: Round, intent: Mapping[str, Json]) -> None:
    """Remove uploads and what was made from them. Whatever is gone already was removed before an interruption."""
    folder, uploads = fl_round.folder, intent["uploads"]
    _subtract(fl_round, intent)
    gone = {client for client, upload in uploads.items() if not upload["after"]}
    for path in doomed(folder, uploads):
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        sync_folder(path.parent)
    kept = ("client", "cache", LEFT_OUT, KEPT)
    _rewrite(folder / "journal.jsonl", lambda note: note["client"] not in gone and note["phase"] in kept)
    _rewrite(folder / JOURNAL, lambda entry: entry.get("client") not in gone)
    for client, upload in uploads.items():
        if upload["after"]:
            _reduce(fl_round, client, upload["after"], intent["label"])


def _subtract(fl_round: Round, intent: Mapping[str, Json]) -> None:
    """Take what goes out of the sum that is kept, while its uploads can still be read. A sum that cannot be corrected goes as
    a whole: the server phase adds up what is left."""
    kept = read_total(fl_round)
    if kept is None:
        drop_total(fl_round)
        return
    method, before = load(fl_round.plan.method)(fl_round.plan.task, fl_round.plan.settings), _before(fl_round)
    for client, change in intent["uploads"].items():
        if kept.made_from.get(client) in (None, change["after"]):
            continue  # it was not in the sum, or an interrupted forgetting came that far
        bundle = None
        with suppress(RoundError):
            bundle = before.inbox.bundle(client)
        if bundle is None or bundle.digest != kept.made_from[client]:
            drop_total(fl_round)
            return
        upload = Upload(client, bundle.plan, payload_of(bundle))
        kept = kept.without(method.term(upload))
        if change["after"]:
            rest = method.without_class(upload.payload, intent["label"])
            kept = kept.with_upload(method.term(replace(upload, payload=rest)), change["after"])
    keep_total(fl_round, kept)


def _before(fl_round: Round) -> Round:
    """The round as its certificates have it, without the forgetting that has begun: uploads are what they were."""
    known = certificates(fl_round.folder, fl_round.server)
    policy = replace(fl_round.policy, forgotten=removed_uploads(known), withdrawn=withdrawn_by(known))
    return replace(fl_round, policy=policy)


def _rewrite(path: Path, keeps: Callable[[Any], bool]) -> None:
    """The journal without the lines about what is forgotten; torn lines go, too."""
    if not path.exists():
        return
    lines = []
    for line in path.read_bytes().splitlines():
        try:
            if keeps(json.loads(line)):
                lines.append(line + b"\n")
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
    replace_atomically(path, b"".join(lines))


def _reduce(fl_round: Round, client: ClientId, after: str, label: int) -> None:
    """Put what is left of an upload in its place: one atomic step, after which the class is not on the disk."""
    path = fl_round.inbox.path(client)
    if fl_round.inbox.digest(client) != after:
        rest = reduced(_before(fl_round), load(fl_round.plan.method)(fl_round.plan.task, fl_round.plan.settings), client, label)
        assert rest is not None
        replace_atomically(path, rest)
    path.chmod(0o600)


# --- replay and certificate -----------------------------------------------------------------------------------------------


def _replay(fl_round: Round, intent: Mapping[str, Json], machine: Machine, progress: Progress) -> str:
    """The release that a round without all this would have; its digest, or "" where there is none."""
    if intent["replay"] is not None and fl_round.release() is None:
        method = load(fl_round.plan.method)(fl_round.plan.task, fl_round.plan.settings)
        with computing(fl_round.plan, machine, progress, fl_round.scratch, show=fl_round.show) as ctx:
            run_server_phase(method, fl_round, ctx, intent["replay"])
    fl_round.tidy()
    published = fl_round.release()
    return published[1] if published else ""


def _certify(fl_round: Round, intent: Mapping[str, Json], after: str, machine: Machine) -> dict[str, object]:
    path = fl_round.folder / CERTIFICATES / f"{intent['number']:04}.json"
    if not path.exists():
        own = left_over(fl_round, intent["traces"])
        certificate = _certificate(fl_round, intent, after, own, machine)
        make_folder(path.parent)
        assert fl_round.server_key is not None
        signed = {"certificate": certificate, "signature": fl_round.server_key.sign(canonical(certificate))}
        replace_atomically(path, json.dumps(signed, indent=1, sort_keys=True).encode())
    assert fl_round.server_key is not None
    sign_head(fl_round.folder, fl_round.plan.digest, after, fl_round.server_key)
    (fl_round.folder / INTENT).unlink()
    sync_folder(fl_round.folder)
    return certificates(fl_round.folder, fl_round.server)[-1]


def left_over(fl_round: Round, traces: Sequence[str]) -> list[str]:
    """Those fingerprints that nobody else's bytes have; an error if they are anywhere under the round folder.

    Bytes that other uploads or the release made of them hold, too, are not the forgotten client's: common initial weights.
    """
    found, others = search(fl_round.folder, traces), _of_others(fl_round)
    own = set(traces).difference(*(found.get(path, set()) for path in others))
    where = sorted(str(path.relative_to(fl_round.folder)) for path, hits in found.items() if path not in others and hits & own)
    if where:
        raise RoundError(
            f"bytes of what was forgotten are still in {', '.join(where)}",
            field="folder",
            expected=f"none under {fl_round.folder}",
            got=f"{len(where)} file(s)",
            fix="osfl did not put them there: remove them and run the same command again.",
        )
    return sorted(own)


def _of_others(fl_round: Round) -> list[Path]:
    """Files that are known to be made without what was forgotten: signed uploads, and a release and a sum of nothing else."""
    known: list[Path] = []
    uploads: dict[str, str] = {}
    for client in fl_round.delivered():
        with suppress(RoundError):
            uploads[f"upload/{client}"] = fl_round.inbox.bundle(client).digest
            known.append(fl_round.inbox.path(client))
    with suppress(OsflError):
        published = fl_round.release()
        made_from = (
            verify_release(fl_round.folder / RELEASE, fl_round.server, fl_round.plan.digest).made_from if published else {}
        )
        if published and all(uploads.get(name) == d for name, d in made_from.items() if name.startswith("upload/")):
            known += [
                fl_round.folder / RELEASE,
                *(fl_round.folder / "personal" / f"{c}.safetensors" for c in published[0].personal),
            ]
    kept = read_total(fl_round)
    if kept and all(uploads.get(f"upload/{client}") == digest for client, digest in kept.made_from.items()):
        known.append(fl_round.folder / TOTAL)
    return known


def _certificate(
    fl_round: Round, intent: Mapping[str, object], after: str, own: Sequence[str], machine: Machine
) -> dict[str, object]:
    """Every key is explained in docs/forgetting.md."""
    kept = ("format", "number", "asked", "uploads", "removed", "stays", "again")
    environment = describe_environment(machine, machine.workers or default_workers())
    return {
        **{key: intent[key] for key in kept},
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "plan": fl_round.plan.digest,
        "method": fl_round.plan.method,
        "release": {"before": intent["release"], "after": after},
        "replace": _replacements(fl_round, intent, after),
        "elsewhere": _elsewhere(fl_round, own),
        "still_named": STILL_NAMED,
        "machine": machine.bits(),
        "environment": {key: environment[key] for key in ("osfl", "python", "torch", "numpy", "system", "processor")},
        "traces": list(own),
        "verify": "osfl forget ROUND --verify",
    }


def _replacements(fl_round: Round, intent: Mapping[str, Json], after: str) -> list[dict[str, str]]:
    """Who may hold the old release, and what takes its place."""
    before = intent["release"]
    if not before or before == after:
        return []
    rows = []
    for client in fl_round.plan.clients:
        row = {"who": client, "delete": before, "fetch": after if client in fl_round.present else ""}
        if client in intent["personal"]:
            row["delete_personal"] = intent["personal"][client]
        rows.append(row)
    return rows


def _elsewhere(fl_round: Round, own: Sequence[str]) -> list[str]:
    """Files outside the round folder that hold the same bytes, seen from there: on the cache that a comparison shares, and
    in the SuperLink's database, where Flower leaves what passed through it (see osfl.deploy.flower.deployment)."""
    note = fl_round.journal().get(("cache", ""))
    places = [fl_round.folder / str(note["path"])] if note else []
    places += [fl_round.folder.resolve().parent.parent / "link"] if fl_round.folder.resolve().parent.name == "rounds" else []
    found = [path for place in places if place.is_dir() for path in search(place, own)]
    return [os.path.relpath(path, fl_round.folder) for path in found]
