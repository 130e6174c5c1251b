"""Inversion of ViTs as FedMITR does it, against what one writes first.

    python -m benchmarks.bench sparse_inversion_speed

One process, variants interleaved, medians. The straightforward version: attention maps formed in every layer, the last block
computed for all tokens, gradients for the weights too, all cores inside each operation, one client after the other. Dense, both
find the same images. `dropped` stops 30 % of the patches after the first step, so that all but one step are cheaper; its ratio
of operations is counted for the same steps. `preset` looks for images as FedMITR's `cpu` preset does, on six grids and without
the server's opinion, which halves the work. The peak is a matrix product measured in the same run.
"""

from __future__ import annotations

import copy
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from benchmarks.measuring import medians, require_quiet
from osfl.core.seeds import torch_generator
from osfl.core.types import Task
from osfl.ingredients.distillation.token_relabel import as_vit
from osfl.ingredients.inversion.pixels import disagreement, total_variation
from osfl.ingredients.inversion.sparse import SparseInversion, draw_move, invert_sparsely, sparse_flops
from osfl.models.build import build_model
from osfl.models.folding import freeze
from osfl.models.vit import Attention, Block, Vit
from osfl.runtime.workers import Workers, compute_threads, default_workers

CLASSES = tuple("abcdefghij")
CASES: Mapping[str, tuple[str, int, int, int, int, int]] = {  # architecture, side, clients, images, steps, rounds
    "small": ("vit", 32, 2, 64, 6, 3),
    "wide": ("vit-p4-w192-d6-h3", 32, 2, 16, 6, 3),
    "deit_tiny_224": ("deit_tiny", 224, 2, 4, 6, 3),
}
RATIO = 0.3


def run() -> dict[str, object]:
    require_quiet()
    return {name: part() for name, part in PARTS.items()}


