"""OneSum: one release for every partition to the last bit, terms that can be subtracted, and terms that are refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis

from osfl.core.errors import RoundError, TrainingError, UploadBlocked
from osfl.core.method import Context, add_up
from osfl.core.settings import resolve_settings
from osfl.core.types import Dataset, Limits, Payload, Privacy, Release, Shard, Task, Upload
from osfl.data.source import together
from osfl.ingredients.statistics.gaussians import NEVER, SMALL, packed, unpacked
from osfl.ingredients.statistics.public_map import LEVELS
from osfl.methods.onesum import OneSum
from osfl.methods.onesum.features import mirrored
from osfl.methods.onesum.head import head_of
from osfl.methods.onesum.settings import Settings
from osfl.models.input_facts import encoder_side
from osfl.reports.figures import figure_views
from osfl.rounds.egress import check_exposure, check_open_sums
from osfl.rounds.exposure import accepted, would_stop
from osfl.runtime.payloads import payload_digest
from osfl.simulate.checks import small_federation
from osfl.simulate.rehearsal import _shortened
from osfl.simulate.simulation import Federation, Simulation, prepare

ENCODER = {"features": "encoder", "encoder": "random", "window": 8, "resolution": 8, "stride": 8}
EVERYBODY = Limits(share=1.0)  # no cap: with it, a site above its share counts less, and the partition matters


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


def ctx(federation: Federation, **changes: Any) -> Context:
    return Context(replace(federation.plan, seed=0, limits=EVERYBODY), torch.device("cpu"), **changes)


def method(federation: Federation, **changes: object) -> OneSum:
    return OneSum(federation.plan.task, resolve_settings(OneSum, "smoke", changes))


def uploads(one: OneSum, federation: Federation) -> list[Upload]:
    return [Upload(s.client, "", one.client_phase(s, ctx(federation))) for s in federation.shards]


def released(federation: Federation, **changes: object) -> Release:
    one = method(federation, **changes)
    return one.server_phase(uploads(one, federation), ctx(federation))


def whole(partition: str, clients: int | None, seed: int) -> Federation:
    """All images of the clients; which are held out is cut by client."""
    federation = prepare(Simulation("onesum", "digits", clients, partition, "smoke", seed, samples=120, image_size=8))
    return replace(federation, shards=[replace(s, train=together([s.train, s.val])) for s in federation.shards])


PARTITIONS: Sequence[tuple[str, int | None, int]] = (("iid", 1, 3), ("iid", 4, 0), ("dirichlet:0.1", 5, 1), ("silos", None, 2))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"symmetry": "flip"},
        {"symmetry": "square"},
        {"head": "ridge"},
        {"head": "qda", "by_class": True},
        {**ENCODER, "least": 1},
    ],
    ids=str,
)
def test_every_partition_gives_the_same_release_to_the_last_bit(changes: dict[str, object]) -> None:
    found = {payload_digest(released(whole(*how), **{"least": 1, **changes}).shared) for how in PARTITIONS}
    assert len(found) == 1


@pytest.mark.parametrize("shrinkage", [0.05, 2.0])
def test_the_release_is_scikit_learn_s_on_the_pooled_features(shrinkage: float) -> None:
    """(1 - a) S_w + a tr(S_w) / d I with a = lambda / (lambda + tr(S_w) / d) is (1 - a) (S_w + lambda I), on features in units
    of their deviation; the likelihoods of ours are theirs times (1 - a)."""
    federation = whole("dirichlet:0.1", 5, 1)
    one = method(federation, shrinkage=str(shrinkage), least=1)
    release = one.server_phase(uploads(one, federation), ctx(federation)).shared
    data = together([shard.train for shard in federation.shards])
    x, y = one.encode(data.images, ctx(federation)), data.labels
    scale = x.std(0, correction=0).clamp_min(SMALL)
    standard, within = ((x - x.mean(0)) / scale).numpy(), torch.zeros((), dtype=torch.float64)
    for c in range(10):
        within = within + ((x[y == c] - x[y == c].mean(0)) / scale).square().sum()
    mean_variance = float(within) / x.numel()
    alpha = shrinkage / (shrinkage + mean_variance)
    theirs = LinearDiscriminantAnalysis(solver="lsqr", shrinkage=alpha).fit(standard, y.numpy())
    head = head_of(release.tensors)
    ours = ((x @ head.weight.T + head.bias) / (1 - alpha) + head.prior).numpy()
    expected = theirs.decision_function(standard)
    assert np.allclose(ours[:, 1:] - ours[:, :1], expected[:, 1:] - expected[:, :1], atol=1e-6)


def test_a_factor_and_a_triangle_give_the_same_release_to_the_last_bit() -> None:
    federation = whole("dirichlet:0.1", 5, 1)
    one = method(federation, send="smaller", filters=24, least=1)
    sent = uploads(one, federation)
    kinds = ["factor" in upload.payload.tensors for upload in sent]
    assert any(kinds)
    assert payload_digest(one.server_phase(sent, ctx(federation)).shared) == payload_digest(
        released(federation, filters=24, least=1).shared
    )
    factor = next(upload for upload in sent if "factor" in upload.payload.tensors)
    triangle = method(federation, filters=24, least=1).client_phase(
        next(s for s in federation.shards if s.client == factor.client), ctx(federation)
    )
    assert sum(t.numel() for t in factor.payload.tensors.values()) < sum(t.numel() for t in triangle.tensors.values())
    rows = factor.payload.tensors["factor"]
    assert torch.equal(packed((rows.T @ rows).round()).long(), triangle.tensors["gram"])


def test_forgetting_is_a_subtraction() -> None:
    """The total less a term is the total of a round which that site never joined, bit for bit, in any order."""
    federation = whole("dirichlet:0.5", 4, 0)
    one = method(federation)
    sent = uploads(one, federation)
    less = add_up(one, sent, ctx(federation)) - one.term(sent[1])
    never = add_up(one, [sent[3], sent[0], sent[2]], ctx(federation))
    assert less.images == never.images and set(less.tensors) == {"counts", "sums", "gram"}
    assert all(torch.equal(value, never.tensors[name]) for name, value in less.tensors.items())
    without = [upload for upload in sent if upload is not sent[1]]
    found = {payload_digest(one.server_phase(order, ctx(federation)).shared) for order in (without, without[::-1])}
    assert len(found) == 1


def test_what_is_sent_is_the_sums_of_features() -> None:
    federation = small_federation("onesum")
    one, shard = method(federation, symmetry="flip", least=1), federation.shards[0]
    payload = one.client_phase(shard, ctx(federation))
    both = [Dataset(copy, shard.train.labels) for copy in (shard.train.images, shard.train.images.flip(-1))]
    plain = method(federation)
    x = torch.cat([plain.encode(part.images, ctx(federation)) for part in both]) * (LEVELS / 8)
    labels = shard.train.labels.repeat(2)
    assert torch.equal(unpacked(payload.tensors["gram"]).double(), x.T @ x)
    for c in range(10):
        assert torch.equal(payload.tensors["sums"][c].double(), x[labels == c].sum(0))
    assert torch.equal(payload.tensors["counts"], torch.bincount(shard.train.labels, minlength=10))


def test_the_symmetries_of_a_square_are_eight() -> None:
    images = torch.arange(9).reshape(1, 1, 3, 3)
    assert len({tuple(copy.flatten().tolist()) for copy in mirrored(images, "square")}) == 8
    assert [len(list(mirrored(images, name))) for name in ("none", "flip")] == [1, 2]


@pytest.mark.parametrize("symmetry", ["flip", "square"])
def test_sums_over_mirrored_images_are_those_of_a_site_that_has_them(symmetry: str) -> None:
    federation = small_federation("onesum")
    more = []
    for shard in federation.shards:
        copies = [Dataset(copy, shard.train.labels) for copy in mirrored(shard.train.images, symmetry)]
        more.append(replace(shard, train=together(copies)))
    plain = released(replace(federation, shards=more), least=1).shared.tensors
    found = released(federation, symmetry=symmetry, least=1).shared.tensors
    assert set(found) == set(plain) and all(torch.equal(value, plain[name]) for name, value in found.items())


@pytest.mark.parametrize("symmetry", ["flip", "square"])
def test_a_mirrored_image_gets_the_same_answer(symmetry: str) -> None:
    federation = small_federation("onesum")
    one = method(federation, symmetry=symmetry)
    model = one.build(released(federation, symmetry=symmetry).shared)
    x = federation.test.images[:8].float() / 127.5 - 1
    assert torch.allclose(model(x), model(x.flip(-1)), atol=1e-4)


def test_the_site_prior_is_that_of_its_images() -> None:
    federation, shard = small_federation("onesum"), small_federation("onesum").shards[0]
    one = method(federation, prior="site", temperature=0.25, blend="0")
    release = one.server_phase(uploads(one, federation), ctx(federation))
    own, x = one.personalize(release, shard, ctx(federation)), federation.test.images[:20].float() / 127.5 - 1
    head, counts = head_of(release.shared.tensors), torch.bincount(shard.train.labels, minlength=10).double()
    scores = one.build(release.shared)(x).double() - head.prior
    expected = 0.25 * scores + ((counts + 0.01) / (counts.sum() + 0.1)).log()
    assert torch.allclose(one.build(own)(x).double(), expected, atol=1e-4)
    assert method(federation).personalize(release, shard, ctx(federation)) is release.shared


def test_a_class_that_no_site_has_stays_out_at_every_site() -> None:
    federation = small_federation("onesum")
    bare = [replace(s, train=s.train.subset(s.train.labels != 3)) for s in federation.shards]
    one = method(federation, prior="site", blend="0")
    release = one.server_phase(uploads(one, replace(federation, shards=bare)), ctx(federation))
    own = one.personalize(release, federation.shards[0], ctx(federation))
    assert own.tensors["head/prior"][3].item() == NEVER
    assert 3 not in one.build(own)(federation.test.images.float() / 127.5 - 1).argmax(1).tolist()


# --- what a site keeps, and what is refused ---------------------------------------------------------------------------------


def only(shard: Shard, counts: dict[int, int]) -> Shard:
    kept = torch.cat([(shard.train.labels == c).nonzero().flatten()[:n] for c, n in counts.items()])
    return replace(shard, train=shard.train.subset(kept))


def pooled_shard() -> Shard:
    return whole("iid", 1, 0).shards[0]


def test_small_classes_stay_at_home_and_are_named() -> None:
    federation, output = small_federation("onesum"), []
    one = method(federation)
    shard = only(pooled_shard(), {0: 5, 4: 2, 7: 1})
    payload = one.client_phase(shard, ctx(federation, progress=lambda what, done, total: output.append(what)))
    assert payload.tensors["counts"].tolist() == [5, *[0] * 9] and not payload.tensors["sums"][1:].any()
    assert output == [f"{shard.client} keeps 4, 7: fewer than 3 images"]


@pytest.mark.parametrize("changes", [{}, {"by_class": True}, {"send": "smaller"}], ids=str)
@pytest.mark.parametrize("counts", [{0: 1}, {0: 2, 1: 2}])
def test_a_site_whose_classes_are_all_small_sends_zeros(counts: dict[int, int], changes: dict[str, object]) -> None:
    """The round goes on as if it had not joined; where that is everybody, it ends with a sentence."""
    federation = small_federation("onesum")
    one, small = method(federation, **changes), only(pooled_shard(), counts)
    empty = one.client_phase(small, ctx(federation))
    assert not any(bool(tensor.any()) for tensor in empty.tensors.values()) and set(empty.tensors) <= set(one.contract(""))
    check_exposure(one, empty, small, federation.plan.task, ctx(federation))
    others = uploads(one, federation)
    found = [one.server_phase(sent, ctx(federation)) for sent in (others, [*others, Upload("small", "", empty)])]
    assert payload_digest(found[0].shared) == payload_digest(found[1].shared)
    with pytest.raises(TrainingError, match="no site has a class of enough images") as caught:
        one.server_phase([Upload("small", "", empty)], ctx(federation))
    assert caught.value.field == "least"


@pytest.mark.parametrize("level", [0, 128, 255])
def test_constant_images_give_finite_answers(level: int) -> None:
    federation = small_federation("onesum")
    shards = [replace(s, train=Dataset(torch.full_like(s.train.images, level), s.train.labels)) for s in federation.shards]
    release = released(replace(federation, shards=shards))
    assert bool(method(federation).build(release.shared)(torch.zeros(2, 1, 8, 8)).isfinite().all())


def test_a_class_of_one_image_is_blocked_at_the_site() -> None:
    """`least=1` lets it into the sums; the egress check sees that its mean is that image."""
    federation, shard = small_federation("onesum"), only(pooled_shard(), {0: 10, 1: 1})
    for least, symmetry in ((1, "none"), (1, "flip"), (3, "none")):
        one = method(federation, least=least, symmetry=symmetry)
        payload = one.client_phase(shard, ctx(federation))
        if least == 3:
            check_exposure(one, payload, shard, federation.plan.task, ctx(federation), real=False)
            continue
        with pytest.raises(UploadBlocked, match="much nearer to one of your training images") as caught:
            check_exposure(one, payload, shard, federation.plan.task, ctx(federation))
        assert caught.value.field == "least"


def test_the_thumbnails_are_attacked_too() -> None:
    federation, shard = small_federation("onesum"), small_federation("onesum").shards[0]
    found = {what for one in (method(federation), method(federation, thumbnail=0)) for what in kinds(one, federation, shard)}
    assert found == {"mean", "thumbnail", "row of second moments"}
    assert "thumbnail" not in kinds(method(federation, thumbnail=0), federation, shard)


@pytest.mark.parametrize("changes", [{}, {"symmetry": "flip"}, {"by_class": True}, {"send": "smaller"}])
def test_a_row_of_second_moments_that_is_one_image_stops_a_real_site(changes: dict[str, Any]) -> None:
    """A feature that one image alone has: its row of G is that image's features. A simulation goes on and says so."""
    federation, shard = small_federation("onesum"), only(pooled_shard(), {0: 10, 1: 10})
    changes = {"filters": 24, **changes}
    one, task = method(federation, **changes), federation.plan.task
    payload = one.client_phase(shard, ctx(federation))
    with pytest.raises(UploadBlocked, match="a row of second moments in the upload is much nearer") as caught:
        check_exposure(one, payload, shard, task, ctx(federation))
    assert caught.value.field == "readable" and "secure_sum" in str(caught.value.fix)
    found = check_exposure(one, payload, shard, task, ctx(federation), real=False)
    assert would_stop(found) and min(ratio.ratio for ratio in found if ratio.what == "row of second moments") < 0.01
    accepting = method(federation, readable="send", **changes)
    text = accepted(check_exposure(accepting, payload, shard, task, ctx(federation)), task.classes)
    assert "SINGLE IMAGES CAN BE READ OUT" in text and text.endswith("The plan accepts it.")
    masked = replace(ctx(federation), plan=replace(federation.plan, secure_sum=True))
    assert not would_stop(check_exposure(one, payload, shard, task, masked))


