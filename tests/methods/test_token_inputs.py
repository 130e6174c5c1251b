"""Hard inputs of the methods on features: few images, one class, another encoder, features that are no numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.core.errors import RoundError, TrainingError
from osfl.core.method import Context
from osfl.core.registry import load
from osfl.core.types import Dataset, Payload, Shard, Upload
from osfl.ingredients.tokens.encoding import Tokenizer
from osfl.simulate.checks import small_federation
from osfl.simulate.simulation import Federation

METHODS = ("falcon", "fedpft", "fedcgs")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


def parts(name: str) -> tuple[Federation, Any, Context]:
    federation = small_federation(name)
    return federation, load(name)(federation.plan.task, federation.plan.settings), Context(federation.plan, torch.device("cpu"))


def only(shard: Shard, **most: int) -> Shard:
    """The client with at most so many images of some classes, by label, and none of the others."""
    kept = [place for label, n in most.items() for place in (shard.train.labels == int(label[1:])).nonzero().flatten()[:n]]
    index = torch.tensor([int(place) for place in kept])
    return replace(shard, train=Dataset(shard.train.images[index], shard.train.labels[index]), digest=f"{shard.digest}{most}")


@pytest.mark.parametrize("name", METHODS)
def test_a_class_of_two_images_and_a_client_of_one_class(name: str) -> None:
    """Two images have a variance of their own in no direction but one; one class leaves a classifier nothing to tell apart."""
    federation, method, ctx = parts(name)
    first, second, *_ = federation.shards
    common = [int(label) for label in torch.bincount(first.train.labels).argsort(descending=True)[:2]]
    rich = only(first, **{f"c{common[0]}": 20, f"c{common[1]}": 2})
    label = int(torch.bincount(second.train.labels).argmax())
    poor = only(second, **{f"c{label}": 20})
    assert sorted(torch.bincount(rich.train.labels).tolist())[-2] == 2 and len(set(poor.train.labels.tolist())) == 1
    uploads = [Upload(shard.client, "", method.client_phase(shard, ctx)) for shard in (rich, poor)]
    release = method.server_phase(uploads, ctx)
    assert all(bool(tensor.isfinite().all()) for upload in uploads for tensor in upload.payload.tensors.values())
    logits = method.build(release.shared)(torch.zeros(2, *federation.plan.task.image))
    assert bool(logits.isfinite().all())


@pytest.mark.parametrize("name", METHODS)
def test_a_site_with_another_encoder_is_named(name: str) -> None:
    federation, method, ctx = parts(name)
    uploads = [Upload(shard.client, "", method.client_phase(shard, ctx)) for shard in federation.shards]
    odd = uploads[1]
    other = Payload(odd.payload.tensors, {**odd.payload.facts, "encoder": "0" * 64})
    with pytest.raises(RoundError, match="another encoder") as caught:
        method.server_phase([uploads[0], replace(odd, payload=other), uploads[2]], ctx)
    assert caught.value.client == odd.client and caught.value.got == "0" * 64 and "sha256" in str(caught.value)


@pytest.mark.parametrize("name", METHODS)
def test_features_that_are_no_numbers_stop_the_client_and_are_not_kept(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, method, ctx = parts(name)
    shard, exact = federation.shards[0], Tokenizer._encoded

    def broken(self: Tokenizer, x: torch.Tensor) -> torch.Tensor:
        return exact(self, x).index_fill(-1, torch.tensor([3]), torch.nan)

    with monkeypatch.context() as patch, pytest.raises(TrainingError, match="not finite") as caught:
        patch.setattr(Tokenizer, "_encoded", broken)
        method.client_phase(shard, ctx)
    assert caught.value.client == shard.client
    payload = method.client_phase(shard, ctx)  # what was wrong is gone, and nothing of it was stored
    assert all(bool(tensor.isfinite().all()) for tensor in payload.tensors.values())