def _case(architecture: str, side: int, clients: int, images: int, steps: int, rounds: int) -> dict[str, object]:
    task = Task("bench", CLASSES, (3, side, side))
    models = [_vit(architecture, task, i) for i in range(clients + 1)]
    server, frozen, pool = models.pop(), [as_vit(freeze(model)) for model in models], Workers()
    still, labels = as_vit(freeze(server)), torch.arange(images) % len(CLASSES)
    dense = SparseInversion(steps=steps, lr=0.1, events=(), clamp=True)
    sparse = SparseInversion(steps=steps, lr=0.1, events=((1, RATIO),), clamp=True)
    preset = replace(sparse, events=((steps // 2, RATIO),), js=0.0, scales=6, start=0.5)  # as FedMITR's `cpu` preset looks
    left, right = torch.randn(2, 2048, 2048, generator=torch_generator(0, "peak"))

    def ours(settings: SparseInversion) -> list[torch.Tensor]:
        def work(i: int) -> torch.Tensor:
            return invert_sparsely(frozen[i], labels, task.image, settings, torch_generator(0, i), server=still).images

        return pool.map(work, range(clients))

    def first() -> list[torch.Tensor]:
        return [_plain(model, server, labels, task.image, dense, torch_generator(0, i)) for i, model in enumerate(models)]

    variants: dict[str, Callable[[], object]] = {
        "plain": first,
        "dense": lambda: ours(dense),
        "dropped": lambda: ours(sparse),
        "preset": lambda: ours(preset),
        "peak": lambda: left @ right,
    }
    seconds = medians(variants, rounds)
    with compute_threads(1):
        work = medians({name: variants[name] for name in ("plain", "dense", "dropped", "preset")}, 1, time.process_time)
    each = 2 * images * clients  # every image passes its client and the server
    flops = {name: each * sparse_flops(frozen[0], task.image, s) for name, s in (("dense", dense), ("dropped", sparse))}
    peak = 2 * 2048**3 / seconds["peak"]
    found: dict[str, Any] = {
        "architecture": architecture,
        "side": side,
        "clients": clients,
        "images": images,
        "steps": steps,
        "rounds": rounds,
        "workers": default_workers(),
        "load_average": round(os.getloadavg()[0], 1),
        "seconds": {name: round(seconds[name], 3) for name in work},
        "images_per_second_and_step": {name: round(clients * images * steps / seconds[name], 1) for name in work},
        "dense_speedup": round(seconds["plain"] / seconds["dense"], 2),
        "dense_aim": 1.5,
        "dropped_speedup": round(seconds["plain"] / seconds["dropped"], 2),
        "dropped_aim": 2.1,
        "processor_seconds": {name: round(value, 3) for name, value in work.items()},
        "less_work": {name: round(work["plain"] / work[name], 2) for name in ("dense", "dropped")},
        "gflops_peak": round(peak / 1e9, 1),
        "share_of_peak": {name: round(count / seconds[name] / peak, 3) for name, count in flops.items()},
        "gap_of_images": max(_gap(a, b) for a, b in zip(ours(dense), first(), strict=True)),
        "gap_of_logits": _logit_gap(models[0], frozen[0], task),
    }
    saved, counted = work["dense"] / work["dropped"], flops["dense"] / flops["dropped"]
    return {
        **found,
        "dropping": {
            "faster": round(seconds["dense"] / seconds["dropped"], 2),
            "less_work": round(saved, 2),
            "fewer_operations": round(counted, 2),
            "share": round(saved / counted, 2),
            "aim": 0.85,
        },
    }


# --- the straightforward version ----------------------------------------------------------------------------------------


def _plain(
    model: Vit, server: Vit, labels: torch.Tensor, image: tuple[int, int, int], settings: SparseInversion, rng: torch.Generator
) -> torch.Tensor:
    x = torch.randn((len(labels), *image), generator=rng).requires_grad_()
    optimizer = torch.optim.Adam([x], settings.lr, betas=(0.5, 0.99))
    scale = (64 * 3 * 224 * 224 / x.numel()) ** 0.5
    for _ in range(settings.steps):
        seen = draw_move(image[1], image[2], rng).pixels(x)
        logits = _plain_logits(model, seen)
        loss = functional.cross_entropy(logits, labels) - settings.js * disagreement(_plain_logits(server, seen), logits)
        loss = loss + settings.tv * scale * total_variation(x)
        for network in (model, server):
            network.zero_grad(set_to_none=True)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            x.clamp_(-1, 1)
    return x.detach()


def _plain_logits(model: Vit, x: torch.Tensor) -> torch.Tensor:
    tokens = model.embed(x)
    for block in model.blocks:
        assert isinstance(block, Block)
        tokens = tokens + block.ls1(_attended(block.attn, block.norm1(tokens)))
        tokens = tokens + block.ls2(block.mlp(block.norm2(tokens)))
    logits: torch.Tensor = model.head(model.norm(tokens)[:, 0])
    return logits


def _attended(attention: Attention, x: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.unflatten(-1, (attention.heads, -1)).transpose(1, 2) for part in attention.qkv(x).chunk(3, -1))
    rows = (q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5).softmax(-1)
    y: torch.Tensor = attention.proj((rows @ v).transpose(1, 2).flatten(2))
    return y


# --- shared -----------------------------------------------------------------------------------------------------------------


def _vit(architecture: str, task: Task, which: int) -> Vit:
    """First weights, enlarged so that attention is not flat."""
    model = as_vit(build_model(architecture, task, torch_generator(0, "member", which)).eval())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0) if parameter.ndim > 1 else None
    return model


def _gap(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def _logit_gap(model: Vit, frozen: Vit, task: Task) -> float:
    x = torch.randn((4, *task.image), generator=torch_generator(0, "logits"))
    with torch.no_grad():
        return float((_plain_logits(copy.deepcopy(model), x) - frozen(x)).abs().max())


PARTS: Mapping[str, Callable[[], dict[str, object]]] = {name: partial(_case, *case) for name, case in CASES.items()}

if __name__ == "__main__":
    for name, part in PARTS.items():
        print(json.dumps({name: part()}, indent=2), flush=True)
