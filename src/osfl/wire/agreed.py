"""What a round folder says about the round, read back without torch: the desk needs nothing else to receive."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from osfl.errors import RoundError
from osfl.protocol import Contract, Field, Limits, digest_of
from osfl.wire.gate import Desk


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
        return Desk(digest_of(plan), dict(enrolled["clients"]), contracts, classes, limits)
    except (AttributeError, KeyError, TypeError) as error:
        raise RoundError(f"{folder} is not a whole round folder: {error!r}", field="round",
                         fix="Open the round again with `osfl enrol`, in a new folder.") from None  # fmt: skip


def _contract(lines: Any) -> Contract:
    return {name: Field(**{**line, "shape": tuple(line["shape"])}) for name, line in lines.items()}
