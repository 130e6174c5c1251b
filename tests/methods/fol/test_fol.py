"""FOL: what must hold whatever the images, its variants and encounters."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, Literal

import pytest
import torch

from osfl.core.method import Context
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import Dataset, Payload, Release, Shard, Topology, Upload
from osfl.ingredients.ensembles.ensemble import Ensemble
from osfl.ingredients.ensembles.gathering import members
from osfl.ingredients.training.local import Training, classifier, local_model
from osfl.methods.fol import Candidates, Fol, Settings, blended
from osfl.methods.fol.alignment import aligned, likeness
from osfl.methods.fol.selection import Vote
from osfl.models.build import build_model
from osfl.models.inputs import to_input
from osfl.models.naming import named
from osfl.runtime.payloads import payload_digest
from osfl.runtime.workers import compute_threads
from tests.methods.conftest import TASK, context, shard

SMOKE: Settings = resolve_settings(Fol, "smoke")
CLIENTS = "abcd"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with compute_threads(1):
        yield


def held(client: str, seed: int = 0, n: int = 24) -> Shard:
    """A shard with held-out images."""
    one, other = shard(client, n, seed), shard(client, 12, seed + 100)
    return replace(one, val=other.train, digest=f"{one.digest}-held")


def shards(clients: str = CLIENTS) -> dict[str, Shard]:
    return {c: held(c, i) for i, c in enumerate(clients)}


def uploads(settings: Settings, clients: str = CLIENTS) -> list[Upload]:
    method, ctx = Fol(TASK, settings), context(settings, clients)
    return [Upload(c, "", method.client_phase(s, ctx)) for c, s in shards(clients).items()]


def personal(settings: Settings, client: str = "a", ups: list[Upload] | None = None, ctx: Context | None = None) -> Payload:
    method, ctx = Fol(TASK, settings), ctx or context(settings, CLIENTS)
    release = method.server_phase(ups if ups is not None else uploads(settings), ctx)
    return method.personalize(release, shards()[client], ctx)


def remembering(kept: dict[str, Payload]) -> Callable[[Any, Callable[[], Payload]], Payload]:
    """`ctx.once` in memory."""

    def get_or_compute(key: Any, make: Callable[[], Payload]) -> Payload:
        name = repr(key)
        if name not in kept:
            kept[name] = make()
        return kept[name]

    return get_or_compute


def same(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_everybody_hears_the_models_of_its_neighbors_as_they_were_sent() -> None:
    ups = uploads(SMOKE)
    release = Fol(TASK, SMOKE).server_phase(ups, context(SMOKE, CLIENTS))
    assert not release.shared.tensors
    for client in CLIENTS:
        received = members(release.for_client(client))
        assert sorted(received) == [c for c in CLIENTS if c != client]
        assert all(same(received[u.client].tensors, u.payload.tensors) for u in ups if u.client != client)


def test_half_precision_halves_what_travels_and_keeps_the_contract() -> None:
    settings = replace(SMOKE, wire="float16")
    whole, half = uploads(SMOKE), uploads(settings)
    field = Fol(TASK, settings).contract(SMOKE.architecture)
    for one, other in zip(whole, half, strict=True):
        assert {name: value.dtype for name, value in other.payload.tensors.items()} == {
            name: torch.float16 if value.is_floating_point() else value.dtype for name, value in one.payload.tensors.items()
        }
        assert {name: (f.dtype == "F16") for name, f in field.items()} == {
            name: value.dtype == torch.float16 for name, value in other.payload.tensors.items()
        }
        for name, value in one.payload.tensors.items():
            assert torch.allclose(value.float(), other.payload.tensors[name].float(), rtol=1e-3, atol=1e-6)
    made = personal(settings, ups=half)
    assert all(value.dtype != torch.float16 for value in made.tensors.values())  # a site computes with 32 bits again


def test_a_topology_decides_who_is_received() -> None:
    ctx = context(SMOKE, CLIENTS)
    ring = replace(ctx, plan=replace(ctx.plan, topology=Topology("ring")))
    release = Fol(TASK, SMOKE).server_phase(uploads(SMOKE), ring)
    assert sorted(members(release.for_client("a"))) == ["b", "d"]


@pytest.mark.parametrize("preset", ["cpu", "smoke"])
def test_small_presets_start_from_the_local_models_of_all_methods(preset: str) -> None:
    mine, others = resolve_settings(Fol, preset), resolve_settings(load("local_only"), preset)
    assert all(getattr(mine, f.name) == getattr(others, f.name) for f in fields(Training))


# --- what must hold whatever the images ---


@pytest.mark.parametrize("answer", ["student", "ensemble"])
def test_without_neighbors_it_is_local(answer: Literal["student", "ensemble"]) -> None:
    settings = replace(SMOKE, answer=answer)
    ctx, method = context(settings, "a"), Fol(TASK, settings)
    alone = uploads(settings, "a")
    found = method.personalize(method.server_phase(alone, ctx), shards("a")["a"], ctx)
    assert payload_digest(found) == payload_digest(local_model(shards("a")["a"], TASK, settings, ctx))
    assert not isinstance(method.build(found), Ensemble)


def test_the_own_model_is_a_candidate_and_the_best_candidate_is_in() -> None:
    found = personal(replace(SMOKE, answer="ensemble"))
    scores = found.facts["notes"]["candidates"]
    assert set(scores) == set(CLIENTS)
    chosen = personal(replace(SMOKE, answer="ensemble", top=1))
    (only,) = chosen.facts["members"]
    assert scores[only] == max(scores.values()) >= scores["a"]
    assert chosen.facts["members"][only]["weight"] == 1.0


def test_one_member_answers_as_that_candidate() -> None:
    settings = replace(SMOKE, answer="ensemble", top=1, align=False)
    ups = uploads(settings)
    found = personal(settings, ups=ups)
    (only,) = found.facts["members"]
    method, x = Fol(TASK, settings), to_input(shards()["a"].val.images)
    sent = replace(settings, answer="student")
    with torch.no_grad():
        expected = Fol(TASK, sent).build(next(u.payload for u in ups if u.client == only))(x)
        assert torch.allclose(method.build(found)(x), expected, atol=1e-6)


@pytest.mark.parametrize("align", [True, False])
def test_the_ensemble_is_no_worse_on_its_images_than_its_best_member(align: bool) -> None:
    settings = replace(SMOKE, answer="ensemble", align=align)
    built, data = Fol(TASK, settings).build(personal(settings)), shards()["a"].train
    assert isinstance(built, Ensemble)
    with torch.no_grad():
        logits = torch.stack([m(to_input(data.images)) for m in built.members]).double()
    weights = built.weights.double()
    assert bool((weights > 0).all()) and float(weights.sum()) == pytest.approx(1)
    vote = Vote(logits, data.labels)
    assert float(vote.loss(weights)) <= min(float(vote.loss(v)) for v in torch.eye(len(logits)).double()) + 1e-6


def test_a_student_of_its_own_model_learns_nothing() -> None:
    """The ensemble is the own model alone: KL and its gradient are zero from the start."""
    settings = replace(SMOKE, top=1, align=False, student_epochs=3)
    ups = uploads(settings)
    mine = next(u.payload for u in ups if u.client == "a")
    copies = [Upload(u.client, "", mine) for u in ups]  # identical neighbors: ties, and the own model is most alike
    found = personal(settings, ups=copies)
    assert found.facts["weights"] == {"a": 1.0}
    assert len(set(found.facts["notes"]["candidates"].values())) == 1
    trained = [name for name in mine.tensors if "num_batches" not in name]
    assert all(torch.allclose(found.tensors[name], mine.tensors[name], atol=1e-5) for name in trained)
    gap = found.facts["notes"]["gap"]
    assert max(gap["risk"], gap["variation"], gap["bound"]) < 1e-3


def test_a_strong_anchor_keeps_the_student_where_it_was() -> None:
    settings = replace(SMOKE, anchor=1e9, student_epochs=2)
    ups = uploads(settings)
    mine = next(u.payload for u in ups if u.client == "a")
    held_fast = personal(settings, ups=ups)
    assert all(torch.allclose(held_fast.tensors[n], mine.tensors[n], atol=1e-6) for n in mine.tensors)
    free = personal(replace(settings, anchor=0.0, rate_steps=0), ups=ups)
    assert not same(free.tensors, mine.tensors)


def test_a_student_may_begin_at_the_average_of_the_ensemble() -> None:
    settings = replace(SMOKE, align=False, top=4, start="average", student_epochs=0, evenness=100.0)
    ups = uploads(settings)
    found = personal(settings, ups=ups)
    weights, sent = found.facts["weights"], {u.client: u.payload.tensors for u in ups}
    assert len(weights) == 4
    for name in ("model/head.weight", "model/stages.1.conv.weight", "model/stages.2.bn.bias"):
        expected = torch.stack([w * sent[client][name] for client, w in weights.items()]).sum(0)
        assert torch.allclose(found.tensors[name], expected, atol=1e-6)
    # what it was on average is not what it sees: statistics are those of the average on the own images
    stale = torch.stack([w * sent[client]["model/stages.2.bn.running_var"] for client, w in weights.items()]).sum(0)
    assert not torch.allclose(found.tensors["model/stages.2.bn.running_var"], stale, rtol=1e-2)


def test_only_members_of_its_architecture_are_in_the_average() -> None:
    settings = replace(
        SMOKE,
        architecture="a:cnn-w8,b:cnn-w8,*:resnet18-w4",
        align=False,
        top=4,
        start="average",
        student_epochs=0,
        evenness=100.0,
    )
    ups = uploads(settings)
    found, sent = personal(settings, ups=ups), {u.client: u.payload.tensors for u in ups}
    weights = found.facts["weights"]
    assert set(weights) == set(CLIENTS)
    a, b = (sent[c]["model/head.weight"] for c in "ab")
    expected = (weights["a"] * a + weights["b"] * b) / (weights["a"] + weights["b"])
    assert torch.allclose(found.tensors["model/head.weight"], expected, atol=1e-6)


def test_a_strong_anchor_brings_the_average_back_to_the_own_model() -> None:
    """λ ‖θ - θ_before‖² is about the model before the meeting, wherever the student begins."""
    settings = replace(SMOKE, anchor=1e9, start="average", align=False, evenness=100.0)
    ups = uploads(settings)
    mine, found = next(u.payload for u in ups if u.client == "a"), personal(settings, ups=ups)
    assert len(found.facts["weights"]) > 1
    assert all(torch.allclose(found.tensors[n], mine.tensors[n], atol=1e-6) for n in mine.tensors if "bn" not in n)


def test_blends_lie_between_two_images_of_the_client() -> None:
    dark, bright = torch.full((3, 1, 4, 4), 20, dtype=torch.uint8), torch.full((3, 1, 4, 4), 220, dtype=torch.uint8)
    images = torch.cat([dark, bright])
    mixed = blended(images, torch.Generator().manual_seed(0))
    assert mixed.dtype == torch.uint8 and mixed.shape == images.shape
    assert int(mixed.min()) >= 20 and int(mixed.max()) <= 220
    flat = mixed.flatten(1)
    assert bool((flat == flat[:, :1]).all())  # one share an image
    assert any(30 < int(value) < 210 for value in flat[:, 0])
    assert torch.equal(mixed, blended(images, torch.Generator().manual_seed(0)))


def candidates(**models: torch.nn.Module) -> Candidates:
    """Models by name, the own one first, with their answers to the client's images."""
    one = shards()["a"]
    images = torch.cat([one.train.images, one.val.images])
    with torch.no_grad():
        logits = torch.stack([network.eval()(to_input(images)) for network in models.values()])
    pool = {name: Payload(named(network, "model"), {"architecture": "cnn-w8"}) for name, network in models.items()}
    return Candidates(one, pool, models, images, torch.cat([one.train.labels, one.val.labels]), logits)


