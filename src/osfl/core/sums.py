"""Numbers of a secure sum: whole numbers modulo 2^64 of which the plan makes sure that their sum cannot overflow.

A site's value v is sent as round(v * scale). The scale is the largest power of two with which the values of all sites of the
plan, each at its bound, stay within int64; so it follows from the plan, and so does what rounding costs: a sum of K sites is
at most K / (2 * scale) off. Whole numbers have the scale 1 and lose nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from osfl.core.types import ClientId, Plan, Summand

if TYPE_CHECKING:
    from osfl.core.method import Method

LARGEST = 2**63 - 1
ALL_SITES: ClientId = "all sites"  # whose "upload" the server phase gets: no client can be called like that
FEWEST = 2  # uploads in a sum: a sum over one is that one


def scale_of(summand: Summand, sites: int) -> int:
    """Steps a unit; 0 where even whole units could overflow."""
    for power in (0,) if summand.whole else range(62, -1, -1):
        if sites * int(summand.bound * 2**power) <= LARGEST:
            return int(2**power)
    return 0


def most_of(summand: Summand, sites: int) -> int:
    """The largest number that one of so many sites may add."""
    return int(summand.bound * scale_of(summand, sites))


def secure_sum_problems(plan: Plan, method: Method) -> list[str]:
    """What contradicts a secure sum, a sentence each; `UsageError` where the method's server needs more than a sum."""
    sites, problems = len(plan.clients), list[str]()
    if sites < FEWEST or plan.quorum == 1:
        problems.append(
            "round.secure_sum: the sum over one site is that site's upload; it needs two sites and a quorum of 0 or 2"
        )
    if plan.limits.share < 1:
        problems.append(
            "limits.share: the server of a secure sum sees no site's counts, so it cannot cap anybody's share; set share = 1"
        )
    if plan.late:
        problems.append("round.late: a secure sum has no late sites, since the masks of a missing one are taken out of the sum")
    if plan.topology is not None:
        problems.append("topology: peers read each other's uploads, and a secure sum has none to read; leave one of them out")
    for name, summand in method.summands(plan).items():
        if not scale_of(summand, sites):
            problems.append(
                f"round.secure_sum: the sum of {name!r} over {sites} sites with values up to {summand.bound:g} could overflow "
                "64 bits; lower limits.samples or the setting 'bound'"
            )
    return problems
