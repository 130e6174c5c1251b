"""The exact projection and the exact hypergradient."""

import itertools

import pytest
import torch

from osfl.ingredients.statistics.simplex import project
from osfl.methods.fedbicross.bilevel import hypergradient, learn


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("size", [1, 2, 3, 7])
def test_projection_properties(size: int, seed: int) -> None:
    v = 3 * random(size, seed=seed)
    w = project(v)
    assert torch.all(w >= 0) and abs(float(w.sum()) - 1) < 1e-12
    assert torch.allclose(project(w), w, atol=1e-12)  # idempotent, so the identity on the simplex
    assert torch.allclose(project(v + 5.0), w, atol=1e-12)  # only differences matter


@pytest.mark.parametrize("seed", range(10))
def test_projection_is_the_nearest_point(seed: int) -> None:
    v = 2 * random(3, seed=seed)
    grid = [
        torch.tensor([a, b, 200 - a - b], dtype=torch.float64) / 200
        for a, b in itertools.product(range(201), repeat=2)
        if a + b <= 200
    ]
    best = min(float((v - point).norm()) for point in grid)
    assert float((v - project(v)).norm()) <= best + 1e-12


@pytest.mark.parametrize("clip", [0.0, 0.1, 1e9])
def test_hypergradient_equals_finite_differences(clip: float) -> None:
    """∂L_val(G - η Σ w_j g_j)/∂w_j on a small network with batch norm, float64, relative error below 1e-4; the second step
    is cut to a shorter one."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    names = dict(net.named_parameters())
    for i, p in enumerate(names.values()):
        p.data = 0.5 * random(*p.shape, seed=i)
    flat = torch.cat([p.detach().flatten() for p in names.values()])
    data = [(random(8, 4, seed=10 + j), random(8, 3, seed=20 + j)) for j in range(4)]

    def loss(at: torch.Tensor, part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        pieces = dict(zip(names, torch.split(at, [p.numel() for p in names.values()]), strict=True))
        shaped = {n: piece.view(names[n].shape) for n, piece in pieces.items()}
        output: torch.Tensor = torch.func.functional_call(net, shaped, (part[0],))
        return (output - part[1]).square().mean()

    def gradient(at: torch.Tensor, part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        at = at.clone().requires_grad_()
        return torch.autograd.grad(loss(at, part), at)[0]

    lr, w = 0.3, torch.tensor([0.5, 0.2, 0.3], dtype=torch.float64)
    sources = [gradient(flat, part) for part in data[:3]]

    def total(w: torch.Tensor) -> torch.Tensor:
        return torch.stack([w[j] * sources[j] for j in range(3)]).sum(0)

    def inner(w: torch.Tensor) -> torch.Tensor:
        size = float(total(w).norm())
        return flat - lr * total(w) * (clip / size if clip and size > clip else 1.0)

    def outer(w: torch.Tensor) -> float:
        return float(loss(inner(w), data[3]))

    assert clip != 0.1 or float(total(w).norm()) > clip
    ours = hypergradient(gradient(inner(w), data[3]), sources, lr, total(w), clip)
    for j in range(3):
        nudge = torch.zeros(3, dtype=torch.float64)
        nudge[j] = 1e-6
        numeric = (outer(w + nudge) - outer(w - nudge)) / 2e-6
        assert abs(numeric - float(ours[j])) <= 1e-4 * abs(numeric)


def test_weights_move_towards_sources_that_help() -> None:
    start = torch.full((3,), 1 / 3, dtype=torch.float64)
    moved = learn(start, torch.tensor([-2.0, 0.0, 2.0], dtype=torch.float64), 0.05)
    assert moved[0] > moved[1] > moved[2] and abs(float(moved[0] - start[0]) - 0.05) < 1e-12
    scaled = learn(start, torch.tensor([-2e6, 0.0, 2e6], dtype=torch.float64), 0.05)
    assert torch.allclose(moved, scaled)  # the step has no scale unless asked for
    raw = learn(start, torch.tensor([-0.2, 0.0, 0.2], dtype=torch.float64), 0.5, raw=True)
    assert torch.allclose(raw, torch.tensor([1 / 3 + 0.1, 1 / 3, 1 / 3 - 0.1], dtype=torch.float64))


def test_the_largest_component_counts_whatever_its_sign() -> None:
    """-2 is the largest of (-2, 0, 1): weights change by (0.05, 0, -0.025), less a third of their sum on the simplex."""
    start = torch.full((3,), 1 / 3, dtype=torch.float64)
    moved = learn(start, torch.tensor([-2.0, 0.0, 1.0], dtype=torch.float64), 0.05)
    assert (moved - start).tolist() == pytest.approx([0.05 - 0.025 / 3, -0.025 / 3, -0.025 - 0.025 / 3])


def test_one_cluster_keeps_weight_one_and_equal_sources_stay_equal() -> None:
    one = torch.ones(1, dtype=torch.float64)
    assert torch.equal(learn(one, torch.tensor([-3.0], dtype=torch.float64), 0.05), one)
    even = torch.full((4,), 0.25, dtype=torch.float64)
    assert torch.allclose(learn(even, torch.full((4,), -1.7, dtype=torch.float64), 0.05), even, atol=1e-15)


def test_weights_stay_where_no_source_matters() -> None:
    start = torch.tensor([0.25, 0.75], dtype=torch.float64)
    assert torch.allclose(learn(start, torch.zeros(2, dtype=torch.float64), 0.05), start)