def network(seed: int) -> torch.nn.Module:
    return build_model("cnn-w8", TASK, torch.Generator().manual_seed(seed)).eval()


def test_of_equal_scores_the_more_alike_model_joins() -> None:
    """Two neighbors with the same answers: the second, by name, is the one whose weights point as the own ones do."""
    own, near, far = network(0), network(0), network(0)
    with torch.no_grad():
        for other in (near, far):  # a filter that no later layer reads changes no answer
            other.stages[1].conv.weight[:, 0].zero_()  # type: ignore[index, union-attr]
        far.stages[0].conv.weight[0].mul_(-40.0)  # type: ignore[index, union-attr]
    found = candidates(a=own, b=far, c=near)
    assert torch.equal(found.logits[1], found.logits[2])
    method = Fol(TASK, replace(SMOKE, top=2, evenness=100.0))
    scores = found.scores()
    assert set(method._weigh(found)) == ({"a", "c"} if scores["a"] >= scores["c"] else {"c", "b"})
    assert likeness(near, own) > likeness(far, own) + 0.1
    assert set(method._weigh(candidates(a=network(3), b=far, c=near))) != {"a", "b"}


def test_the_student_learns_by_sgd_with_momentum_and_is_drawn_to_its_own_model() -> None:
    """Two epochs of one batch: v <- m v + g, p <- (p - rate v + 2 rate λ p_before) / (1 + 2 rate λ)."""
    rate, anchor, momentum, t = 0.1, 0.5, 0.7, 3.0
    settings = replace(
        SMOKE,
        student_lr=rate,
        anchor=anchor,
        momentum=momentum,
        student_batch=24,
        student_epochs=2,
        schedule="constant",
        clip=0.0,
    )
    found = candidates(a=network(0), b=network(1))
    weights = {"a": 0.25, "b": 0.75}
    teacher = 0.25 * found.logits[0] + 0.75 * found.logits[1]
    expected, before = network(0), [p.detach().clone() for p in network(0).parameters()]
    velocity, mine = [torch.zeros_like(p) for p in before], found.shard.train
    p_teacher = (teacher[: len(mine)] / t).softmax(-1)
    for _ in range(2):  # batch norm as in evaluation: statistics stay
        q = (expected(to_input(mine.images)) / t).log_softmax(-1)
        loss = (p_teacher * (p_teacher.log() - q)).sum(-1).mean()
        slopes = torch.autograd.grad(loss, list(expected.parameters()))
        with torch.no_grad():
            for p, v, slope, first in zip(expected.parameters(), velocity, slopes, before, strict=True):
                v.mul_(momentum).add_(slope)
                p.sub_(rate * v).add_(2 * rate * anchor * first).div_(1 + 2 * rate * anchor)
    student = Fol(TASK, settings)._taught(found, weights, teacher, context(settings, CLIENTS))
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(student.parameters(), expected.parameters(), strict=True))
    assert not torch.allclose(next(student.parameters()), before[0], atol=1e-5)


