"""What a server makes of uploaded classifiers before it learns from them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from osfl.core.errors import TrainingError
from osfl.core.seeds import torch_generator
from osfl.core.settings import resolve_settings
from osfl.core.types import Payload, Task, Upload
from osfl.ingredients.training.model_method import teachers
from osfl.methods.dense import Dense
from osfl.models.build import build_model
from osfl.models.naming import named

TASK = Task("t", ("a", "b"), (1, 8, 8))


def upload(client: str, factor: float) -> Upload:
    model = build_model("cnn-w4", TASK, torch_generator(0, client))
    tensors: dict[str, Any] = dict(named(model, "model"))
    tensors["model/head.weight"] = tensors["model/head.weight"] * factor
    return Upload(client, "", Payload(tensors, {"architecture": "cnn-w4", "samples": 3}))


@pytest.mark.parametrize("factor", [1e20, 3e38])  # the second answers with infinity
def test_a_model_that_explodes_is_named_and_not_learned_from(factor: float) -> None:
    """Its numbers are finite, so the gate lets it in; what it says would end in a student that is not finite."""
    method = Dense(TASK, resolve_settings(Dense, "smoke", {}))
    assert len(teachers([upload("north", 1.0)], method)) == 1
    with pytest.raises(TrainingError, match="answers noise with numbers beyond all bounds") as caught:
        teachers([upload("north", 1.0), upload("south", factor)], method)
    assert caught.value.client == "south" and "osfl server ROUND --exclude south" in str(caught.value)
    assert torch.isfinite(upload("south", factor).payload.tensors["model/head.weight"]).all()
