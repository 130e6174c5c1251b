"""How many images of each class an upload says its client has: a fact that the gate checks where it is there, and that a client
may leave out."""

from __future__ import annotations

from collections.abc import Mapping

from osfl.ingredients.claimed_counts import missing_fact
from osfl.protocol import ClientId, Facts, Json


def told_counts(facts: Facts, client: ClientId) -> list[int]:
    """The counts, for methods that cannot do without them."""
    counts = facts.get("class_counts")
    if counts is None:
        raise missing_fact(client, "class_counts", "how many images of each class its client has")
    return list(counts)


def facts_without(facts: Mapping[str, Json], label: int) -> dict[str, Json]:
    """The facts of a client that has no image of the class; what was never told stays so."""
    counts = facts.get("class_counts")
    if not isinstance(counts, list):
        return dict(facts)
    left = [0 if c == label else int(n) for c, n in enumerate(counts)]  # type: ignore[arg-type]
    return {**facts, "class_counts": left, "samples": sum(left)}
