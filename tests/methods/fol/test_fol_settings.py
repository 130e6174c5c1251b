"""FOL: what its settings mean, part by part, and what a kept result answers for."""

from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from osfl.core.types import Payload, Release, Shard, Upload
from osfl.ingredients.ensembles.gathering import gather
from osfl.ingredients.training.local import classifier
from osfl.methods import fol
from osfl.methods.fol import Candidates, Fol, Settings
from osfl.methods.fol.bounds import risk_gap
from osfl.models.build import build_model
from osfl.models.inputs import to_input
from tests.methods.conftest import TASK, context
from tests.methods.fol.test_fol import CLIENTS, SMOKE, held, personal, shards, uploads


def made_up() -> Candidates:
    """The own model is right about all training images and about no other; its neighbor the other way round."""
    here = held("a")
    labels = torch.cat([here.train.labels, here.val.labels])
    right, wrong = (9 * functional.one_hot(output, 3).float() for output in (labels, (labels + 1) % 3))
    n = len(here.train)
    logits = torch.stack([torch.cat([right[:n], wrong[n:]]), torch.cat([wrong[:n], right[n:]])])
    models = {name: build_model("cnn-w8", TASK, torch.Generator().manual_seed(i)) for i, name in enumerate("ab")}
    return Candidates(here, {}, models, torch.cat([here.train.images, here.val.images]), labels, logits)


def test_candidates_are_judged_on_held_out_images_and_weighed_on_those_asked_for() -> None:
    assert made_up().scores() == {"a": 0.0, "b": 1.0}
    assert Fol(TASK, replace(SMOKE, top=1))._weigh(made_up()) == {"b": 1.0}
    assert Fol(TASK, replace(SMOKE, top=2, fit_on="train"))._weigh(made_up()) == {"a": 1.0}
    both = Fol(TASK, replace(SMOKE, top=2, fit_on="train+val"))._weigh(made_up())
    assert both["a"] > both["b"] > 0  # 24 images weigh for one, 12 for the other


def taught(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the student would be taught, and how; it is left as it begins."""
    seen: dict[str, Any] = {}
    with monkeypatch.context() as patch:
        patch.setattr(fol, "distill", lambda student, pool, rng, **options: seen.update(options, student=student, pool=pool))
        return {"made": personal(settings), **seen}


def test_the_student_learns_as_its_settings_say(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SMOKE, align=False, temperature=4.0, anchor=2.0, weight_decay=0.1)
    plain, scaled = taught(settings, monkeypatch), taught(replace(settings, scaled=True), monkeypatch)
    assert (plain["soft"], scaled["soft"]) == (1 / 16, 1.0) and plain["temperature"] == 4.0
    assert plain["weight_decay"] == 0.0  # it is held by its anchor alone
    before = [parameter.detach().clone() for parameter in plain["student"].parameters()]
    with torch.no_grad():
        for parameter in plain["student"].parameters():
            parameter.add_(1.0)
    plain["after"](plain["student"], 0.1)
    for parameter, first in zip(plain["student"].parameters(), before, strict=True):
        assert torch.allclose(parameter, first + 1 / 1.4, atol=1e-5)  # 1 + 2 · 0.1 · 2


def test_changed_copies_are_taught_what_the_ensemble_says_about_them(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = replace(SMOKE, align=False, top=4, evenness=0.1, copies=1, blends=1)
    seen, sent = taught(settings, monkeypatch), {u.client: u.payload for u in uploads(settings)}
    weights, lessons = seen["made"].facts["weights"], seen["pool"]
    assert len(lessons) == 3 * len(shards()["a"].train) and max(weights.values()) > min(weights.values()) + 0.05
    with torch.no_grad():
        output = [w * classifier(sent[client], TASK)(lessons.inputs) for client, w in weights.items()]
    assert torch.allclose(lessons.teacher, torch.stack(output).sum(0), atol=1e-4)


def sure(payload: Payload) -> Payload:
    return Payload({n: 50 * v if "head.weight" in n else v for n, v in payload.tensors.items()}, payload.facts)


def test_the_gap_is_between_student_and_ensemble_on_held_out_images() -> None:
    settings = replace(SMOKE, align=False, top=4, evenness=100.0, student_epochs=0)  # the student is the own model
    ups = [u if u.client == "a" else Upload(u.client, "", sure(u.payload)) for u in uploads(settings)]
    found, sent, val = personal(settings, ups=ups), {u.client: u.payload for u in ups}, shards()["a"].val
    assert set(found.facts["weights"]) != {"a"}
    with torch.no_grad():
        output = {client: classifier(payload, TASK)(to_input(val.images)) for client, payload in sent.items()}
    together = torch.stack([w * output[client] for client, w in found.facts["weights"].items()]).sum(0)
    assert found.facts["notes"]["gap"] == pytest.approx(
        asdict(risk_gap(together, output["a"], val.labels, settings.temperature)), rel=1e-3
    )


def test_what_is_kept_answers_only_for_the_same_models_images_and_settings() -> None:
    ups, asked, kept = uploads(SMOKE), list[str](), Payload({}, {"weights": {"a": 1.0}})

    def get_or_compute(key: Any, make: Callable[[], Payload]) -> Payload:
        asked.append(repr(key))
        return kept

    def ask(settings: Settings = SMOKE, before: int = 0, received: str = "bc", here: Shard | None = None) -> None:
        ctx = replace(context(settings, CLIENTS), previous=ups[before].payload, get_or_compute=get_or_compute)
        release = Release(Payload({}), {"a": gather({u.client: u.payload for u in ups if u.client in received})})
        Fol(TASK, settings).personalize(release, here or shards()["a"], ctx)

    ask()
    ask(replace(SMOKE, answer="ensemble"))
    assert len(set(asked)) == 1
    ask(replace(SMOKE, evenness=1.0))
    ask(before=1)
    ask(received="bd")
    ask(here=held("a", seed=5))
    assert len(set(asked)) == len(asked) - 1
