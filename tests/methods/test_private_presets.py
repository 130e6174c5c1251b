"""A round with differential privacy can begin with the default settings of every preset, or a message says what to change."""

from __future__ import annotations

from typing import Any

import pytest

from osfl.core.errors import UsageError
from osfl.core.registry import is_reference, load, names
from osfl.core.types import Privacy
from osfl.ingredients.training.model_method import ModelMethod
from osfl.simulate.simulation import Simulation, prepare

UPLOAD_MODELS = [name for name in names() if not is_reference(load(name)) and issubclass(load(name), ModelMethod)]
COUNTING = ("fedftg", "fedlmg", "local_only")  # servers that cannot do without class counts; and no server


def opened(method: str, preset: str, **changes: Any) -> None:
    prepare(Simulation(method, "digits", 3, "iid", preset, changes=changes, samples=120, privacy=Privacy(8.0, 1e-5)))


@pytest.mark.parametrize("preset", ["cpu", "smoke", "paper"])
@pytest.mark.parametrize("method", [name for name in UPLOAD_MODELS if name not in COUNTING])
def test_every_preset_opens_a_private_round(method: str, preset: str) -> None:
    opened(method, preset)


@pytest.mark.parametrize(
    ("method", "changes", "remedy"),
    [
        ("fedavg", {"personalize": "prior"}, "choose personalize=none"),
        ("ensemble", {"ensemble": "class_count"}, "choose ensemble=logits"),
        ("fedbicross", {"ensemble": "odds"}, "choose ensemble=logits"),
        ("fedisca", {"labels": "seen", "ensemble": "odds"}, "choose ensemble=logits and labels=balanced"),
        ("dense", {"ensemble": "class_count"}, "choose ensemble=logits"),
        ("fedmitr", {"ensemble": "class_count"}, "choose ensemble=logits"),
        ("fedftg", {}, "choose another method"),
        ("fedlmg", {}, "choose another method"),
    ],
)
def test_a_refusal_names_what_to_change(method: str, changes: dict[str, Any], remedy: str) -> None:
    with pytest.raises(UsageError, match="class counts") as caught:
        opened(method, "smoke", **changes)
    assert remedy in str(caught.value) and (remedy.endswith("method") or "choose another" not in str(caught.value))