def test_ties_are_broken_by_likeness_whatever_the_order() -> None:
    settings = replace(SMOKE, align=False)
    ups = uploads(settings)
    one, other = personal(settings, ups=ups), personal(settings, ups=ups[::-1])
    assert payload_digest(one) == payload_digest(other)


def test_theory_is_kept_beside_measurement() -> None:
    reported = personal(SMOKE).facts["notes"]
    assert 0 <= reported["gap"]["risk"] <= reported["gap"]["variation"] <= reported["gap"]["bound"]
    measured, promised = reported["descent"]["measured"], reported["descent"]["promised"]
    assert len(measured) == SMOKE.rate_steps + 1
    assert all(m <= p + 1e-6 for m, p in zip(measured, promised, strict=True))
    assert reported["gap"]["printed"] >= 3 * SMOKE.temperature / 2 and len(reported["descent"]["printed"]) == len(measured)


def test_the_report_gets_pictures_of_all_clients() -> None:
    found = Fol(TASK, SMOKE).review({"a": personal(SMOKE), "b": personal(SMOKE, "b"), "alone": Payload({}, {})})
    kinds = {title: figure["kind"] for title, figure in found.items()}
    assert sorted(kinds.values()) == ["histogram", "histogram", "lines", "lines"]
    weights = next(figure for title, figure in found.items() if "own model" in title)
    assert sum(weights["series"]["clients"]) == 2
    assert Fol(TASK, SMOKE).review({"alone": Payload({}, {})}) == {}


