"""FOL: neighbors that are no good, and students that diverge."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from osfl.core.errors import OsflError, TrainingError
from osfl.core.types import Payload, Release
from osfl.ingredients.ensembles.gathering import gather
from osfl.methods.fol import Fol
from osfl.runtime.workers import compute_threads
from tests.methods.conftest import TASK, context
from tests.methods.fol.test_fol import CLIENTS, SMOKE, personal, same, shards, uploads


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with compute_threads(1):
        yield


def spoiled(change: Any) -> Release:
    ups = {u.client: u.payload for u in uploads(SMOKE)}
    ups["c"] = change(ups["c"])
    return Release(Payload({}), {"a": gather({c: ups[c] for c in "bc"})})


def with_nan(payload: Payload) -> Payload:
    tensors = {name: value.clone() for name, value in payload.tensors.items()}
    tensors["model/head.bias"][0] = float("nan")
    return Payload(tensors, payload.facts)


def of_other_classes(payload: Payload) -> Payload:
    wide = {n: torch.zeros(5, *v.shape[1:]) if "head" in n else v for n, v in payload.tensors.items()}
    return Payload(wide, payload.facts)


def of_unknown_architecture(payload: Payload) -> Payload:
    return Payload(payload.tensors, {**payload.facts, "architecture": "resnet18-w4"})


@pytest.mark.parametrize("change", [with_nan, of_other_classes, of_unknown_architecture])
def test_a_broken_neighbor_is_refused_by_name(change: Any) -> None:
    with pytest.raises(OsflError) as caught:
        Fol(TASK, SMOKE).personalize(spoiled(change), shards()["a"], context(SMOKE, CLIENTS))
    assert caught.value.client == "c" and caught.value.field and caught.value.fix
    assert isinstance(caught.value, TrainingError) == (change is with_nan)


def exploding(payload: Payload) -> Payload:
    """Finite, so that the gate lets it in; its answers are not."""
    return Payload({n: v * 1e20 if v.is_floating_point() else v for n, v in payload.tensors.items()}, payload.facts)


def exploding_in_training(payload: Payload) -> Payload:
    """Its answers are usable in evaluation, where huge scales and variances cancel; with a batch's statistics they do not."""
    huge = {
        name: torch.full_like(value, 3e38)
        for name, value in payload.tensors.items()
        if name.endswith(("stages.2.bn.weight", "stages.2.bn.running_var"))
    }
    means = {name: torch.zeros_like(value) for name, value in payload.tensors.items() if name.endswith("2.bn.running_mean")}
    head = {"model/head.weight": payload.tensors["model/head.weight"] * 1e-18}
    return Payload({**payload.tensors, **huge, **means, **head}, payload.facts)


@pytest.mark.parametrize(("align", "exploding"), [(True, exploding), (False, exploding), (True, exploding_in_training)])
def test_a_neighbor_that_explodes_is_left_out_and_named(align: bool, exploding: Callable[[Payload], Payload]) -> None:
    settings = replace(SMOKE, align=align, top=4, clip=0.0 if exploding is not exploding_in_training else 5.0)
    method = Fol(TASK, settings)
    found = method.personalize(spoiled(exploding), shards()["a"], context(settings, CLIENTS))
    reported = found.facts["notes"]
    assert reported["left_out"] == ["c"] and set(reported["candidates"]) == {"a", "b"} >= set(found.facts["weights"])
    assert all(bool(value.isfinite().all()) for value in found.tensors.values())
    notes = [figure["note"] for figure in method.review({"a": found}).values()]
    assert any("c (at a)" in note for note in notes)
    without = Release(Payload({}), {"a": gather({u.client: u.payload for u in uploads(settings) if u.client == "b"})})
    alone = method.personalize(without, shards()["a"], context(settings, CLIENTS))
    assert same(found.tensors, alone.tensors)  # as if it had not come


@pytest.mark.parametrize("answer", ["student", "ensemble"])
def test_where_nobody_can_be_used_it_is_local(answer: Literal["student", "ensemble"]) -> None:
    """As if nobody had come, in the first encounter and in the second: Q = 0."""
    settings = replace(SMOKE, answer=answer, start="average", copies=1)
    method, one = Fol(TASK, settings), shards()["a"]
    bad = {u.client: exploding(u.payload) for u in uploads(settings) if u.client in "bc"}
    received, nobody = Release(Payload({}), {"a": gather(bad)}), Release(Payload({}), {"a": gather({})})
    ctx = context(settings, CLIENTS)
    for now in (ctx, replace(ctx, previous=personal(settings))):
        found, alone = (method.personalize(release, one, now) for release in (received, nobody))
        assert same(found.tensors, alone.tensors) and found.facts["notes"] == {"left_out": ["b", "c"]}
        assert type(method.build(found)) is type(method.build(alone))
        assert "b (at a)" in str(method.review({"a": found}))


def test_a_student_that_diverges_names_its_client_and_its_rate() -> None:
    settings = replace(SMOKE, student_lr=1e25, clip=0.0, anchor=0.0, student_epochs=3, top=4, rate_steps=0)
    with pytest.raises(TrainingError) as caught:
        personal(settings)
    assert (caught.value.client, caught.value.field) == ("a", "student_lr") and "student_lr" in str(caught.value.fix)
