"""FedMITR's images from noise, and from densities of the classes: what images that are drawn of them are worth to its student.

    python -m benchmarks.bench density_start

No round has both models and densities; this gives the server both. Clients send their transformers and, in a second round on
the same images, FederatedFactory's mixtures of each of their classes (`least` images and more). All images come first, labels
are asked in proportion to what clients have, and the student then learns as in FedMITR's card (`order=images_first`, 24 epochs,
released at its end). Blood cells from the start that was made again, test images, three seeds; what is compared with is in the
cells' records.

- densities: clients are inverted as one, and the descent begins at images that were drawn of their class.
- drawn: those images as they are, with no patch dropped.
- blurred: the same with the noise that FederatedFactory's classifier is shown, because mixtures leave fine texture out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from benchmarks.grid import CELLS, NEARER
from osfl.core.method import Context
from osfl.core.types import Dataset, Upload
from osfl.ingredients.distillation.token_relabel import PatchServer, Pool
from osfl.ingredients.inversion.sparse import Joint, Sparse, all_patches, dropped, invert_sparsely
from osfl.methods.federated_factory import FederatedFactory
from osfl.methods.fedmitr import FedMitr
from osfl.models.inputs import to_input
from osfl.runtime.workers import compute_threads
from osfl.simulate.simulation import Federation, for_methods, prepare

COMPARED, SEEDS = ("blood-again-vit-n10-a0.1", "blood-again-vit-n10-c3"), (0, 1, 2)
NAMES = ("densities", "drawn", "blurred")
DRAWN = 200  # images of a class in the stock that images begin at
NOISE = 0.3  # of which each image gets a share


def run() -> dict[str, Any]:
    with compute_threads(1):
        return {cell: {f"seed{seed}": measured(cell, seed, "test", NAMES) for seed in SEEDS} for cell in COMPARED}


def measured(cell: str, seed: int, part: Literal["test", "val"], names: Sequence[str]) -> dict[str, float]:
    """Accuracy in percent, by where the student's images come from; `start` is the clients' average."""
    ours, factory = (
        prepare(replace(one, seed=seed, evaluate_on=part)) for one in for_methods(CELLS[cell], [NEARER[0], "federated_factory"])
    )
    method, ctx = FedMitr(ours.plan.task, ours.plan.settings), Context(ours.plan, torch.device("cpu"))
    uploads, stock = sent(method, ours, ctx), drawn(factory)
    found: dict[str, float] = {}
    for name in names:
        inversion, what = method.settings.inversion(method.events()), f"density start, {name}"
        server = PatchServer(method, uploads, ctx, what, inversion, method.terms())
        server.pools = [made(server, stock, name, epoch, ctx) for epoch in range(method.settings.server_epochs)]
        found["start"] = right(method.build(server.release()), ours.test)
        agreed = torch.cat([pool.whole.argmax(1) == pool.labels for pool in server.pools])
        found[f"{name}, called by their label"] = round(100 * float(agreed.float().mean()), 1)
        for epoch in range(method.settings.student_epochs):
            server.study(epoch)
        found[name] = right(method.build(server.release()), ours.test)
        print(cell, seed, found, flush=True)
    return found


def sent(method: Any, federation: Federation, ctx: Context) -> Sequence[Upload]:
    return [Upload(s.client, federation.plan.digest, method.client_phase(s, ctx)) for s in federation.shards]


def drawn(federation: Federation) -> Dataset:
    """Images of every class that somebody has a density of."""
    plan = federation.plan
    method, ctx = (
        FederatedFactory(plan.task, replace(plan.settings, images_per_class=DRAWN)),
        Context(plan, torch.device("cpu")),
    )
    return method.samples(sent(method, federation, ctx), ctx)


def made(server: PatchServer, stock: Dataset, name: str, epoch: int, ctx: Context) -> Pool:
    """An epoch's images with the clients' answers."""
    s, rng = server.settings, ctx.generator("density start", epoch)
    there = torch.bincount(stock.labels, minlength=len(server.task.classes)) > 0
    count = s.images * len(server.clients)
    labels = torch.multinomial(server.wanted[0].double() * there, count, replacement=True, generator=rng)
    places = torch.randint(DRAWN, (count,), generator=rng).tolist()
    x = to_input(torch.stack([stock.images[stock.labels == c][i] for c, i in zip(labels.tolist(), places, strict=True)]))
    if name == "densities":
        joint = Joint(server.members, server.combined)
        found = invert_sparsely(joint, labels, server.task.image, server.inversion, rng, begin=x)
    else:
        noise = NOISE * torch.rand(count, 1, 1, 1, generator=rng) * torch.randn(x.shape, generator=rng)
        found = Sparse(x + noise if name == "blurred" else x, all_patches(count, server.student.patches))
    images, drop = found.images.half(), dropped(found.keep, server.student.patches)
    whole, rest = server.ask(images, drop)
    return Pool(images, labels, torch.zeros_like(labels), found.keep, drop, whole, rest)


@torch.no_grad()
def right(model: torch.nn.Module, data: Dataset) -> float:
    return round(100 * float((model.eval()(to_input(data.images)).argmax(1) == data.labels).float().mean()), 1)
