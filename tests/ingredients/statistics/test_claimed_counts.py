"""Weights by claimed counts: nobody has more than the plan's share, and claims below it are not touched."""

from __future__ import annotations

import pytest
import torch

from osfl.core.errors import RoundError
from osfl.core.types import Limits, Payload, Upload
from osfl.ingredients.ensembles.ensemble import Ensemble, combine
from osfl.ingredients.ensembles.odds import odds, softened
from osfl.ingredients.statistics.claimed_counts import capped, capped_counts, capped_sites, drawn_for, largest, sizes_of
from osfl.methods.federated_factory.cells import Cell, quotas

MOST = Limits().samples


def test_claims_below_the_cap_are_not_touched() -> None:
    claims = torch.tensor([3.0, 2.0, 1.0])  # exactly half is no excess
    assert capped(claims, 0.5) is not None and torch.equal(capped(claims, 0.5), claims)
    table = torch.tensor([[30.0, 0, 7], [20, 10, 7], [10, 10, 3]], dtype=torch.float64)
    for cap in (capped, capped_sites, capped_counts):
        assert torch.equal(cap(table, 0.5), table), cap


@pytest.mark.parametrize("share", [0.5, 0.3, 0.25, 0.9])
@pytest.mark.parametrize("sites", [1, 2, 3, 5, 9])
def test_nobody_has_more_than_the_share(share: float, sites: int) -> None:
    rng = torch.Generator().manual_seed(sites)
    for _ in range(20):
        claims = (torch.rand((sites, 4), generator=rng) ** 8 * 1000).round().double()
        claims[0] = MOST
        found = capped(claims, share)
        held = (claims > 0).sum(0)
        limit = torch.maximum(torch.tensor(share), 1 / held.clamp_min(1))
        assert bool((found <= claims).all()) and bool(((found > 0) == (claims > 0)).all())
        assert bool((found / found.sum(0) <= limit + 1e-6).all())


def test_one_site_keeps_all_and_two_are_alike() -> None:
    assert capped(torch.tensor([7.0, 0.0]), 0.5).tolist() == [7, 0]
    assert capped(torch.tensor([90.0, 10.0]), 0.5).tolist() == [10, 10]
    assert capped(torch.tensor([90.0, 10.0]), 1.0).tolist() == [90, 10]


def test_the_size_of_a_class_stays_and_a_site_is_no_more_than_the_others_together() -> None:
    honest = torch.tensor([[90.0, 0, 5], [10, 50, 5], [0, 50, 5]])
    assert capped_counts(honest, 0.5).tolist() == [[50, 0, 5], [50, 50, 5], [0, 50, 5]]
    lying = torch.tensor([[0.0, 0, MOST], [10, 50, 5], [0, 50, 5]])
    assert capped_sites(lying, 0.5)[0].tolist() == [0, 0, 120]
    assert capped_counts(lying, 0.5)[:, 2].tolist() == pytest.approx([65, 32.5, 32.5])


def upload(client: str, samples: int | None) -> Upload:
    return Upload(client, "", Payload({}, {} if samples is None else {"samples": samples}))


def test_the_start_of_a_student_is_no_liar() -> None:
    sites = [upload("a", 30), upload("b", MOST), upload("c", 20)]
    assert largest(sites, 0.5).client == "a" and largest(sites, 1.0).client == "b" and largest(sites[1:2], 0.5).client == "b"
    assert sizes_of(sites, 0.5).tolist() == [30, 50, 20]
    with pytest.raises(RoundError) as caught:
        sizes_of([upload("a", None)], 0.5)
    assert caught.value.client == "a" and caught.value.field == "facts.samples" and "--exclude a" in str(caught.value)


def test_drawing_is_bounded_by_the_plan() -> None:
    wanted = [[MOST, 0], [20, 30], [10, 40]]
    assert sum(map(sum, drawn_for(wanted, 4000, Limits(share=0.5)))) == 199  # all others ask for 100
    alone = drawn_for([[MOST, 1]], 5000, Limits(drawn_bytes=1_000_000))
    assert alone == [[199, 1]]
    assert sum(map(sum, drawn_for(wanted, 4000, Limits()))) in (165, 166)  # a share of 0.4
    assert drawn_for(wanted[1:], 4000, Limits()) == [[15, 35], [15, 35]]  # two are alike, and classes stay as large


@pytest.mark.parametrize("mode", ["size", "class_count"])
def test_an_ensemble_of_five_with_one_claim_beyond_all(mode: str) -> None:
    counts = torch.full((5, 3), 20.0)
    counts[4] = MOST
    weights = counts.sum(1) if mode == "size" else counts
    members = [torch.nn.Identity() for _ in counts]
    assert Ensemble(members, mode, weights, 0.5).weights[4].max() == pytest.approx(0.5)
    assert Ensemble(members, mode, weights).weights[4].max() > 0.99
    logits = torch.randn((5, 7, 3), generator=torch.Generator().manual_seed(0))
    fair = weights.clone()
    fair[4] = fair[:4].sum(0)
    torch.testing.assert_close(combine(logits, mode, weights, share=0.5), combine(logits, mode, fair))


def test_odds_cap_votes_and_leave_the_proportions_of_a_site_alone() -> None:
    counts = torch.tensor([[20.0, 5, 0], [10, 30, 8], [MOST, 9, 8]])
    logits = torch.randn((3, 6, 3), generator=torch.Generator().manual_seed(1))
    votes = capped(softened(counts, 0.5), 0.5)
    assert float((votes / votes.sum(0)).max()) <= 0.5 + 1e-6
    assert not torch.allclose(odds(logits, counts, share=0.5), odds(logits, counts))
    fair = torch.tensor([[20.0, 25, 3], [10, 20, 8], [20, 19, 8]])
    assert torch.equal(odds(logits, fair, share=0.5), odds(logits, fair))


def test_no_generator_is_asked_for_more_than_half_of_a_class() -> None:
    cells = [Cell(label, client, 20, {}) for label in (0, 1) for client in "abcd"]
    cells += [Cell(label, "z", MOST // 2, {}) for label in (0, 1, 2)]
    asked = quotas(cells, 100, share=0.5)
    assert asked[0, "z"] == asked[1, "z"] == 40 and asked[2, "z"] == 100  # nobody else has the third class
    assert quotas([*cells[:4], cells[8]], 100, share=0.5)[0, "z"] == 50
    assert quotas(cells, 100)[0, "z"] == 100
    natural = quotas(cells, 100, "empirical", 0.5)
    assert sum(natural[label, "z"] for label in (0, 1, 2)) <= 151
    assert quotas(cells[:8], 100, share=0.5) == quotas(cells[:8], 100)
