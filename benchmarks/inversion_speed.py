"""Inversion and the server phases that are built on it, against what one writes first, at equal results.

    python -m benchmarks.inversion_speed

One process, variants interleaved, medians; the peak is a matrix product measured in the same run. The straightforward version:
torch's default memory order, hooks on batch norm, gradients for the weights too, all cores inside each operation, and
teachers asked again by every student. Both draw the same random numbers, so that images and students can be compared.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.measuring import medians
from osfl.ingredients.distillation import kd_loss
from osfl.ingredients.inversion import Inversion, Watched, balanced_labels, invert, total_variation
from osfl.ingredients.simplex import project
from osfl.methods import fedbicross, fedisca
from osfl.models.build import build_model
from osfl.models.flops import inversion_flops
from osfl.models.naming import named
from osfl.protocol import Context, Payload, Plan, Task, Upload
from osfl.seeds import torch_generator
from osfl.workers import Workers, compute_threads, default_workers

TASK = Task("bench", tuple("abcdefgh"), (3, 28, 28))
CASES: Mapping[str, tuple[str, int, int, int]] = {  # architecture, images, steps, rounds
    "cnn": ("cnn-w16", 128, 4, 5),
    "resnet": ("resnet18-w16", 64, 2, 3),
}
SETTINGS: Mapping[str, Any] = {
    "architecture": "cnn-w16", "images": 48, "steps": 6, "repetitions": 2, "server_lr": 0.01, "server_schedule": "constant",
}  # fmt: skip


def run() -> dict[str, object]:
    return {name: part() for name, part in PARTS.items()}


# --- inversion ---------------------------------------------------------------------------------------------------------------


def _inversion(architecture: str, images: int, steps: int, rounds: int) -> dict[str, object]:
    """Five clients, each inverted by itself; ours in a pool of workers, one model each."""
    models, plain = _models(architecture, 5), [_as_first_written(m) for m in _models(architecture, 5)]
    labels, settings, pool = balanced_labels(images, range(8)), Inversion(steps=steps), Workers()
    left, right = torch.randn(2, 2048, 2048, generator=torch_generator(0, "peak"))

    def ours() -> list[torch.Tensor]:
        return pool.map(lambda i: invert([Watched(models[i])], labels, TASK.image, settings, torch_generator(0, i)), range(5))

    def first() -> list[torch.Tensor]:
        return [_plain_invert([plain[i]], labels, settings, torch_generator(0, i))[-1] for i in range(5)]

    seconds = medians({"plain": first, "ours": ours, "peak": lambda: left @ right}, rounds)
    flops, peak = inversion_flops(models[0], TASK.image) * images * steps * 5, 2 * 2048**3 / seconds["peak"]
    pairs = zip(models, ours(), first(), strict=True)
    gap = max(_relative(_loss(model, a, labels), _loss(model, b, labels)) for model, a, b in pairs)
    return {
        "architecture": architecture, "clients": 5, "images": images, "steps": steps, "rounds": rounds,
        "workers": default_workers(), "plain_s": round(seconds["plain"], 3), "ours_s": round(seconds["ours"], 3),
        "speedup": round(seconds["plain"] / seconds["ours"], 2), "aim": 2.5, "relative_gap_of_losses": gap,
        "gflops_ours": round(flops / seconds["ours"] / 1e9, 1), "gflops_peak": round(peak / 1e9, 1),
        "share_of_peak": round(flops / seconds["ours"] / peak, 3),
    }  # fmt: skip


def _plain_invert(
    models: Sequence[nn.Module], labels: torch.Tensor, settings: Inversion, rng: torch.Generator
) -> list[torch.Tensor]:
    """Every x^(t) of the mean of logits, with forward hooks for the BN statistics."""
    terms: list[torch.Tensor] = []

    def hook(layer: Any, inputs: tuple[torch.Tensor], _: torch.Tensor) -> None:
        a = inputs[0]
        mean, var = a.mean((0, 2, 3)), a.var((0, 2, 3), unbiased=False)
        terms.append((mean - layer.running_mean).norm() + (var - layer.running_var).norm())

    norms = [m for model in models for m in model.modules() if isinstance(m, nn.BatchNorm2d)]
    handles = [norm.register_forward_hook(hook) for norm in norms]
    x = torch.randn((len(labels), *TASK.image), generator=rng).requires_grad_()
    optimizer, kept = torch.optim.Adam([x], settings.lr), []
    scale = (x.numel() / (256 * 3 * 32 * 32)) ** -0.5
    for _ in range(settings.steps):
        down, right = torch.randint(-settings.roll, settings.roll + 1, (2,), generator=rng).tolist()
        seen = torch.roll(x, (down, right), (2, 3))
        terms.clear()
        logits = sum(model(seen) for model in models) / len(models)
        loss = functional.cross_entropy(logits, labels) + settings.tv * scale * total_variation(seen)
        loss = loss + settings.bn * sum(terms)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        kept.append(x.detach().clone())
    for handle in handles:
        handle.remove()
    return kept


def _loss(model: nn.Module, x: torch.Tensor, labels: torch.Tensor) -> float:
    with torch.no_grad():
        logits, term = Watched(model)(x)
        return float(functional.cross_entropy(logits, labels) + 10 * term)


# --- whole server phases ---------------------------------------------------------------------------------------------------


Plain = Callable[[Any, Sequence[Upload], Context], Sequence[nn.Module]]


def _server(method: Any, settings: Any, plain: Plain) -> dict[str, object]:
    server, uploads = method(TASK, settings), _uploads(settings.architecture, 5)
    ctx = _context(settings, uploads)
    found: dict[str, Any] = {}

    def ours() -> None:
        with compute_threads(1):
            found["ours"] = server.server_phase(uploads, ctx)

    def first() -> None:
        found["plain"] = plain(server, uploads, ctx)

    seconds = medians({"plain": first, "ours": ours}, 3)
    return {
        "settings": dict(SETTINGS), "clients": 5, "rounds": 3,
        "plain_s": round(seconds["plain"], 2), "ours_s": round(seconds["ours"], 2),
        "speedup": round(seconds["plain"] / seconds["ours"], 2), "aim": 3.0,
        "largest_relative_gap_of_students": _gap(found["ours"], found["plain"]),
    }  # fmt: skip


def _plain_fedisca(server: Any, uploads: Sequence[Upload], ctx: Context) -> list[nn.Module]:
    s, members = server.settings, [_as_first_written(server.build(u.payload)) for u in uploads]
    student = _as_first_written(build_model(s.architecture, TASK, ctx.generator("student")))
    optimizer = torch.optim.SGD(student.parameters(), s.server_lr, momentum=s.server_momentum, weight_decay=s.server_decay)
    name = "+".join(u.client for u in uploads)
    for repetition in range(s.repetitions):
        rng = ctx.generator("trajectory", name, repetition)
        walk = _plain_invert(members, balanced_labels(s.images, range(8)), s.inversion(), rng)
        noisy = [_plain_adapted(member, walk) for member in members]
        student.train()
        for t, x in enumerate(walk, 1):
            loss = _plain_loss(student, members, noisy, x, 1 - t / s.steps, s.temperature)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return [student]


def _plain_fedbicross(server: Any, uploads: Sequence[Upload], ctx: Context) -> list[nn.Module]:
    """Every cluster's student asks every cluster's teachers again."""
    s, members = server.settings, [_as_first_written(server.build(u.payload)) for u in uploads]
    groups, start = server._clusters([server.build(u.payload) for u in uploads], ctx)
    students = [_as_first_written(build_model(s.architecture, TASK, ctx.generator("student"))) for _ in groups]
    train, val = server._split(ctx)
    weights = list(start)
    for repetition in range(s.repetitions):
        walks, clean, noisy = [], [], []
        for group in groups:
            rng = ctx.generator("trajectory", "+".join(uploads[i].client for i in group), repetition)
            walks.append(_plain_invert([members[i] for i in group], balanced_labels(s.images, range(8)), s.inversion(), rng))
            clean.append([members[i] for i in group])
            noisy.append([_plain_adapted(members[i], walks[-1]) for i in group])
        for k, student in enumerate(students):
            student.train()
            for t in range(1, s.steps + 1):
                weights[k] = _plain_bilevel(student, k, weights[k], walks, clean, noisy, t, s, train, val)
    return students


def _plain_bilevel(
    student: nn.Module, k: int, w: torch.Tensor, walks: Any, clean: Any, noisy: Any, t: int, s: Any, train: Any, val: Any
) -> torch.Tensor:
    def gradient(j: int, index: torch.Tensor) -> list[torch.Tensor]:
        loss = _plain_loss(student, clean[j], noisy[j], walks[j][t - 1][index], 1 - t / s.steps, s.temperature)
        return list(torch.autograd.grad(loss, list(student.parameters())))

    sources = [gradient(j, train) for j in range(len(walks))]
    with torch.no_grad():
        for place, p in enumerate(student.parameters()):
            p -= s.server_lr * sum(float(w[j]) * g[place] for j, g in enumerate(sources))
    kept = copy.deepcopy(dict(student.named_buffers()))
    held = gradient(k, val)
    for n, b in student.named_buffers():
        b.copy_(kept[n])
    inner = torch.stack([sum((a.double() * b.double()).sum() for a, b in zip(held, g, strict=True)) for g in sources])
    return project(w + s.weight_lr * inner / (float(inner.abs().max()) + 1e-12))


def _plain_loss(
    student: nn.Module, clean: Sequence[nn.Module], noisy: Sequence[nn.Module], x: torch.Tensor, share: float, tau: float
) -> torch.Tensor:
    with torch.no_grad():
        calm, wild = (sum(m(x) for m in members) / len(members) for members in (clean, noisy))
    said = student(x)
    return share * kd_loss(wild, said, tau) + (1 - share) * kd_loss(calm, said, tau)  # type: ignore[arg-type]


def _plain_adapted(member: nn.Module, walk: Sequence[torch.Tensor]) -> nn.Module:
    network = copy.deepcopy(member).train()
    with torch.no_grad():
        for x in reversed(walk):
            network(x)
    return network.eval()


def _gap(release: Any, students: Sequence[nn.Module]) -> float:
    """Largest relative distance between our students and the straightforward ones, layer by layer."""
    if release.personal:
        ours = {p.facts["cluster"]: p.tensors for p in release.personal.values()}
    else:
        ours = {0: release.shared.tensors}
    gaps = []
    for k, student in enumerate(students):
        for name, tensor in named(student, "model").items():
            if tensor.is_floating_point():
                gaps.append(float((ours[k][name] - tensor).norm() / (tensor.norm() + 1e-12)))
    return max(gaps)


def _scaling() -> dict[str, object]:
    """Our server phase with more clients, everything else equal; linear growth would be 4 from 5 to 20."""
    settings = fedisca.Settings(**SETTINGS)
    server = fedisca.FedISCA(TASK, settings)

    def phase(count: int) -> Callable[[], object]:
        uploads = _uploads(settings.architecture, count)
        ctx = _context(settings, uploads)

        def work() -> None:
            with compute_threads(1):
                server.server_phase(uploads, ctx)

        return work

    seconds = medians({str(n): phase(n) for n in (5, 10, 20)}, 3)
    growth = round(seconds["20"] / seconds["5"], 2)
    return {"seconds": {n: round(s, 2) for n, s in seconds.items()}, "growth_5_to_20": growth, "aim": 4.0}


# --- shared ------------------------------------------------------------------------------------------------------------------


def _models(architecture: str, count: int) -> list[nn.Module]:
    """Models with BN statistics of their own."""
    models = [build_model(architecture, TASK, torch_generator(0, "member", i)) for i in range(count)]
    with torch.no_grad():
        for i, model in enumerate(models):
            model.train()(torch.randn((32, *TASK.image), generator=torch_generator(0, "statistics", i)))
            model.eval()
    return models


def _as_first_written(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).to(memory_format=torch.contiguous_format)  # type: ignore[call-overload,no-any-return]


def _uploads(architecture: str, count: int) -> list[Upload]:
    facts = {"architecture": architecture, "samples": 100}
    models = _models(architecture, count)
    return [Upload(f"client-{i:02d}", "", Payload(named(model, "model"), facts)) for i, model in enumerate(models)]


def _context(settings: Any, uploads: Sequence[Upload]) -> Context:
    plan = Plan(TASK, "bench", settings, tuple(upload.client for upload in uploads))
    return Context(plan, torch.device("cpu"), map=Workers().map)


def _relative(a: float, b: float) -> float:
    return abs(a - b) / abs(b)



PARTS: Mapping[str, Callable[[], dict[str, object]]] = {
    **{f"inversion_{name}": lambda case=case: _inversion(*case) for name, case in CASES.items()},
    "fedisca": lambda: _server(fedisca.FedISCA, fedisca.Settings(**SETTINGS), _plain_fedisca),
    "fedbicross": lambda: _server(fedbicross.FedBiCross, fedbicross.Settings(**SETTINGS, clusters=3), _plain_fedbicross),
    "clients": _scaling,
}

if __name__ == "__main__":
    for name, part in PARTS.items():
        print(json.dumps({name: part()}, indent=2), flush=True)
