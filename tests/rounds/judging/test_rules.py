"""Each rule by hand-made numbers: what it names, and what it lets be."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import pytest
import torch

from osfl.core.types import Payload, Probed, Upload
from osfl.rounds.judging import rules
from osfl.rounds.judging.probes import Comparison, public_noise

NAMES = ("a", "b", "c", "d", "e")
RNG = torch.Generator().manual_seed(0)


def scales(**weights: torch.Tensor) -> dict[str, Mapping[tuple[str, tuple[int, ...]], float]]:
    return {name: rules.numbers_of(Upload(name, "", Payload({"w": value}, {}))).scales for name, value in weights.items()}


def named(found: list[rules.Suspicion]) -> set[str]:
    return {one.client for one in found}


def test_a_claim_beyond_all_others_together() -> None:
    probed = {name: Probed((10.0, 20.0)) for name in NAMES} | {"a": Probed((10_000.0, 0.0))}
    none = {name: rules.numbers_of(Upload(name, "", Payload({}, {}))) for name in NAMES}
    assert named(rules.claims(probed, none)) == {"a"}
    assert not rules.claims({**probed, "a": Probed((1_000.0, 0.0))}, none)  # large hospitals exist
    uploads = [Upload(name, "", Payload({}, {"samples": 10**6 if name == "b" else 50})) for name in NAMES]
    assert named(rules.claims(dict.fromkeys(NAMES, Probed()), {u.client: rules.numbers_of(u) for u in uploads})) == {"b"}


def test_several_that_claim_too_much_do_not_hide_each_other() -> None:
    names = [f"s{number}" for number in range(10)]
    numbers = {name: rules.numbers_of(Upload(name, "", Payload({}, {}))) for name in names}
    honest = {name: Probed((40.0, 60.0)) for name in names}
    two = {"s3": Probed((1e6, 0.0)), "s7": Probed((5e5, 5e5))}
    assert named(rules.claims({**honest, **two}, numbers)) == {"s3", "s7"}
    assert not rules.claims({**honest, **{f"s{n}": Probed((1e6, 0.0)) for n in range(4)}}, numbers)  # who is odd here?
    assert not rules.claims({**honest, "s3": Probed((8000.0, 0.0)), "s7": Probed((8000.0, 0.0))}, numbers)


def test_copies_are_named_both_and_zeros_are_none() -> None:
    vectors = {name: torch.randn(50, generator=RNG) for name in NAMES}
    assert not rules.copies(vectors)
    assert named(rules.copies({**vectors, "b": vectors["d"] + 1e-4})) == {"b", "d"}
    assert not rules.copies({**vectors, "a": torch.zeros(50), "b": torch.zeros(50)})
    assert named(rules.copies({"a": vectors["a"], "b": vectors["a"], "c": torch.ones(9)})) == {"a", "b"}


def test_one_far_from_all_others_makes_no_copies_of_them() -> None:
    """Models that began alike and learned little; a liar among four sends numbers beyond all measure."""
    start, rng = torch.randn(500, generator=torch.Generator().manual_seed(1)), torch.Generator().manual_seed(2)
    alike = {name: start + 0.005 * torch.randn(500, generator=rng) for name in "abc"}
    assert not rules.copies({**alike, "d": start + 0.005 * torch.randn(500, generator=rng)})
    for far in (torch.full((500,), 1e38), -start, torch.randn(500, generator=rng) * 1e3):
        assert not rules.copies({**alike, "d": far.double()})
        assert named(rules.copies({**alike, "c": alike["b"] + 1e-6, "d": far.double()})) == {"b", "c"}


def test_a_hundred_copies_take_a_hundred_sentences() -> None:
    found = rules.copies({f"site-{number:02}": torch.ones(9) for number in range(100)})
    assert len(found) == 100
    assert found[0].client == "site-00"
    assert found[0].text == "sent nearly the same as site-01 and 98 more sites: one of them may have copied the other"
    assert max(len(one.text) for one in found) < 200


def test_weights_ten_times_as_large() -> None:
    weights = {name: torch.randn(8, 8, generator=RNG) for name in NAMES}
    assert not rules.sizes(scales(**weights))
    for factor in (10.0, 0.1):
        assert named(rules.sizes(scales(**{**weights, "c": weights["c"] * factor}))) == {"c"}


def compared(**shifts: int) -> Comparison:
    """Sites whose points are one-hot rows of four classes; each calls class k by k plus its own number."""
    labels, names = torch.arange(4).repeat_interleave(3), tuple(sorted(shifts))
    real = {name: (labels - shifts[name]) % 4 for name in names}  # what its classes really are
    answers = {name: torch.stack([torch.eye(4)[(real[name] + shifts[other]) % 4] for other in names]) for name in names}
    everything = dict.fromkeys(names, torch.ones(4, dtype=torch.bool))
    return Comparison(names, dict.fromkeys(names, labels), answers, everything, dict.fromkeys(names, torch.full((4,), 15)))


def test_who_calls_classes_otherwise_than_all_others_is_named_alone() -> None:
    assert not rules.contradictions(compared(a=0, b=0, c=0, d=0, e=0))
    assert named(rules.contradictions(compared(a=0, b=1, c=0, d=0, e=0))) == {"b"}
    assert named(rules.contradictions(compared(**{f"s{i}": 0 for i in range(8)}, x=1, y=2))) == {"x", "y"}


def knowing(comparison: Comparison, **classes: set[int]) -> Comparison:
    """The same sites; each knows these classes, and shows points of them alone."""
    known = {name: torch.tensor([label in own for label in range(4)]) for name, own in classes.items()}
    kept = {name: known[name][comparison.labels[name]] for name in known}
    labels = {name: comparison.labels[name][kept[name]] for name in known}
    return replace(comparison, known=known, labels=labels, answers={n: comparison.answers[n][:, kept[n]] for n in known})


def test_one_class_that_two_others_call_otherwise_shows_little() -> None:
    wide, others = compared(a=1, b=0, c=0, d=0, e=0), {"b": {1, 2}, "c": {1, 2}, "d": {2, 3}, "e": {2, 3}}
    assert not rules.contradictions(knowing(wide, a={1}, **others))
    assert named(rules.contradictions(knowing(wide, a={2}, **others))) == {"a"}


def called(comparison: Comparison, names: Mapping[int, int], of: Collection[str] = NAMES) -> Comparison:
    """The same, but all sites call points of these classes by other names, where they are of these sites."""
    answers = {name: one.clone() for name, one in comparison.answers.items()}
    for name in of:
        for label, other in names.items():
            answers[name][:, comparison.labels[name] == label] = torch.eye(4)[other]
    return replace(comparison, answers=answers)


def test_classes_that_nobody_recognizes_of_anybody_are_no_contradiction() -> None:
    """With few images of a class at each site, networks mistake it everywhere."""
    honest, others = compared(a=0, b=0, c=0, d=0, e=0), {name: {0, 1, 2, 3} for name in "bcde"}
    everywhere = knowing(called(honest, {1: 2, 2: 1}), a={1, 2}, **others)
    assert rules.agreement("a", everywhere, everywhere.panel) == pytest.approx(-1 / 3)
    assert not rules.contradictions(everywhere)
    only_here = knowing(called(honest, {1: 2, 2: 1}, "a"), a={1, 2}, **others)
    assert named(rules.contradictions(only_here)) == {"a"}
    assert rules.evidence_against("a", only_here, only_here.panel) == {1: 1.0, 2: 1.0}


def test_what_the_panel_shows_is_computed_once_for_sites_outside_of_it() -> None:
    """Outside it nobody is asked about others, so that what these show does not depend on who is looked at."""
    whole = compared(a=0, b=1, c=0, d=0, e=0)
    some = replace(whole, panel=("a", "b", "c"), answers={name: one[:3] for name, one in whole.answers.items()})
    shown = rules._shown_by_panel(some, NAMES)
    assert set(shown) == {"a", "b", "c"} and not rules._shown_by_panel(whole, NAMES)
    for name in NAMES:
        assert rules.evidence_against(name, some, NAMES, shown) == rules.evidence_against(name, some, NAMES)


def test_one_class_of_many_is_no_proof() -> None:
    """Of four classes that the others call otherwise they recognize one of each other."""
    others = called(compared(a=0, b=0, c=0, d=0, e=0), {1: 2, 2: 3, 3: 1}, "bcde")
    unlike = called(others, {0: 1, 1: 2, 2: 3, 3: 0}, "a")
    assert rules.evidence_against("a", unlike, NAMES) == {0: 1.0, 1: 0.0, 2: 0.0, 3: 0.0}
    assert not rules.contradictions(unlike)


def test_where_sites_hardly_agree_nobody_is_named() -> None:
    assert not rules.contradictions(compared(a=0, b=1, c=2, d=3))


def test_a_class_that_only_one_site_knows_contradicts_nobody() -> None:
    everybody, rare = compared(a=0, b=0, c=0, d=0), torch.tensor([True, True, True, False])
    labels = {**everybody.labels, "a": torch.full((12,), 3)}
    known = {**dict.fromkeys(everybody.known, rare), "a": torch.tensor([False, False, False, True])}
    assert rules.agreement("a", replace(everybody, labels=labels, known=known), everybody.panel) is None


def cloud(center: float, spread: float = 1.0, classes: int = 3) -> Probed:
    labels = torch.arange(classes).repeat_interleave(20)
    points = torch.randn(len(labels), 12, generator=RNG) * spread + labels[:, None] * 4.0 + center
    return Probed((50.0,) * classes, None, points, labels)


def test_a_class_that_only_one_site_has_is_as_far_as_classes_are() -> None:
    """The others' equal classes lie close together; its own is as far from them as another class of theirs is."""
    probed, own = {name: cloud(0.0, spread=0.1, classes=2) for name in NAMES}, cloud(8.0, spread=0.1, classes=1)
    assert own.labels is not None
    unique = Probed((0.0, 0.0, 50.0), None, own.points, own.labels + 2)
    assert not rules.distances({**probed, "e": unique})
    far = cloud(16.0, spread=0.1, classes=1)
    assert named(rules.distances({**probed, "e": Probed((0.0, 0.0, 50.0), None, far.points, own.labels + 2)})) == {"e"}


