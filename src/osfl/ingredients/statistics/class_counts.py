"""How many images of each class an upload says its client has: a fact that the gate checks where it is there, and that a client
may leave out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fractions import Fraction

from osfl.core.types import ClientId, Facts, Json
from osfl.ingredients.statistics.claimed_counts import missing_fact


def reported_counts(facts: Facts, client: ClientId) -> list[int]:
    """The counts, for methods that cannot do without them."""
    counts = facts.get("class_counts")
    if counts is None:
        raise missing_fact(client, "class_counts", "how many images of each class its client has")
    return list(counts)


def facts_without(facts: Mapping[str, Json], label: int) -> dict[str, Json]:
    """The facts of a client that has no image of the class; counts that were not uploaded stay absent."""
    counts = facts.get("class_counts")
    if not isinstance(counts, list):
        return dict(facts)
    left = [0 if c == label else int(n) for c, n in enumerate(counts)]
    return {**facts, "class_counts": left, "samples": sum(left)}


def shares(total: int, weights: Sequence[int]) -> list[int]:
    """`total` cut in proportion to the weights, exactly: floors first, then one each to the largest remainders."""
    mass = sum(weights)
    if mass == 0:
        return [0] * len(weights)
    exact = [Fraction(total * weight, mass) for weight in weights]
    whole = [int(part) for part in exact]
    order = sorted(range(len(weights)), key=lambda i: (whole[i] - exact[i], i))  # ties go to the first
    for i in order[: total - sum(whole)]:
        whole[i] += 1
    return whole