# --- pruning, variants, architectures ---


def test_pruned_filters_are_gone_in_what_the_ensemble_keeps() -> None:
    settings = replace(SMOKE, answer="ensemble", sparsity=22.0, top=4, finetune_epochs=4, post_epochs=12)
    found = personal(settings)
    pruned = found.facts["notes"]["pruned"]
    parts = members(found, "members/")
    lean = [name for name, part in parts.items() if pruned.get(name)]
    assert lean, "nothing was pruned: the test shows nothing"
    whole = sum(t.numel() for t in uploads(settings)[0].payload.tensors.values())
    assert all(sum(t.numel() for t in parts[name].tensors.values()) < whole for name in lean)
    reported = found.facts["notes"]["bytes"]
    assert reported["kept"] == sum(t.nbytes for part in parts.values() for t in part.tensors.values()) < reported["whole"]
    shown = Fol(TASK, settings).review({"a": found})["Filters pruned of the neighbors' models"]
    assert f"{reported['kept'] / reported['whole']:.1%} of their bytes" in shown["note"]
    x, built = to_input(shards()["a"].val.images), Fol(TASK, settings).build(found)
    assert isinstance(built, Ensemble)
    own, ups = uploads(settings)[0].payload, {u.client: u.payload for u in uploads(settings)}
    for name, member in zip(parts, built.members, strict=True):
        if name in lean:
            still = aligned(name, ups[name], own, shards()["a"], settings, TASK, context(settings, CLIENTS))
            assert torch.allclose(member(x), classifier(still, TASK)(x), atol=1e-5)