def test_a_real_site_of_few_images_is_stopped_unless_the_plan_says_otherwise() -> None:
    federation, plan = small_federation("onesum"), replace(small_federation("onesum").plan, limits=EVERYBODY)
    one = method(federation)
    small, large = (one.client_phase(only(pooled_shard(), {0: 10, 1: 10, 2: 10, 3: n}), ctx(federation)) for n in (9, 10))
    assert one.too_few(small, plan) == (39, 40) and one.too_few(large, plan) is None
    with pytest.raises(UploadBlocked, match="so few") as caught:
        check_open_sums(one, small, "north", plan)
    assert (caught.value.client, caught.value.field, caught.value.got) == ("north", "readable", 39)
    for closed in (replace(plan, secure_sum=True), replace(plan, privacy=Privacy(8.0, 1e-5))):
        assert one.too_few(small, closed) is None
    assert method(federation, readable="send").too_few(small, plan) is None
    assert one.too_few(one.client_phase(only(pooled_shard(), {0: 2}), ctx(federation)), plan) is None  # it sends zeros
    apart = method(federation, by_class=True)  # sums of one class each: the smallest counts
    assert apart.too_few(apart.client_phase(only(pooled_shard(), dict.fromkeys(range(4), 10)), ctx(federation)), plan) == (
        10,
        40,
    )


