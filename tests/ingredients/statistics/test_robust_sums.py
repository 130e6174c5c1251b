"""The geometric median of sums, by hand and with a site that lies."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from osfl.core.errors import UsageError
from osfl.core.plan import check_plan
from osfl.core.types import Judging, Limits, Payload, Privacy, Topology, Upload
from osfl.evaluation.scores import metrics, probabilities
from osfl.ingredients.statistics.gaussians import Statistics, folded_statistics, summed, unpacked
from osfl.ingredients.statistics.robust_sums import geometric_total
from osfl.runtime.workers import compute_threads
from osfl.simulate.checks import small_federation
from tests.rounds.judging.uploads import lying, sent


def term(*rows: tuple[int, float, float]) -> Statistics:
    """Of images with a class and two features each."""
    return folded_statistics(torch.tensor([row[1:] for row in rows]), torch.tensor([row[0] for row in rows]), 2)


HONEST = term((0, 1.0, 0.0), (0, 3.0, 0.0), (1, 0.0, 5.0), (1, 0.0, 7.0))  # means (2, 0) and (0, 6)
ROLLED = Statistics(HONEST.sums.roll(1, 0), HONEST.gram, HONEST.counts)


def test_sites_that_agree_add_up_to_their_sum() -> None:
    found, plain = geometric_total([HONEST] * 3, 0.4), summed([HONEST] * 3)
    for name in ("sums", "gram", "counts"):
        torch.testing.assert_close(getattr(found, name), getattr(plain, name))


def test_one_of_three_that_exchanges_classes_changes_no_mean() -> None:
    found = geometric_total([HONEST, HONEST, ROLLED], 0.4)
    torch.testing.assert_close(found.means(), HONEST.means(), atol=1e-3, rtol=1e-3)
    assert found.counts.tolist() == [6, 6]
    within = unpacked(found.gram) - (found.means() * found.counts[:, None]).T @ found.means()
    torch.testing.assert_close(within / 12, torch.diag(torch.tensor([0.5, 0.5])).double(), atol=1e-2, rtol=0)


def test_a_site_with_most_images_has_no_majority_in_a_class() -> None:
    """Its thousand copies outweigh a sum, and are two fifths of the weight here; nobody's class stays empty."""
    found = geometric_total([HONEST, HONEST, ROLLED * 1000.0], 0.4)
    torch.testing.assert_close(found.means(), HONEST.means(), atol=1e-3, rtol=1e-3)
    assert not torch.allclose(summed([HONEST, HONEST, ROLLED * 1000.0]).means(), HONEST.means(), atol=1)
    only = term((0, 1.0, 0.0), (0, 3.0, 0.0))
    assert geometric_total([only, only], 0.4).means()[1].tolist() == [0, 0]
    nothing = geometric_total([only * 0.0, only * 0.0], 0.4)
    assert float(nothing.counts.sum()) == 0 and not nothing.sums.any()


def test_the_covariance_stays_one() -> None:
    rng = torch.Generator().manual_seed(0)
    terms = [folded_statistics(torch.randn(40, 6, generator=rng), torch.arange(40) % 3, 3) for _ in range(5)]
    found = geometric_total(terms, 0.4)
    within = unpacked(found.gram) - (found.means() * found.counts[:, None]).T @ found.means()
    assert float(torch.linalg.eigvalsh(within).min()) > 0


def as_if_four_times(payload: Payload) -> Payload:
    """Sums of each image four times: as many as a site may claim before its term is scaled down."""
    counted = {name: 4 * value for name, value in payload.facts.items() if name == "samples"}
    by_class = {name: [4 * n for n in value] for name, value in payload.facts.items() if name == "class_counts"}
    return Payload({name: 4 * t for name, t in payload.tensors.items()}, {**payload.facts, **counted, **by_class})


@pytest.mark.parametrize("name", ["onesum", "fedcgs"])
def test_a_site_that_exchanges_classes_costs_less(name: str) -> None:
    federation = small_federation(name, "iid", 5, samples=800)
    with compute_threads(1):
        method, ctx, honest = sent(federation)
        lies = {**honest, "client-01": as_if_four_times(lying(method, federation, "client-01"))}
        score = dict[str, float]()
        for how in ("mean", "geometric"):
            judged = replace(ctx, plan=replace(ctx.plan, judging=Judging(combine=how)))
            check_plan(judged.plan)
            for what, payloads in (("honest", honest), ("lied", lies)):
                release = method.server_phase([Upload(c, "", p) for c, p in sorted(payloads.items())], judged)
                answers = probabilities(method.build(release.shared), federation.test.images, ctx.device, ctx.map)
                score[f"{what} {how}"] = metrics(answers, federation.test.labels.numpy())["accuracy"] or 0.0
    assert score["honest geometric"] > score["honest mean"] - 0.02, score
    assert score["lied geometric"] > max(score["honest geometric"] - 0.02, score["lied mean"] + 0.05), score


def test_where_nobody_can_look_at_a_term_it_is_refused() -> None:
    plan = replace(small_federation("onesum").plan, judging=Judging(combine="geometric"))
    check_plan(plan)
    with pytest.raises(UsageError, match=r"judging.combine: in a secure sum the server sees no single upload; leave it out"):
        check_plan(replace(plan, secure_sum=True, limits=Limits(share=1.0)))
    with pytest.raises(UsageError, match=r"judging.combine: with a topology no server combines what sites sent; leave it out"):
        check_plan(replace(plan, topology=Topology("ring")))
    private = replace(plan, settings=replace(plan.settings, dimensions=64), privacy=Privacy(8.0, 1e-5))
    with pytest.raises(UsageError, match=r"judging.combine: noisy sums are only added"):
        check_plan(private)
    with pytest.raises(UsageError, match=r"judging.combine: onesum has no 'median'; it has: geometric"):
        check_plan(replace(plan, judging=Judging(combine="median")))
