"""Check the facts of a bundle: bounded size, and valid values of the common facts."""

from __future__ import annotations

from collections.abc import Collection

from osfl.core.errors import Rejected
from osfl.core.names import shown
from osfl.core.types import Contract, Json, Limits, canonical
from osfl.wire import strict_json
from osfl.wire.bundle import FACTS_DEPTH

KEYS = "keys"  # fact of a masked upload: the digest of all enrolled keys (osfl.wire.masks)

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


def check_well_known(facts: dict[str, Json], classes: int, limits: Limits, several: bool = False) -> None:
    """Facts that mean the same for every method, within the plan's limits; others are the method's own business.

    `several`: an image may be of several classes, or of none.
    """
    samples = facts.get("samples", 1)
    if not _is_count(samples) or samples == 0:
        raise _wrong("facts.samples", "the number of samples is wrong", f"1 to {limits.samples}", samples)
    counts = facts.get("class_counts", [1] * classes)
    if not isinstance(counts, list) or len(counts) != classes or not all(map(_is_count, counts)):
        raise _wrong("facts.class_counts", "the class counts are wrong", f"{classes} counts, one a class", counts)
    if counts and not any(counts) and not several:  # shares of nothing would be no numbers
        raise _wrong("facts.class_counts", "the class counts are all zero", "an image of some class", counts)
    counts = counts if "class_counts" in facts else []
    _check_claim("samples", "samples", samples, limits.samples)
    _check_claim("class_counts", "samples", max(counts, default=0) if several else sum(counts), limits.samples)
    _check_claim("class_counts", "class_samples", max(counts, default=0), limits.class_samples)


def _check_claim(field: str, limit: str, claimed: int, most: int) -> None:
    if claimed > most:
        of = " of one class" if limit == "class_samples" else ""
        raise Rejected(
            f"it claims more images{of} than the plan allows a site",
            field=f"facts.{field}",
            expected=f"at most {most}",
            got=claimed,
            fix=f"If the site has so many, open a round whose plan has a larger limits.{limit}; otherwise train again.",
        )


def check_masked(facts: dict[str, Json], keys: str) -> None:
    """A masked upload was masked with the keys of this round, and says nothing about the site's images."""
    if counted := [name for name in ("samples", "class_counts") if name in facts]:
        raise _wrong(
            f"facts.{counted[0]}", "a masked upload says how many images its site has", "no such fact", facts[counted[0]]
        )
    if facts.get(KEYS) != keys:
        raise Rejected(
            "it was masked with other keys than those of this round",
            field=f"facts.{KEYS}",
            expected=keys,
            got=shown(facts.get(KEYS, "nothing")),
            fix="Compare the .pub files of all sites: each needs the same ones, and the coordinator has enrolled these.",
        )


def check_needed(facts: dict[str, Json], tensors: Collection[str], contract: Contract) -> None:
    """The facts without which these tensors cannot be used."""
    needed = sorted({name for tensor in tensors for name in contract[tensor].needs})
    for name in needed:
        if name not in facts:
            raise _wrong(f"facts.{name}", f"the facts lack '{name}'", f"facts with {', '.join(needed)}", sorted(facts))


def architecture_of(facts: Json, known: Collection[str]) -> str:
    """Which contract applies. A coordinator that knows the single architecture "" needs no fact about it."""
    if not isinstance(facts, dict):
        raise _wrong("facts", "the facts are not an object", "an object", facts)
    name = facts.get("architecture", "")
    if not isinstance(name, str) or (name not in known and set(known) != {""}):
        expected = "one of " + ", ".join(sorted(known))
        raise _wrong("facts.architecture", "the architecture is not one of the round's", expected, name)
    return name if name in known else ""


def _is_count(value: Json) -> bool:
    return type(value) is int and value >= 0  # type(), because True is an int


def _wrong(field: str, reason: str, expected: object, got: object) -> Rejected:
    return Rejected(reason, field=field, expected=expected, got=shown(got), fix=_FIX)
