"""Settings of the inversion family that can come to nothing are refused before anybody trains; divergence says whose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from osfl.core.errors import TrainingError
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import Payload, Release
from osfl.methods.fedbicross import FedBiCross
from tests.methods.conftest import TASK, context, shard


@pytest.mark.parametrize("name", ["fedbicross", "fedisca", "deepinversion", "dense", "coboosting", "fedftg", "dafl"])
def test_an_average_of_clients_cannot_start_a_student_of_another_architecture(name: str) -> None:
    method = load(name)
    other: Any = method(TASK, resolve_settings(method, "smoke", {"student": "resnet18-w4", "init": "average"}))
    (output,) = [text for text in other.problems(3) if "'init'" in text]
    assert "resnet18-w4" in output and "one architecture for clients and student" in output
    same: Any = method(TASK, resolve_settings(method, "smoke", {"student": "resnet18-w4", "init": "random"}))
    assert not same.problems(3)


def test_disagreement_is_refused_where_there_is_no_student_to_disagree_with() -> None:
    method = load("deepinversion")
    settings = resolve_settings(method, "smoke", {"adi": 5.0, "rounds": 1})
    assert any("'adi'" in text and "rounds" in text for text in method(TASK, settings).problems(3))
    assert not method(TASK, replace(settings, rounds=2)).problems(3)


def test_a_personalization_that_diverges_names_the_client_and_its_own_rate() -> None:
    settings = replace(resolve_settings(FedBiCross, "smoke", {}), personal_lr=1e15, personal_epochs=3)
    method, ctx = FedBiCross(TASK, settings), context(settings, "ab")
    output = method.client_phase(shard("a"), ctx)
    release = Release(Payload({}), {"a": Payload(output.tensors, {**output.facts, "cluster": 0})})
    with pytest.raises(TrainingError) as caught:
        method.personalize(release, shard("a"), ctx)
    assert (caught.value.client, caught.value.field) == ("a", "personal_lr")
