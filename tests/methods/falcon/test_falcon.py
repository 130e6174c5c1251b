"""FALCON: what is sent, the teacher, and the loss at its limits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from osfl.core.method import Context
from osfl.core.settings import resolve_settings
from osfl.core.types import Payload, Task, Upload
from osfl.ingredients.statistics.claimed_counts import capped_sites
from osfl.ingredients.statistics.site_prior import LEARNED
from osfl.methods.falcon import Falcon, Settings
from osfl.simulate.checks import small_federation
from osfl.simulate.simulation import Federation


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


def ctx(federation: Federation) -> Context:
    return Context(federation.plan, torch.device("cpu"))


def method(federation: Federation, **changes: object) -> Falcon:
    return Falcon(federation.plan.task, resolve_settings(Falcon, "smoke", changes))


def uploads(one: Falcon, federation: Federation) -> list[Upload]:
    return [Upload(s.client, "", one.client_phase(s, ctx(federation))) for s in federation.shards]


def test_defaults_are_the_papers() -> None:
    paper = Settings()
    assert (paper.regions(), paper.width(), paper.generator_epochs, paper.components) == (4, 768, 400, 20)
    assert (paper.epochs, paper.batch_size, paper.alpha, paper.temperature) == (60, 256, 0.5, 4.0)
    assert (paper.ensemble, paper.init, paper.noise_std, paper.send) == ("uniform", "random", 0.0, "smaller")
    assert (paper.whiten, paper.generator_patience) == (False, 0)


def test_sequences_follow_the_clients_classes() -> None:
    federation = small_federation("falcon")
    payload = method(federation, send="sequences").client_phase(federation.shards[0], ctx(federation))
    counts = torch.tensor(payload.facts["class_counts"])
    drawn = torch.bincount(payload.tensors["labels"], minlength=len(counts))
    assert drawn.tolist() == [round(1.5 * n) for n in counts.tolist()]


def test_the_plan_may_ask_for_all_classes_alike() -> None:
    """As many sequences as before, shared by the classes that a client has; one of each at least."""
    federation = small_federation("falcon")
    for per_image in (1.5, 1e-3):
        one = method(federation, send="sequences", labels="balanced", per_image=per_image)
        payload = one.client_phase(federation.shards[0], ctx(federation))
        counts = torch.tensor(payload.facts["class_counts"])
        drawn = torch.bincount(payload.tensors["labels"], minlength=len(counts))
        assert drawn.sum() == sum(max(1, round(per_image * n)) for n in counts[counts > 0].tolist())
        assert int(drawn[counts > 0].max() - drawn[counts > 0].min()) <= 1 and not drawn[counts == 0].any()


@pytest.mark.parametrize("labels", ["own", "balanced"])
def test_sites_divide_out_the_shares_that_sequences_were_drawn_in(labels: str) -> None:
    """Sequences of all classes alike have none: what a site corrects by its own prior is the classifier as it is."""
    federation = small_federation("falcon")
    one = method(federation, send="sequences", labels=labels, personalize="prior")
    sent = uploads(one, federation)
    shared = one.server_phase(sent, ctx(federation)).shared.tensors
    counts = torch.tensor([upload.payload.facts["class_counts"] for upload in sent], dtype=torch.float64)
    assert (LEARNED in shared) == (labels == "own")
    if labels == "own":
        mass = capped_sites(counts, federation.plan.limits.share).sum(0)
        torch.testing.assert_close(shared[LEARNED], (mass / mass.sum()).log())


@pytest.mark.parametrize("whiten", [False, True])
def test_the_smaller_is_sent_and_the_server_draws_the_same(whiten: bool) -> None:
    federation = small_federation("falcon")
    extra = {"whiten": whiten, "generator_patience": int(whiten)}
    sent = {name: uploads(method(federation, send=name, **extra), federation) for name in ("sequences", "generator", "smaller")}
    sizes = {name: sum(t.numel() * t.element_size() for t in u[0].payload.tensors.values()) for name, u in sent.items()}
    assert sizes["smaller"] == min(sizes["sequences"], sizes["generator"])
    drawn, kept = (
        method(federation, send=how, **extra).server_phase(sent[how], ctx(federation)).shared.tensors
        for how in ("generator", "sequences")
    )
    assert all(torch.equal(drawn[name], kept[name]) for name in kept)


@pytest.mark.parametrize("ensemble", ["uniform", "size", "class_count", "relative"])
def test_the_teacher_is_a_distribution(ensemble: str) -> None:
    federation = small_federation("falcon")
    one = method(federation, ensemble=ensemble)
    output = uploads(one, federation)
    x = torch.randn(6, 1, one.settings.width())
    found = one._teacher(output, x, ctx(federation))
    assert torch.allclose(found.sum(1), torch.ones(6), atol=1e-5) and bool((found >= 0).all())
    if ensemble == "uniform":
        answers = [_classifier(one, upload.payload)(x).div(one.settings.temperature).softmax(-1) for upload in output]
        assert torch.allclose(found, torch.stack(answers).mean(0), atol=1e-5)


def test_relative_to_its_usual_answer_a_client_of_one_class_says_nothing() -> None:
    federation = small_federation("falcon")
    one = method(federation, ensemble="relative")
    first, *others = uploads(one, federation)
    constant = dict(first.payload.tensors)
    constant["classifier/head.weight"] = torch.zeros_like(constant["classifier/head.weight"])
    constant["classifier/head.bias"] = torch.arange(len(constant["classifier/head.bias"])).float() * 3
    mute = Upload(first.client, "", Payload(constant, first.payload.facts))
    x = torch.randn(6, 1, one.settings.width())
    assert torch.allclose(one._teacher([mute], x, ctx(federation)), torch.tensor(1 / len(federation.plan.task.classes)))
    alone, beside = one._teacher(others, x, ctx(federation)), one._teacher([mute, *others], x, ctx(federation))
    assert torch.equal(alone.argmax(1), beside.argmax(1))


def _classifier(one: Falcon, payload: Payload) -> torch.nn.Module:
    from osfl.models.naming import load_named

    model = one._classifier(None)
    load_named(model, payload.tensors, "classifier")
    return model.eval()


def test_without_distillation_teachers_do_not_matter() -> None:
    federation = small_federation("falcon")
    plain = method(federation, alpha=0.0)
    output = uploads(plain, federation)
    turned = {n: -t if n.startswith("classifier/head") else t for n, t in output[0].payload.tensors.items()}
    other = [Upload(output[0].client, "", Payload(turned, output[0].payload.facts)), *output[1:]]
    a, b = (plain.server_phase(u, ctx(federation)).shared.tensors for u in (output, other))
    assert all(torch.equal(a[name], b[name]) for name in a)
    taught = method(federation, alpha=0.5)
    c, d = (taught.server_phase(u, ctx(federation)).shared.tensors for u in (output, other))
    assert not torch.equal(c["classifier/head.weight"], d["classifier/head.weight"])


def test_the_average_of_classifiers_sends_no_sequences() -> None:
    federation = small_federation("falcon")
    one = method(federation, server="average")
    output = uploads(one, federation)
    assert all(name.startswith("classifier/") for u in output for name in u.payload.tensors)
    sizes = torch.tensor([float(u.payload.facts["samples"]) for u in output])
    mean = sum(w * u.payload.tensors["classifier/head.bias"] for w, u in zip(sizes / sizes.sum(), output, strict=True))
    assert torch.allclose(one.server_phase(output, ctx(federation)).shared.tensors["classifier/head.bias"], mean, atol=1e-6)


def test_the_student_may_start_from_the_clients_classifiers() -> None:
    federation = small_federation("falcon")
    output = uploads(method(federation), federation)
    sizes = torch.tensor([float(u.payload.facts["samples"]) for u in output])
    biases = torch.stack([u.payload.tensors["classifier/head.bias"] for u in output])
    for init, weights in (("mean", torch.ones_like(sizes)), ("average", sizes)):
        one = method(federation, init=init, lr=1e-12)  # stays where it starts
        found = one.server_phase(output, ctx(federation)).shared.tensors["classifier/head.bias"]
        assert torch.allclose(found, (weights / weights.sum()) @ biases, atol=1e-6)


def test_wrong_settings_are_named() -> None:
    task = Task("t", ("a", "b"), (1, 8, 8))
    for changes, word in (
        ({"alpha": 2.0}, "'alpha'"),
        ({"heads": 3}, "'heads'"),
        ({"lr": 0.0}, "'lr'"),
        ({"dropout": 1.0}, "'dropout'"),
        ({"generator_batch": 1}, "'generator_batch'"),
        ({"generator_patience": -1}, "'generator_patience'"),
    ):
        found = Falcon(task, resolve_settings(Falcon, "smoke", changes)).problems(3)
        assert any(word in line for line in found), (changes, found)