def kinds(one: OneSum, federation: Federation, shard: Shard) -> set[str]:
    exposed = one.exposed(one.client_phase(shard, ctx(federation)), shard, ctx(federation))
    return {what for part in exposed for what in part.candidates}


def spoiled(payload: Payload, how: str) -> Payload:
    tensors, facts = dict(payload.tensors), dict(payload.facts)
    counts = tensors["counts"].tolist()
    label = int(torch.tensor(counts).argmax())
    if how == "not positive semidefinite":
        gram = unpacked(tensors["gram"])
        gram.fill_diagonal_(0)
        tensors["gram"] = packed(gram)
    elif how == "moments beyond the bound":
        tensors["gram"] = tensors["gram"] + sum(counts) * LEVELS**2 + 1
    elif how == "sums beyond the bound":
        tensors["sums"] = tensors["sums"].clone()
        tensors["sums"][label, 0] = counts[label] * LEVELS + 1
    elif how == "sums of a class without images":
        tensors["sums"] = tensors["sums"].clone()
        tensors["sums"][counts.index(0), 0] = 1
    elif how == "fewer images than the sums have":
        tensors["counts"] = torch.tensor([1 if c == label else n for c, n in enumerate(counts)])
    elif how == "more images than the plan allows":
        tensors["counts"] = torch.tensor([Limits().class_samples + 1, *counts[1:]])
    else:
        facts["features"] = "0" * 64
    return Payload(tensors, facts)