def test_the_student_and_the_ensemble_are_made_once() -> None:
    kept: dict[str, Payload] = {}
    ups, ctx = uploads(SMOKE), replace(context(SMOKE, CLIENTS), get_or_compute=remembering(kept))
    student = personal(SMOKE, ups=ups, ctx=ctx)
    made = len(kept)
    ensemble = personal(replace(SMOKE, answer="ensemble"), ups=ups, ctx=ctx)
    assert len(kept) == made
    assert same(student.tensors, {n: t for n, t in ensemble.tensors.items() if n.startswith("model/")})
    personal(replace(SMOKE, top=1), ups=ups, ctx=ctx)
    assert len(kept) == made + 1  # aligned models serve any ensemble


@pytest.mark.parametrize(
    "change",
    [
        {"align": False},
        {"fit_on": "train+val"},
        {"copies": 2},
        {"evenness": 5.0},
        {"track": True},
        {"scaled": True},
        {"recalibrate_personal_bn": True},
        {"top": 9},
        {"student_epochs": 0},
        {"prune_epochs": 0, "finetune_epochs": 0, "post_epochs": 0},
        {"rate_steps": 0},
        {"blends": 2},
        {"start": "average"},
    ],
)
def test_variants_run(change: dict[str, Any]) -> None:
    settings = replace(SMOKE, answer="ensemble", **change)
    model = Fol(TASK, settings).build(personal(settings))
    assert bool(torch.isfinite(model(to_input(shards()["a"].val.images))).all())


def test_neighbors_of_other_architectures_take_part() -> None:
    settings = replace(SMOKE, architecture="a:cnn-w8,b:resnet18-w4,*:vit-p4-w16-d1-h2", answer="ensemble", top=4)
    found = personal(settings)
    assert set(found.facts["notes"]["candidates"]) == set(CLIENTS)
    assert bool(torch.isfinite(Fol(TASK, settings).build(found)(to_input(shards()["a"].val.images))).all())


