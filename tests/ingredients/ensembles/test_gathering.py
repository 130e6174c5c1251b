"""Several payloads in one and back, whatever their senders are called."""

import torch

from osfl.core.types import Payload
from osfl.ingredients.ensembles.gathering import gather, members


def test_what_was_gathered_comes_back_under_its_name() -> None:
    parts = {name: Payload({"model/a": torch.full((2,), float(i))}, {"samples": i}) for i, name in enumerate(("b", "model"))}
    for under in ("", "members/"):
        whole = gather(parts, under)
        found = members(Payload({**whole.tensors, "model/w": torch.zeros(1)} if under else whole.tensors, whole.facts), under)
        assert list(found) == ["b", "model"]
        assert all(found[n].facts == parts[n].facts and found[n].tensors.keys() == {"model/a"} for n in parts)
        assert all(torch.equal(found[n].tensors["model/a"], parts[n].tensors["model/a"]) for n in parts)


def test_nothing_gathered_is_nobody() -> None:
    assert members(Payload({})) == {} == members(gather({}))
