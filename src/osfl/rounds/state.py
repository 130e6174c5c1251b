"""Read the state of a round from its folder, without torch: all that a coordinator needs to receive uploads.

What was forgotten is part of it (see osfl.rounds.forgetting): certificates in `forgotten/`, signed by the server, and while a
forgetting is unfinished its intent in `forgetting.json`.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from osfl.core.errors import RoundError, UsageError
from osfl.core.types import ClientId, Contract, Field, Json, Limits, canonical, digest_of
from osfl.wire.gate import AcceptancePolicy
from osfl.wire.masks import keys_digest
from osfl.wire.repair import REQUEST, RepairRequest, read_request
from osfl.wire.signing import SigningKey, VerifyKey
from osfl.wire.withdrawn import withdrawn_by

CERTIFICATES, INTENT = "forgotten", "forgetting.json"
JUDGMENT = "judgment.json"  # what uploads say about each other (osfl.rounds.judgment)
LEFT_OUT, KEPT = "left out", "kept"  # notes in journal.jsonl: what the coordinator decided about a site


def upload_hash_path(folder: Path, client: ClientId) -> Path:
    """The hash of the file in which an upload came over the network, so that the same file is known again."""
    return folder / "partial" / f"{client}.sha256"


def read_json(path: Path) -> Json:
    """A JSON file of the round, or a plain sentence about what is wrong with it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        no_folder = f"There is no folder {path.parent}: check the path."
        fix = "This is not a whole round folder: name the one that `osfl enroll` or `osfl run` made."
        raise RoundError(f"{path} is missing", field=path.name, fix=fix if path.parent.exists() else no_folder) from None
    except NotADirectoryError:
        raise RoundError(
            f"{path.parent} is no folder", field=path.name, fix="Name the folder that `osfl enroll` or `osfl run` made."
        ) from None
    except (ValueError, RecursionError) as error:  # no JSON, or JSON made to break its reader: depth, endless numbers
        raise RoundError(
            f"{path} is damaged: {error}",
            field=path.name,
            fix="Restore it from a copy, or choose another folder and start again.",
        ) from None


# What a folder of results holds, by the file that only it has.
_HOLDS = {"enrolled.json": "a round", "comparison.json": "a comparison"}


def check_holds_no_other(folder: Path, own: str = "") -> None:
    """Refuse to write into the folder of a round or a comparison: its report and model card would be replaced. `own`: the file
    of the kind that is allowed."""
    for name, what in _HOLDS.items():
        if name != own and (folder / name).exists():
            raise RoundError(
                f"{folder} holds {what}, whose report would be replaced",
                field="out",
                expected="a folder of its own",
                got=name,
                fix="Choose another --out.",
            )


def read_policy(folder: Path) -> AcceptancePolicy:
    """Who may deliver what here; plan.json is the plan's canonical content, so its digest is the round's name."""
    plan, enrolled = read_json(folder / "plan.json"), read_json(folder / "enrolled.json")
    try:
        contracts = {name: _contract(lines) for name, lines in read_json(folder / "contract.json").items()}
        classes, limits = len(plan["task"]["classes"]), Limits(**plan["limits"])
        server = enrolled["server"]
        known, intent = certificates(folder, server), pending_removal(folder)
        forgotten = removed_uploads([*known, *filter(None, [intent])])
        withdrawn = withdrawn_by(known or _first_encounter(folder, server), intent)
        clients, digest = dict(enrolled["clients"]), digest_of(plan)
        several = plan["task"].get("kind") == "multilabel"
        policy = AcceptancePolicy(digest, clients, contracts, classes, limits, server, forgotten, withdrawn, several=several)
        if not plan.get("round", {}).get("secure_sum"):
            return policy
        request = existing_request(folder, policy)
        return replace(policy, keys=keys_digest(clients), missing=request.missing if request else ())
    except (AttributeError, KeyError, TypeError) as error:
        raise RoundError(
            f"{folder} is not a whole round folder: {error!r}",
            field="round",
            fix="Open the round again with `osfl enroll`, in a new folder.",
        ) from None


def existing_request(folder: Path, policy: AcceptancePolicy) -> RepairRequest | None:
    """The request for repairs of this round; None before there is one. It is final."""
    path = folder / REQUEST
    return read_request(path.read_bytes(), policy.server, policy.plan, policy.enrolled) if path.exists() else None


