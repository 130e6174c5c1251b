"""What it is worth that silenced filters leave a model: bytes, and the time of a forward pass.

    python -m benchmarks.slimming_speed

Filters are silenced by hand, every second or every fourth of those that can leave; both models are frozen with batch norm
folded, one thread, processor time, variants in turns. `max_error` is the largest difference of their answers.
"""

from __future__ import annotations

import json
import time

import torch
from torch import nn

from benchmarks.measuring import medians
from osfl.models.build import build_model
from osfl.models.folding import freeze
from osfl.models.naming import named
from osfl.models.slimming import links, slim
from osfl.protocol import Task
from osfl.seeds import torch_generator
from osfl.workers import compute_threads

TASK = Task("bench", tuple("abcdefgh"), (3, 28, 28))
CASES = {  # architecture, every n-th filter silenced
    "cnn_w16_quarter": ("cnn-w16", 4), "cnn_w16_half": ("cnn-w16", 2), "cnn_half": ("cnn", 2),
    "resnet18_w16_quarter": ("resnet18-w16", 4), "resnet18_w16_half": ("resnet18-w16", 2),
}  # fmt: skip
IMAGES, ROUNDS = 64, 15


def run() -> dict[str, object]:
    with compute_threads(1):
        return {name: _case(*case) for name, case in CASES.items()}


def _case(architecture: str, every: int) -> dict[str, object]:
    full = _silenced(architecture, every)
    thin = slim(full)
    frozen, narrow = freeze(full), freeze(thin)
    x = torch.randn((IMAGES, *TASK.image), generator=torch_generator(0, "images"))
    with torch.inference_mode():
        seconds = medians({"full": lambda: frozen(x), "slim": lambda: narrow(x)}, ROUNDS, time.process_time)
        error = float((frozen(x) - narrow(x)).abs().max())
    return {
        "architecture": architecture, "silenced": f"1 in {every}", "images": IMAGES, "max_error": error,
        "bytes": _bytes(thin), "bytes_before": _bytes(full), "bytes_left": round(_bytes(thin) / _bytes(full), 3),
        "full_ms": round(1000 * seconds["full"], 2), "slim_ms": round(1000 * seconds["slim"], 2),
        "speedup": round(seconds["full"] / seconds["slim"], 2),
    }  # fmt: skip


def _silenced(architecture: str, every: int) -> nn.Module:
    model = build_model(architecture, TASK, torch_generator(0, "model")).eval()
    with torch.no_grad():
        for conv, norm, _ in links(model).values():
            for tensor in (conv.weight, norm.weight, norm.bias):
                tensor[::every] = 0
    return model


def _bytes(model: nn.Module) -> int:
    return sum(value.numel() * value.element_size() for value in named(model, "model").values())


if __name__ == "__main__":
    print(json.dumps(run(), indent=1))
