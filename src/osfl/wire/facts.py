"""The small readable part of a message: bounded, and right about what everyone understands the same way."""

from __future__ import annotations

from collections.abc import Collection

from osfl.errors import Rejected
from osfl.protocol import Json, canonical
from osfl.wire import strict_json
from osfl.wire.bundle import FACTS_DEPTH
from osfl.wire.names import shown

MOST_SAMPLES = 10**9
_FIX = "Facts are small and readable; train again with `osfl client plan.toml` and this version of osfl."


def check_facts(facts: Json, most_bytes: int) -> None:
    """A JSON object, not too large, not too deep."""
    if not isinstance(facts, dict):
        raise _wrong("facts", "the facts are not an object", "an object", facts)
    if (size := len(canonical(facts))) > most_bytes:
        raise _wrong("facts", "the facts are too large", f"at most {most_bytes} bytes", size)
    try:
        strict_json.check(facts, depth=FACTS_DEPTH)
    except ValueError as error:
        raise _wrong("facts", f"the facts cannot be used: {error}", f"at most {FACTS_DEPTH} levels", facts) from None


def check_well_known(facts: dict[str, Json], classes: int) -> None:
    """Facts that mean the same for every method; others are the method's own business."""
    samples = facts.get("samples", 1)
    if not _is_count(samples) or samples == 0:
        raise _wrong("facts.samples", "the number of samples is wrong", f"1 to {MOST_SAMPLES}", samples)
    counts = facts.get("class_counts", [1] * classes)
    if not isinstance(counts, list) or len(counts) != classes or not all(map(_is_count, counts)):
        raise _wrong("facts.class_counts", "the class counts are wrong", f"{classes} counts, one a class", counts)
    if counts and not any(counts):  # shares of nothing would be no numbers
        raise _wrong("facts.class_counts", "the class counts are all zero", "an image of some class", counts)


def architecture_of(facts: Json, known: Collection[str]) -> str:
    """Which contract applies. A desk that knows the single architecture "" needs no fact about it."""
    if not isinstance(facts, dict):
        raise _wrong("facts", "the facts are not an object", "an object", facts)
    name = facts.get("architecture", "")
    if not isinstance(name, str) or (name not in known and set(known) != {""}):
        expected = "one of " + ", ".join(sorted(known))
        raise _wrong("facts.architecture", "the architecture is not one of the round's", expected, name)
    return name if name in known else ""


def _is_count(value: Json) -> bool:
    return type(value) is int and 0 <= value <= MOST_SAMPLES  # type(), because True is an int


def _wrong(field: str, reason: str, expected: object, got: object) -> Rejected:
    return Rejected(reason, field=field, expected=expected, got=shown(got), fix=_FIX)
