"""Scales and bounds of a secure sum: no sum of values within their bounds leaves int64; what contradicts a plan is named."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from osfl.core.errors import UsageError
from osfl.core.plan import check_plan, plan_from, read_plan, write_plan
from osfl.core.registry import load, names
from osfl.core.settings import resolve_settings
from osfl.core.sums import LARGEST, most_of, scale_of
from osfl.core.topology import parse_topology
from osfl.core.types import Limits, Plan, Summand, Task

TASK = Task("cells", ("round", "long"), (3, 28, 28))
CLIENTS = ("north", "south", "west")


def make_plan(method: str = "onesum", share: float = 1.0, secure_sum: bool = True, **changes: object) -> Plan:
    settings = resolve_settings(load(method), "smoke", changes)
    return Plan(TASK, method, settings, CLIENTS, Limits(share=share), secure_sum=secure_sum)


@pytest.mark.parametrize(("bound", "sites"), [(1.0, 2), (1024.0, 5), (4096e6, 1000), (0.37, 7), (2.0**61, 3), (2**61, 4)])
def test_the_scale_is_the_largest_that_cannot_overflow(bound: float, sites: int) -> None:
    summand = Summand((1,), bound)
    scale = scale_of(summand, sites)
    assert sites * most_of(summand, sites) <= LARGEST and scale.bit_count() <= 1
    assert scale == 2**62 or sites * int(bound * max(1, 2 * scale)) > LARGEST


def test_whole_numbers_are_added_as_they_are_or_not_at_all() -> None:
    most = LARGEST // 3
    assert scale_of(Summand((1,), most, whole=True), 3) == 1 and most_of(Summand((1,), most, whole=True), 3) == most
    assert scale_of(Summand((1,), most + 1, whole=True), 3) == 0
    assert scale_of(Summand((1,), 2.0**63), 3) == 0


def test_a_plan_says_so_and_keeps_its_digest_otherwise(tmp_path: Path) -> None:
    secure, plain = make_plan(), make_plan(secure_sum=False)
    assert "round" not in plain.as_json() and secure.as_json()["round"]["secure_sum"] is True
    for plan in (secure, plain):
        (tmp_path / "plan.toml").write_text(write_plan(plan))
        assert read_plan(tmp_path / "plan.toml") == plan
    assert "secure_sum = false" in write_plan(plain)
    assert "secure_sum" not in write_plan(Plan(TASK, "ensemble", resolve_settings(load("ensemble"), "smoke"), CLIENTS))
    with pytest.raises(UsageError, match=r"'round\.secure_sum': expected true or false"):
        plan_from({**plain.as_json(), "round": {"secure_sum": "yes"}}, "plan")


def test_which_methods_can() -> None:
    assert [name for name in names() if load(name).provides("summands")] == ["fedavg", "fedcgs", "onesum"]


REFUSED: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "one site": (lambda p: replace(p, clients=CLIENTS[:1]), "the sum over one site is that site's upload"),
    "quorum of one": (lambda p: replace(p, quorum=1), "the sum over one site is that site's upload"),
    "share": (lambda p: replace(p, limits=Limits()), r"limits\.share: the server of a secure sum sees no site's counts"),
    "late": (lambda p: replace(p, late=True), r"round\.late: a secure sum has no late sites"),
    "topology": (lambda p: replace(p, topology=parse_topology("ring", 1)), "topology: peers read each other's uploads"),
    "overflow": (lambda p: replace(p, clients=tuple(f"s{n:05}" for n in range(9000))), "'gram' over 9000 sites .* overflow"),
    "factors": (lambda p: make_plan(send="smaller"), "factors of G do not add up"),
    "method": (lambda p: make_plan("ensemble"), "the server of ensemble needs every upload"),
    "weights": (lambda p: make_plan("fedavg"), "with a secure sum the server sees no site's counts; set weighting=uniform"),
    "bound": (lambda p: make_plan("fedcgs", bound=1e9), "'gram' over 3 sites .* lower limits.samples or the setting 'bound'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_contradicts_a_secure_sum_is_refused(case: str) -> None:
    change, command = REFUSED[case]
    check_plan(make_plan())
    with pytest.raises(UsageError, match=command):
        check_plan(change(make_plan()))