@pytest.mark.parametrize(
    ("how", "field"),
    [
        ("not positive semidefinite", "gram"),
        ("moments beyond the bound", "gram"),
        ("sums beyond the bound", "sums"),
        ("sums of a class without images", "sums"),
        ("fewer images than the sums have", "gram"),
        ("more images than the plan allows", "counts"),
        ("other features", "facts.features"),
    ],
)
def test_a_term_that_no_images_can_have_is_refused_by_name(how: str, field: str) -> None:
    federation = small_federation("onesum")
    one = method(federation, least=1)
    shards = [only(pooled_shard(), {0: 8, 1: 8, 2: 8}), *federation.shards[1:]]
    sent = uploads(one, replace(federation, shards=shards))
    sent[0] = replace(sent[0], payload=spoiled(sent[0].payload, how))
    with pytest.raises(RoundError) as caught:
        one.server_phase(sent, ctx(federation))
    assert (caught.value.client, caught.value.field) == (sent[0].client, field) and "--exclude" in str(caught.value.fix)


def test_sums_at_the_bound_are_exact() -> None:
    """As many images as a plan lets a site have, all at the bound: within int64, and exact in float64."""
    most = Limits().samples * LEVELS**2
    assert most < 2**63 and most <= 2**53 and float(most) == most and torch.tensor([most]).double().long().item() == most