def test_a_client_without_held_out_images_still_chooses() -> None:
    method, ctx = Fol(TASK, SMOKE), context(SMOKE, CLIENTS)
    release = method.server_phase(uploads(SMOKE), ctx)
    assert "notes" in method.personalize(release, shard("a"), ctx).facts


# --- encounters ---


def test_the_next_encounter_starts_from_the_student() -> None:
    for answer in ("student", "ensemble"):
        settings = replace(SMOKE, answer=answer)
        first = personal(settings)
        again = replace(context(settings, CLIENTS), previous=first)
        sent = Fol(TASK, settings).client_phase(shards()["a"], again)
        assert same(sent.tensors, {n: t for n, t in first.tensors.items() if n.startswith("model/")})
        assert sent.facts == uploads(settings)[0].payload.facts
        nobody = Release(Payload({}), {})
        assert Fol(TASK, settings).personalize(nobody, shards()["a"], again) is first


def test_later_encounters_draw_anew_and_the_first_keeps_its_numbers() -> None:
    ctx = context(SMOKE, CLIENTS)
    plans = [replace(ctx.plan, topology=Topology("mesh", encounters=2, encounter=number)) for number in (1, 2)]
    none, first, second = personal(SMOKE), *(personal(SMOKE, ctx=replace(ctx, plan=plan)) for plan in plans)
    assert same(none.tensors, first.tensors) and not same(first.tensors, second.tensors)


def test_bad_settings_are_named() -> None:
    wrong = replace(SMOKE, top=0, anchor=-1.0, temperature=0.0, post_epochs=-1, blends=-1)
    named = {p.split("'")[1] for p in Fol(TASK, wrong).problems(3)}
    assert named == {"top", "anchor", "temperature", "post_epochs", "blends"}
    (problem,) = Fol(TASK, replace(SMOKE, anchor=0.0, rate_steps=5)).problems(3)
    assert "'rate_steps'" in problem and "anchor" in problem  # it would measure nothing


# --- does it help? ---


def stripes(client: str, n: int, seed: int) -> Shard:
    """Few noisy images of three patterns: a client alone cannot tell pattern from noise."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.arange(n) % 3
    patterns = torch.zeros(3, 1, 8, 8)
    patterns[0, :, ::2], patterns[1, :, :, ::2], patterns[2, :, 2:6, 2:6] = 1, 1, 1
    images = 110 + 50 * patterns[labels] + 55 * torch.randn(n, 1, 8, 8, generator=rng)
    data = Dataset(images.clamp(0, 255).to(torch.uint8), labels)
    third = n // 3
    return Shard(client, data.subset(torch.arange(third, n)), data.subset(torch.arange(third)), f"{client}-{seed}-{n}")


def test_few_images_a_client_and_neighbors_help() -> None:
    """Mean accuracy over six clients of twelve training images: ensemble and student above local."""
    clients = "abcdef"
    settings = replace(resolve_settings(Fol, "cpu"), architecture="cnn-w8", epochs=8, align_lr=0.03)
    method, ctx = Fol(TASK, settings), replace(context(settings, clients), get_or_compute=remembering({}))
    local = {c: stripes(c, 18, i) for i, c in enumerate(clients)}
    test = stripes("test", 600, 99).train
    ups = [Upload(c, "", method.client_phase(s, ctx)) for c, s in local.items()]
    release = method.server_phase(ups, ctx)

    def mean(models: list[torch.nn.Module]) -> float:
        with torch.no_grad():
            return sum(float((m(to_input(test.images)).argmax(1) == test.labels).float().mean()) for m in models) / len(models)

    joint = Fol(TASK, replace(settings, answer="ensemble"))
    alone = mean([method.build(u.payload) for u in ups])
    student = mean([method.build(method.personalize(release, s, ctx)) for s in local.values()])
    ensemble = mean([joint.build(joint.personalize(release, s, ctx)) for s in local.values()])
    assert ensemble > alone + 0.03 and student > alone + 0.01, (alone, student, ensemble)