def test_a_class_that_nobody_else_has_may_lie_apart_from_all_others() -> None:
    """Twice as far as classes usually are from each other: too far for a class that others have, too, but not for one alone."""
    probed = {name: cloud(0.0, spread=0.1, classes=2) for name in NAMES}
    apart = cloud(12.0, spread=0.1, classes=1)
    assert apart.labels is not None
    alone, shared = (replace(apart, counts=(50.0,) * 3, labels=apart.labels + label) for label in (2, 1))
    assert not rules.distances({**probed, "e": alone})
    assert named(rules.distances({**probed, "e": shared})) == {"e"}


def test_points_far_from_everybody_and_points_all_alike() -> None:
    probed = {name: cloud(0.0) for name in NAMES}
    assert not rules.distances(probed) and not rules.diversity(probed)
    assert named(rules.distances({**probed, "e": cloud(60.0)})) == {"e"}
    assert named(rules.distances({**probed, "e": cloud(1e30)})) == {"e"}
    assert named(rules.diversity({**probed, "e": cloud(0.0, spread=1e-3)})) == {"e"}
    few = cloud(0.0, spread=1e-3)
    assert not rules.diversity({**probed, "e": Probed((5.0,) * 3, None, few.points, few.labels)})


def test_a_classifier_that_answers_everything_alike() -> None:
    probed = {name: Probed((50.0, 50.0, 0.0, 0.0)) for name in NAMES}
    honest = compared(a=0, b=0, c=0, d=0, e=0)
    constant = replace(honest, given={**honest.given, "a": torch.tensor([0, 60, 0, 0])})
    assert not rules.constants(probed, honest)
    assert named(rules.constants(probed, constant)) == {"a"}
    single = {**probed, "a": Probed((50.0, 0.0, 0.0, 0.0))}  # one class is all that it has
    assert not rules.constants(single, constant)


def test_public_noise_is_nobodys_image() -> None:
    one, again = (public_noise(3, (3, 16, 20), torch.Generator().manual_seed(1)) for _ in range(2))
    assert torch.equal(one, again) and one.shape == (3, 3, 16, 20) and float(one.abs().max()) <= 1
    assert float(one.flatten(1).std(1).min()) > 0.1
