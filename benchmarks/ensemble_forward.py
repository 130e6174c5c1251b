"""Teacher ensembles: how much faster frozen, folded, channels_last members in a pool are than the plain loop.

    python -m benchmarks.ensemble_forward

One process, variants interleaved, medians; the peak is a matrix product measured in the same run, so that the shares
hold on a busy machine too. The plain loop is what one writes first: the same weights in torch's default memory order,
convolution, batch norm, ReLU, pooling, in evaluation mode without gradients, all cores inside each operation.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from benchmarks.measuring import medians
from osfl.core.seeds import torch_generator
from osfl.core.types import Task
from osfl.ingredients.ensembles.ensemble import fast_logits
from osfl.models.build import build_model
from osfl.models.cnn import Cnn
from osfl.models.flops import forward_flops
from osfl.models.folding import freeze
from osfl.runtime.workers import Workers, default_workers

ROUNDS = 9
BATCH = 256
CASES: Mapping[str, tuple[str, int, tuple[int, int, int], float]] = {  # architecture, members, image, aim
    "cnn": ("cnn-w16", 10, (1, 28, 28), 3.0),
    "resnet": ("resnet18-w16", 5, (3, 28, 28), 1.6),
}


def run() -> dict[str, object]:
    return {name: _case(*case) for name, case in CASES.items()}


def _case(architecture: str, count: int, image: tuple[int, int, int], aim: float) -> dict[str, object]:
    members = _members(architecture, count, image)
    plain = [_as_first_written(member) for member in members]
    frozen = [freeze(member) for member in members]
    x = torch.randn((BATCH, *image), generator=torch_generator(0, "images"))
    pool, left, right = Workers(), *(torch.randn(2, 2048, 2048, generator=torch_generator(0, "peak")))
    seconds = medians(
        {
            "plain": lambda: _plain(plain, x),
            "ours": lambda: fast_logits(frozen, x, run_map=pool.map),
            "peak": lambda: left @ right,
        },
        ROUNDS,
    )
    flops, peak = forward_flops(members[0], image) * BATCH * count, 2 * 2048**3 / seconds["peak"]
    error = (fast_logits(frozen, x, run_map=pool.map) - _plain(plain, x)).abs().max()
    return {
        "architecture": architecture,
        "members": count,
        "batch": BATCH,
        "workers": default_workers(),
        "rounds": ROUNDS,
        "plain_ms": round(seconds["plain"] * 1e3, 1),
        "ours_ms": round(seconds["ours"] * 1e3, 1),
        "speedup": round(seconds["plain"] / seconds["ours"], 2),
        "aim": aim,
        "max_error": float(error),
        "gflops_plain": round(flops / seconds["plain"] / 1e9, 1),
        "gflops_ours": round(flops / seconds["ours"] / 1e9, 1),
        "gflops_peak": round(peak / 1e9, 1),
        "share_of_peak": round(flops / seconds["ours"] / peak, 3),
    }


def _members(architecture: str, count: int, image: tuple[int, int, int]) -> Sequence[nn.Module]:
    """Models with batch-norm statistics that are not the initial ones, so that folding has something to do."""
    task = Task("bench", tuple("abcdefgh"), image)
    members = [build_model(architecture, task, torch_generator(0, "member", index)) for index in range(count)]
    x = torch.randn((64, *image), generator=torch_generator(0, "statistics"))
    with torch.no_grad():
        for member in members:
            member.train()(x)
            member.eval()
    return members


def _as_first_written(member: nn.Module) -> nn.Module:
    model = copy.deepcopy(member).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    if not isinstance(model, Cnn):
        return model  # type: ignore[no-any-return]
    layers: list[nn.Module] = []
    for stage in model.stages:
        layers += [stage.conv, stage.bn, nn.ReLU(inplace=True), nn.MaxPool2d(2)]  # type: ignore[list-item]
    return nn.Sequential(*layers, nn.Flatten(), model.head).eval()


@torch.no_grad()
def _plain(members: Sequence[nn.Module], x: torch.Tensor) -> torch.Tensor:
    return torch.stack([member(x) for member in members])


if __name__ == "__main__":
    print(json.dumps(run(), indent=2))
