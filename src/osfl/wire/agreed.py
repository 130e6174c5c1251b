"""What a round folder says about the round, read back without torch: the desk needs nothing else to receive.

What was forgotten is part of it (see osfl.forgetting): certificates in `forgotten/`, signed by the server, and while a
forgetting is unfinished its intent in `forgetting.json`.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from osfl.errors import RoundError, UsageError
from osfl.protocol import ClientId, Contract, Field, Limits, canonical, digest_of
from osfl.wire.atomic import locked
from osfl.wire.gate import Desk
from osfl.wire.signing import SigningKey, VerifyKey

CERTIFICATES, INTENT = "forgotten", "forgetting.json"


def read_json(path: Path) -> Any:
    """A JSON file of the round, or a plain sentence about what is wrong with it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RoundError(f"{path} is missing", field=path.name, fix="This is not a whole round folder.") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise RoundError(f"{path} is damaged: {error}", field=path.name,
                         fix="Restore it from a copy, or choose another folder and start again.") from None  # fmt: skip


def standing_desk(folder: Path) -> Desk:
    """Who may deliver what here; plan.json is the plan's canonical content, so its digest is the round's name."""
    plan, enrolled = read_json(folder / "plan.json"), read_json(folder / "enrolled.json")
    try:
        contracts = {name: _contract(lines) for name, lines in read_json(folder / "contract.json").items()}
        classes, limits = len(plan["task"]["classes"]), Limits(**plan["limits"])
        server = enrolled["server"]
        forgotten = struck([*certificates(folder, server), *filter(None, [unfinished(folder)])])
        return Desk(digest_of(plan), dict(enrolled["clients"]), contracts, classes, limits, server, forgotten)
    except (AttributeError, KeyError, TypeError) as error:
        raise RoundError(f"{folder} is not a whole round folder: {error!r}", field="round",
                         fix="Open the round again with `osfl enrol`, in a new folder.") from None  # fmt: skip


def check_key(server: str, key: SigningKey) -> None:
    """Refuse a private key that is not the round's."""
    if server != key.public_hex:
        raise UsageError(
            [f"this key is not the server's: expected the private half of {server}, got that of {key.public_hex}"],
            field="key", fix="Give the key with which the round was opened.",
        )  # fmt: skip


def certificates(folder: Path, server: str) -> list[dict[str, Any]]:
    """What was forgotten here, oldest first; refused unless the server signed every one."""
    found = []
    for path in sorted((folder / CERTIFICATES).glob("*.json")):
        content = read_json(path)
        try:
            good = VerifyKey(server).verify(canonical(content["certificate"]), content["signature"])
            found.append({**content["certificate"], "uploads": dict(content["certificate"]["uploads"])})
        except (AttributeError, KeyError, TypeError, ValueError):
            good = False
        if not good:
            raise RoundError(f"{CERTIFICATES}/{path.name} is not what the server signed", field="certificate",
                             expected=f"a signature by {server}",
                             fix="It was edited or damaged: restore it from a copy.")  # fmt: skip
    return found


def unfinished(folder: Path) -> dict[str, Any] | None:
    """The forgetting that has begun here and has not ended."""
    if not (folder / INTENT).exists():
        return None
    intent: dict[str, Any] = read_json(folder / INTENT)
    return intent


def struck(entries: Iterable[Mapping[str, Any]]) -> dict[ClientId, str]:
    """Of whom these certificates (or an intent) took something: the digest of what is left of the upload, or ""."""
    return {client: str(upload["after"]) for entry in entries for client, upload in entry["uploads"].items()}


def _contract(lines: Any) -> Contract:
    return {name: Field(**{**line, "shape": tuple(line["shape"])}) for name, line in lines.items()}


@contextlib.contextmanager
def alone(folder: Path, lock: str = ".lock", fix: str = "Wait for it, or choose another --out.") -> Iterator[None]:
    """Two processes in one folder would do everything twice; the second is told."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(locked(folder / lock, wait=False))
        except BlockingIOError:
            raise RoundError(f"another process is working in {folder}", fix=fix) from None
        yield
