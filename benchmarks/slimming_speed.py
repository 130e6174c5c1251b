"""What it is worth that silenced filters leave a model: bytes, and the time of a forward pass.

    python -m benchmarks.slimming_speed

Filters are silenced by hand, every second or every fourth of those that can leave; and, under `learned`, by FOL itself: a
neighbor's model, aligned to a client's images (digits at 28 px) with a group lasso of growing strength, and what that costs in
accuracy. Both models are frozen with batch norm folded, one thread, processor time, variants in turns. `max_error` is the
largest difference of their answers.
"""

from __future__ import annotations

import copy
import json
import time
from typing import Any

import torch
from torch import nn

from benchmarks.measuring import medians
from osfl.core.seeds import torch_generator
from osfl.core.settings import resolve_settings
from osfl.core.types import Shard, Task
from osfl.ingredients.training.local import fit
from osfl.methods.fol import Fol
from osfl.methods.fol.alignment import align
from osfl.models.build import build_model
from osfl.models.folding import freeze
from osfl.models.inputs import to_input
from osfl.models.naming import named
from osfl.models.norms import recalibrated_bn
from osfl.models.slimming import links, slim
from osfl.runtime.workers import compute_threads
from osfl.simulate.simulation import Simulation, prepare

TASK = Task("bench", tuple("abcdefgh"), (3, 28, 28))
CASES = {  # architecture, every n-th filter silenced
    "cnn_w16_quarter": ("cnn-w16", 4),
    "cnn_w16_half": ("cnn-w16", 2),
    "cnn_half": ("cnn", 2),
    "resnet18_w16_quarter": ("resnet18-w16", 4),
    "resnet18_w16_half": ("resnet18-w16", 2),
}
STRENGTHS = (0.0, 2.0, 3.0, 4.0, 5.0, 6.0)  # of the group lasso; 2 is that of FOL's cpu preset
IMAGES, ROUNDS = 64, 15


def run() -> dict[str, object]:
    with compute_threads(1):
        by_hand = {name: _case(*case) for name, case in CASES.items()}
        return {**by_hand, "learned": _learned()}


def _case(architecture: str, every: int) -> dict[str, object]:
    facts = {"architecture": architecture, "silenced": f"1 in {every}"}
    return {**facts, **_compared(_silenced(architecture, every), TASK)}


def _compared(full: nn.Module, task: Task) -> dict[str, object]:
    thin = slim(full)
    frozen, narrow = freeze(full), freeze(thin)
    x = torch.randn((IMAGES, *task.image), generator=torch_generator(0, "images"))
    with torch.inference_mode():
        seconds = medians({"full": lambda: frozen(x), "slim": lambda: narrow(x)}, ROUNDS, time.process_time)
        error = float((frozen(x) - narrow(x)).abs().max())
    return {
        "images": IMAGES,
        "max_error": error,
        "bytes": _bytes(thin),
        "bytes_before": _bytes(full),
        "bytes_left": round(_bytes(thin) / _bytes(full), 3),
        "full_ms": round(1000 * seconds["full"], 2),
        "slim_ms": round(1000 * seconds["slim"], 2),
        "speedup": round(seconds["full"] / seconds["slim"], 2),
    }


def _silenced(architecture: str, every: int) -> nn.Module:
    model = build_model(architecture, TASK, torch_generator(0, "model")).eval()
    with torch.no_grad():
        for conv, norm, _ in links(model).values():
            for tensor in (conv.weight, norm.weight, norm.bias):
                tensor[::every] = 0
    return model


def _learned() -> dict[str, object]:
    """Two clients of 200 images each; the second one's model becomes the first one's, stronger and stronger pruned."""
    federation = prepare(Simulation("fol", "digits", 2, "iid", "cpu", samples=400, image_size=28))
    mine, theirs = (_trained(shard, federation.plan.settings, federation.plan.task) for shard in federation.shards)
    found: dict[str, object] = {}
    for strength in STRENGTHS:
        settings = resolve_settings(Fol, "cpu", {"sparsity": strength, "sparsity_unshared": strength})
        model, shard = copy.deepcopy(theirs), federation.shards[0]
        pruned = align(model, mine, shard, settings, torch_generator(0, "align"), torch.device("cpu"))
        model = recalibrated_bn(model, shard.train.images)
        with torch.no_grad():
            right = (model(to_input(federation.test.images)).argmax(1) == federation.test.labels).float().mean()
        found[f"sparsity {strength:g}"] = {
            "pruned": round(pruned, 3),
            "test_accuracy": round(float(right), 4),
            **_compared(model, federation.plan.task),
        }
    return found


def _trained(shard: Shard, settings: Any, task: Task) -> nn.Module:
    model = build_model(settings.architecture, task, torch_generator(0, "init"))
    fit(model, shard.train, settings, torch_generator(0, "local", shard.client))
    return model


def _bytes(model: nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in named(model, "model").values())


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
