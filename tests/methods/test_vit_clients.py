"""The methods that FedMITR is compared with, with ViT clients: no batch norm, so no statistics to match."""

from collections.abc import Iterator

import pytest
import torch

from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import Upload
from osfl.runtime.workers import compute_threads
from tests.methods.conftest import TASK, context, shard

VIT = "vit-p4-w16-d2-h2"


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with compute_threads(1):
        yield


@pytest.mark.parametrize("name", ["fedavg", "ensemble", "fedftg", "dense", "coboosting", "deepinversion", "deepinversion_vit"])
def test_vits_go_through(name: str) -> None:
    method = load(name)
    settings = resolve_settings(method, "smoke", {"architecture": VIT})
    server, ctx = method(TASK, settings), context(settings, "ab")
    assert not server.problems(2)
    uploads = [Upload(c, "", server.client_phase(shard(c, seed=i), ctx)) for i, c in enumerate("ab")]
    model = server.build(server.server_phase(uploads, ctx).for_client("a"))
    with torch.no_grad():
        logits = model(torch.zeros(2, *TASK.image))
    assert logits.shape == (2, 3) and bool(logits.isfinite().all())
