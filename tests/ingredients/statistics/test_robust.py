"""Averages that bear some members that lie, by hand-made numbers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from osfl.core.errors import UsageError
from osfl.core.plan import check_plan, plan_from, write_plan
from osfl.core.types import Judging, Upload
from osfl.ingredients.statistics.averaging import ROBUST, Combine, geometric_weights, robust_average
from osfl.runtime.workers import compute_threads
from osfl.simulate.checks import small_federation
from tests.rounds.judging.uploads import sent


def members(*values: float) -> list[dict[str, torch.Tensor]]:
    return [{"w": torch.tensor([value, -value], dtype=torch.float32), "seen": torch.tensor(3)} for value in values]


@pytest.mark.parametrize(
    ("how", "values", "weights", "expected"),
    [
        ("median", (1, 2, 100), (1, 1, 1), 2),
        ("median", (1, 2, 3, 100), (1, 1, 1, 1), 2.5),
        ("median", (1, 2, 100), (3, 1, 1), 1),  # who has most of the weight
        ("trimmed", (1, 2, 3, 4, 100), (1, 1, 1, 1, 1), 3),
        ("trimmed", (0, 10), (1, 1), 5),
        ("geometric", (1, 1, 1, 100), (1, 1, 1, 1), 1),
        ("geometric", (0, 1), (1, 1), 0.5),
    ],
)
def test_by_hand(how: Combine, values: tuple[float, ...], weights: tuple[float, ...], expected: float) -> None:
    found = robust_average(members(*values), weights, how)
    assert found["w"].tolist() == pytest.approx([expected, -expected], abs=1e-4) and int(found["seen"]) == 3


def test_the_geometric_median_is_a_mixture_of_members() -> None:
    rng = torch.Generator().manual_seed(0)
    some = [{"w": torch.randn(20, generator=rng)} for _ in range(6)]
    weights = geometric_weights(some, torch.ones(6, dtype=torch.float64))
    assert float(weights.sum()) == pytest.approx(1) and bool((weights >= 0).all())


@pytest.mark.parametrize("how", ROBUST)
def test_one_huge_site_does_not_move_fedavg(how: Combine) -> None:
    federation = small_federation("fedavg", "iid", 5)
    plan = replace(federation.plan, judging=Judging(combine=how))
    assert plan_from({**plan.as_json()}, "plan") == plan and f'combine = "{how}"' in write_plan(plan)
    assert plan.digest != federation.plan.digest and "judging" not in federation.plan.as_json()
    with compute_threads(1):
        method, ctx, honest = sent(federation)
        ctx = replace(ctx, plan=plan)
        huge = {name: t * 1000 if t.is_floating_point() else t for name, t in honest["client-01"].tensors.items()}
        changed = {**honest, "client-01": replace(honest["client-01"], tensors=huge)}
        first, second = (
            method.server_phase([Upload(c, "", p) for c, p in all_of.items()], ctx) for all_of in (honest, changed)
        )
    for name, tensor in first.shared.tensors.items():
        if tensor.ndim > 1:
            assert float((second.shared.tensors[name] - tensor).norm()) < 2 * float(tensor.norm())


def test_other_methods_refuse_a_rule_that_they_lack() -> None:
    with pytest.raises(UsageError, match=r"judging.combine: ensemble has no 'median'"):
        check_plan(replace(small_federation("ensemble").plan, judging=Judging(combine="median")))