def test_an_encoder_beyond_the_bound_is_named() -> None:
    federation = small_federation("onesum")
    one = method(federation, **{**ENCODER, "bound": 0.01})
    with pytest.raises(TrainingError, match="beyond the bound") as caught:
        one.client_phase(federation.shards[0], ctx(federation))
    assert caught.value.field == "bound" and caught.value.client == federation.shards[0].client


def test_a_site_that_claims_too_much_counts_for_its_share() -> None:
    """Its whole term is scaled: the means of its classes stay what they are."""
    federation = whole("silos", None, 0)
    one = method(federation)
    large = [replace(s, train=together([s.train] * 40)) if i == 0 else s for i, s in enumerate(federation.shards)]
    sent = uploads(one, replace(federation, shards=large))
    capped = Context(replace(federation.plan, seed=0), torch.device("cpu"))
    exact = add_up(one, sent, capped)
    total, _ = one._capped_sums(exact, sent, capped)
    free, _ = one._capped_sums(exact, sent, ctx(federation))
    assert float(total.counts.max() / total.counts.sum()) == pytest.approx(0.4)
    assert float(free.counts.max() / free.counts.sum()) > 0.7
    assert torch.allclose(total.means(), free.means())


# --- what is shown ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changes", [{}, ENCODER, {"thumbnail": 0}, {"shrinkage": "0.1"}, {"head": "qda", "by_class": True}], ids=str
)
def test_figures_can_be_drawn(changes: dict[str, object]) -> None:
    federation, shown = small_federation("onesum"), dict[str, Any]()
    one = method(federation, **changes)
    sent = uploads(one, federation)
    one.server_phase(sent, ctx(federation, show=shown.__setitem__))
    seen = one.preview(sent[0].payload, ctx(federation))
    assert all(not view["problem"] for view in figure_views({**shown, **{f"preview {k}": v for k, v in seen.items()}}))
    assert "Second moments" in seen and ("Class means" in seen) == (changes != ENCODER and changes != {"thumbnail": 0})
    assert ("Eigenvalue spectrum" in shown) == ("shrinkage" not in changes)