def check_key(server: str, key: SigningKey) -> None:
    """Refuse a private key that is not the round's."""
    if server != key.public_hex:
        raise UsageError(
            [f"this key is not the server's: expected the private half of {server}, got that of {key.public_hex}"],
            field="key",
            fix="Give the key with which the round was opened.",
        )


def certificates(folder: Path, server: str) -> list[dict[str, Json]]:
    """What was forgotten in this round, oldest first; refused unless the server signed every one."""
    return read_certificates(sorted((folder / CERTIFICATES).glob("*.json")), server)


def no_more_releases(folder: Path, server: str, noise: str) -> str:
    """Why a round gets no other release after one was withdrawn, or "": with noise that sites share, two releases together
    would show the sums of who is only in one of them with a share of the noise alone."""
    if noise != "share" or not any(entry["release"]["before"] for entry in certificates(folder, server)):
        return ""
    return "a release with shares of noise was withdrawn, and beside another one it would show too much: open a new round"


def _first_encounter(folder: Path, server: str) -> list[dict[str, object]]:
    """Where clients exchange several times, what was forgotten in the first encounter is forgotten in all."""
    return certificates(folder / "encounters" / "1", server)


def certificates_at(place: Path, server: str, plan: str) -> list[dict[str, Json]]:
    """Certificates of a round (the digest of its plan) in a file or a folder of copies, oldest first."""
    if not place.exists():
        raise UsageError(
            f"there are no certificates at {place}",
            field="certificates",
            fix=f"Name a certificate, or the {CERTIFICATES}/ folder of a round or a copy of it.",
        )
    paths = sorted(place.glob("*.json")) if place.is_dir() else [place]
    found = [entry for entry in read_certificates(paths, server) if entry["plan"] == plan]
    return sorted(found, key=lambda entry: int(entry["number"]))


def beside(bundle: Path) -> Path | None:
    """The certificates of the round folder in which this file lies, or a copy of them beside it."""
    places = (bundle.parent, bundle.parent.parent) if bundle.parent.name in ("inbox", "personal") else (bundle.parent,)
    return next((place / CERTIFICATES for place in places if (place / CERTIFICATES).is_dir()), None)


def read_certificates(paths: Iterable[Path], server: str) -> list[dict[str, Json]]:
    """These certificates; refused unless the server signed every one."""
    found = []
    for path in paths:
        content = read_json(path)
        try:
            good = VerifyKey(server).verify(canonical(content["certificate"]), content["signature"])
            found.append({**content["certificate"], "uploads": dict(content["certificate"]["uploads"])})
        except (AttributeError, KeyError, TypeError, ValueError):
            good = False
        if not good:
            raise RoundError(
                f"{path.parent.name}/{path.name} is not what the server signed",
                field="certificate",
                expected=f"a signature by {server}",
                fix="It was edited or damaged: restore it from a copy.",
            )
    return found


def pending_removal(folder: Path) -> dict[str, object] | None:
    """The forgetting that has begun here and has not ended."""
    if not (folder / INTENT).exists():
        return None
    intent: dict[str, Json] = read_json(folder / INTENT)
    return intent


def check_whole(folder: Path) -> None:
    """Half a forgetting is no state to work in or to read from."""
    intent = pending_removal(folder)
    if intent is not None:
        raise RoundError(
            f"{folder} is in the middle of forgetting {forget_options(intent)}",
            field="round",
            expected="a round that nothing is being removed from",
            got=INTENT,
            fix=f"Finish it first: osfl forget {folder} {forget_options(intent)}",
        )


def forget_options(entry: Mapping[str, Json]) -> str:
    """What a certificate or an intent was asked for, as options of `osfl forget`."""
    options = [option for client in entry["asked"]["clients"] for option in ("--client", client)]
    return shlex.join(options + (["--class", entry["asked"]["class"]] if entry["asked"]["class"] else []))


def removed_uploads(entries: Iterable[Mapping[str, Json]]) -> dict[ClientId, str]:
    """Of whom these certificates (or an intent) took something: the digest of what is left of the upload, or ""."""
    return {client: str(upload["after"]) for entry in entries for client, upload in entry["uploads"].items()}


def _contract(lines: Json) -> Contract:
    return {
        name: Field(**{**line, "shape": tuple(line["shape"]), "needs": tuple(line.get("needs", ()))})
        for name, line in lines.items()
    }
