"""Classifiers alone: who calls classes otherwise both ways is named, and who merely recognizes little is not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks import lying_sites
from osfl.core.method import Context
from osfl.core.types import ClientId, Plan, Probed, Task, Upload
from osfl.rounds.judging.both_ways import LEAST, misunderstood, understanding
from osfl.rounds.judging.judge import judge
from osfl.rounds.judging.probes import Comparison, compare
from osfl.runtime.workers import compute_threads
from tests.rounds.judging.test_rules import NAMES, compared, knowing, named

TASK = Task("t", ("a", "b", "c", "d"), (1, 2, 2))


def blurred(comparison: Comparison, share: float, *of: ClientId) -> Comparison:
    """The same, but networks of these sites mostly do not know what they see, and nobody knows their images."""
    answers = {}
    for client, rows in comparison.answers.items():
        weight = torch.tensor([share if client in of or other in of else 1.0 for other in comparison.panel])[:, None, None]
        answers[client] = rows * weight + (1 - weight) / rows.shape[2]
    return replace(comparison, answers=answers)


def test_who_renames_classes_is_named_alone() -> None:
    assert not misunderstood(compared(a=0, b=0, c=0, d=0, e=0))
    assert named(misunderstood(compared(a=0, b=1, c=0, d=0, e=0))) == {"b"}
    assert named(misunderstood(compared(**{f"s{i}": 0 for i in range(8)}, x=1, y=1))) == {
        "x",
        "y",
    }


def test_a_site_that_is_understood_a_third_as_well_is_not_named() -> None:
    honest = compared(a=0, b=0, c=0, d=0, e=0)
    assert not misunderstood(blurred(honest, 0.35, "a"))
    assert named(misunderstood(blurred(honest, 0.1, "a"))) == {"a"}  # as if it had learned from noise
    assert not misunderstood(blurred(honest, 0.1, *NAMES))  # where all understand little, nobody is odd


def test_a_preference_for_one_class_is_no_contradiction() -> None:
    """It gives half of its weight to the first class, whatever it sees; what is left is right."""
    honest = compared(a=0, b=0, c=0, d=0, e=0)
    answers = {client: rows.clone() for client, rows in honest.answers.items()}
    for rows in answers.values():
        rows[0] = 0.5 * rows[0] + 0.5 * torch.eye(4)[0]
    assert not misunderstood(replace(honest, answers=answers))
    assert understanding(replace(honest, answers=answers), NAMES)["a"] > 0.7 * understanding(honest, NAMES)["a"]


def test_fewer_than_two_known_classes_say_nothing() -> None:
    one = knowing(compared(a=1, b=0, c=0, d=0, e=0), a={2}, **{name: {1, 2} for name in "bcde"})
    assert "a" not in understanding(one, NAMES) and not misunderstood(one)
    assert len(understanding(one, NAMES)) >= LEAST


class _Shifted(nn.Module):
    """Knows four images, and calls each by its number plus a shift."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.shift = shift

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.roll(x.flatten(1), self.shift, 1) * 10


@pytest.mark.parametrize("liar", range(7))
def test_sites_outside_the_panel_are_asked_both_ways_too(monkeypatch: pytest.MonkeyPatch, liar: int) -> None:
    monkeypatch.setattr("osfl.rounds.judging.probes.PANEL", 5)
    shifts = {f"s{number}": int(number == liar) for number in range(7)}
    images = (torch.eye(4) * 255).reshape(4, 1, 2, 2).to(torch.uint8)
    sites = {
        client: Probed((20,) * 4, None, images, (torch.arange(4) + shift) % 4, pixels=True) for client, shift in shifts.items()
    }
    ctx = Context(Plan(TASK, "fedavg", None, tuple(shifts)), torch.device("cpu"))
    found = compare(sites, lambda client: _Shifted(shifts[client]), ctx)
    assert len(found.panel) == 5 and set(found.replies) == set(shifts) - set(found.panel)
    values = understanding(found, set(shifts))
    honest = [value for client, value in values.items() if client != f"s{liar}"]
    assert min(honest) > 0.7 * max(honest)  # whether in the panel or not
    assert named(misunderstood(found)) == {f"s{liar}"}


def test_a_lie_that_one_direction_alone_did_not_show() -> None:
    """A label flip among networks that recognize little of each other; nobody is named while nobody lies."""
    made = lying_sites.federation("ensemble by class counts", "digits", 5, "dirichlet:0.3", 5028)
    with compute_threads(1):
        method, ctx, sent = lying_sites.sent_by_all(made)
        liar = made.shards[0]
        lied = lying_sites.Lied(method, liar, sent[liar.client], sent["client-02"], ctx, 10)
        lies = {**sent, liar.client: lying_sites.label_flip(lied)}
        fine, found = (judge(method, [Upload(c, "", p) for c, p in sorted(some.items())], ctx) for some in (sent, lies))
    assert fine == [] and {(one.client, one.rule) for one in found} == {("client-01", "contradiction")}