def test_the_places_that_decide_are_shares_of_one_whole() -> None:
    federation, shown = small_federation("onesum"), dict[str, Any]()
    one = method(federation, thumbnail=0)
    one.server_phase(uploads(one, federation), ctx(federation, show=shown.__setitem__))
    assert sum(sum(row) for row in shown["Which features decide"]["values"]) == pytest.approx(100, abs=0.1)


def test_wrong_settings_are_named() -> None:
    task = Task("t", ("a", "b"), (1, 8, 9))
    wrong = {
        "shrinkage": "much",
        "head": "qda",
        "symmetry": "square",
        "filters": 0,
        "mean_color": 1.5,
        "temperature": 0.0,
        "least": 0,
        "bound": -1.0,
    }
    found = OneSum(task, Settings(**wrong)).problems(3)  # type: ignore[arg-type]
    assert all(any(f"'{name}'" in line for line in found) for name in wrong) and len(found) == len(wrong)
    assert not OneSum(task, Settings()).problems(3)
    assert any("'prior'" in line for line in OneSum(task, Settings(head="ridge", prior="site")).problems(3))
    assert any("'send'" in line for line in OneSum(task, Settings(send="smaller", by_class=True)).problems(3))
    assert any(
        "'encoder_weights'" in line for line in OneSum(task, Settings(features="encoder", encoder="dinov2_small")).problems(3)
    )
    for good in ("gcv", "0", "0.3"):
        assert not OneSum(task, Settings(shrinkage=good)).problems(3)
    for bad in ("-1", "nan", "inf", "", "auto"):
        assert OneSum(task, Settings(shrinkage=bad)).problems(3)


def test_random_features_take_images_as_they_are() -> None:
    assert encoder_side(Settings()) == 0 and encoder_side(Settings(features="encoder")) == 224


def test_an_estimate_keeps_what_decides_the_size_of_an_upload() -> None:
    federation = small_federation("onesum")
    plan = replace(federation.plan, settings=Settings())
    assert _shortened(plan).base.filters == 64


def test_who_sends_sums_of_fewer_images_than_features_is_reported() -> None:
    federation = whole("iid", 3, 0)
    one, plan, shard = method(federation), federation.plan, federation.shards[0]
    payload = one.client_phase(shard, ctx(federation))
    images, d = int(payload.tensors["counts"].sum()), one.width()
    enough = replace(payload, tensors={**payload.tensors, "counts": payload.tensors["counts"] * -(-d // images)})
    assert images < d and [
        f"{images} images are fewer than {d:,} features" in line for line in one.cautions(payload, plan)
    ] == [True]
    assert not one.cautions(enough, plan) and not one.cautions(payload, replace(plan, secure_sum=True))
    assert not one.cautions(payload, replace(plan, privacy=Privacy(8.0, 1e-5)))
