"""FederatedFactory — clients send a generator of each class they hold; whoever has them all makes a balanced dataset.

Paper: Moleri, Internò, Raza, Olhofer, Klindt, Stella, Hammer, "FederatedFactory: Generative One-Shot Learning for Extremely
Non-IID Distributed Scenarios", 2026, https://arxiv.org/abs/2603.16370. Protocol A (`mode=central`): the server samples
every cell of the generative matrix and trains one classifier on synthetic images only. B (`mode=peer`): the server passes
the generators on, every client trains an expert on its own images and synthetic ones of what it lacks, and the experts
answer as a product.
Forgetting is exact: a cell taken out leaves the bytes of a round that never had it (`methods/federated_factory/cells.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import nn

from osfl.core.errors import TrainingError
from osfl.core.method import Context, Part, Phase
from osfl.core.types import ClientId, Contract, Dataset, Exposed, Json, Payload, Plan, Presets, Probed, Release, Shard, Upload
from osfl.ingredients.generators.pictures import by_class
from osfl.ingredients.statistics.class_counts import facts_without
from osfl.ingredients.statistics.private_gaussians import NoisyGaussianMethod
from osfl.ingredients.statistics.site_prior import (
    SitePrior,
    corrected,
    site_prior_problems,
    with_site_prior,
    without_site_prior,
)
from osfl.ingredients.training.local import (
    CPU_TRAINING,
    SMOKE_TRAINING,
    Training,
    classifier,
    first_model,
    fit,
    training_bytes,
    training_problems,
)
from osfl.methods.federated_factory.cells import Cell, Prior, cells_of, heatmap, prefix, quotas, under
from osfl.methods.federated_factory.experts import ProductOfExperts
from osfl.methods.federated_factory.factories import (
    FactorySettings,
    cell_key,
    contract_of_factories,
    enough,
    exposed_class,
    factory_bytes,
    factory_problems,
    kept_factory,
    private_factories,
    sample_cell,
    sampled,
    train_factories,
)
from osfl.methods.federated_factory.mixtures import InPublicDirections
from osfl.models.inputs import to_input
from osfl.models.naming import named


@dataclass(frozen=True)
class Settings(SitePrior, FactorySettings, Training):
    architecture: str = "resnet50"  # of the classifier, or of each expert
    epochs: int = 300  # of the classifier, over the synthetic images
    batch_size: int = 128
    lr: float = 0.1
    weight_decay: float = 1e-4
    schedule: Literal["steps", "cosine", "constant"] = "cosine"
    mode: Literal["central", "peer"] = "central"  # A: the server trains one classifier. B: generators are passed on
    images_per_class: int = 10_000  # synthetic images of each class, over all clients' generators
    prior: Prior = "balanced"  # empirical: as many in all, by the classes' sizes
    noise_std: float = 0.0  # images get noise of a deviation up to this (pixels in [-1, 1]), against a generator's fingerprint
    fill: Literal["lacking", "all", "balance"] = "lacking"  # B: sample what one lacks, all that one gets, or what is too few
    expert_epochs: int = 0  # B: of each expert, over its images; 0 = as many as the server's classifier would get
    inference: Literal["product", "own"] = "product"  # B: experts answer together, or each client asks its own
    floor: float = 1e-12  # B: least probability that an expert may give a class


CPU = {
    **CPU_TRAINING,
    "factory": "mixture",
    "symmetry": "none",
    "images_per_class": 1000,
    "noise_std": 0.3,
    "epochs": 10,
    "expert_epochs": 4,
    "unet": "w16-m1.2-b1-s4",
    "dropout": 0.0,
    "edm_images": 12_000,
    "edm_batch": 64,
    "edm_lr": 0.004,
    "edm_lr_batches": 150,
    "edm_rampup": 1_000,
    "edm_ema": 0.2,
    "edm_noise_mean": -0.4,
    "edm_noise_std": 1.2,
    "edm_directions": 80,
    "edm_start": 3.0,
    "edm_steps": 6,
}
SMOKE = {
    **CPU,
    **SMOKE_TRAINING,
    "images_per_class": 16,
    "mixture_iterations": 5,
    "vae_steps": 5,
    "edm_images": 64,
    "edm_batch": 32,
    "edm_steps": 3,
    "expert_epochs": 1,
}


SEES = "sees"  # what a classifier is shown of an image, where that is not all of it
PROBED = 12  # images of a generator that are compared with other sites'


class FederatedFactory(NoisyGaussianMethod):
    Settings = Settings
    NEEDS = ("samples", "class_counts")
    PRESETS: ClassVar[Presets] = {"paper": {}, "cpu": CPU, "smoke": SMOKE}
    PRIVATE: ClassVar[Mapping[str, Json]] = {"factory": "mixture", "mixture_dims": 64, "symmetry": "none"}
    DEVIATIONS = (
        "quotas are rounded by largest remainders, so that they sum exactly",
        "every cell is sampled from a seed of its own: forgetting is exact",
        "both protocols train with the plan's `augment`, none unless it is set; the paper has flips, turns or crops for each "
        "dataset, and its public code augments in peer mode only",
        "in protocol B the server passes the generators on, where peers may send them to one another in the paper",
        "in protocol B a client samples classes that it lacks; Algorithm 1 samples all generators that it gets (`fill=all`)",
        "generators learn from images and their mirrors; the public code also crops, turns or shears before it stores them",
        "nothing that travels rests on fewer than `least` different images: smaller classes get no generator, components are "
        "fitted anew with fewer, directions are left out; an upload from which an image could be read is not sent",
        "images whose side the U-Net cannot halve are padded by their border (28 px become 32)",
        "the last iterate is used; nothing is held out of the synthetic images",
    )

    def problems(self, clients: int) -> list[str]:
        s, one = self.settings, "all experts and the server's classifier have one architecture"
        found = training_problems(s, self.task, one=one) + factory_problems(s, self.task)
        if s.expert_epochs < 0:
            found.append(f"setting 'expert_epochs': expected at least 0, got {s.expert_epochs}")
        if s.images_per_class < 1:
            found.append(f"setting 'images_per_class': expected at least 1, got {s.images_per_class}")
        if s.mode == "peer" and s.prior == "empirical":
            found.append("setting 'prior': 'empirical' needs mode=central: peers know only the classes they were sent")
        if s.personalize == "prior" and (s.mode, s.prior) != ("central", "balanced"):
            found.append(
                "setting 'personalize': 'prior' corrects a classifier of balanced classes: set mode=central, prior=balanced"
            )
        found += site_prior_problems(s, self.task)
        if not s.noise_std >= 0:
            found.append(f"setting 'noise_std': expected at least 0, got {s.noise_std}")
        if not 0 < s.floor < 1:
            found.append(f"setting 'floor': expected between 0 and 1, got {s.floor}")
        return found

    def privacy_problems(self, plan: Plan) -> list[str]:
        s, found = self.settings, self.gaussian_problems(plan)
        if s.factory != "mixture":
            found.append(
                f"setting 'factory': a generator of kind {s.factory!r} is trained on the images themselves, with no noise; "
                "with [privacy] set factory=mixture, whose Gaussians are of noisy sums"
            )
        if s.symmetry != "none":
            found.append("setting 'symmetry': with [privacy] an image is summed as it is; set symmetry=none")
        if s.mode != "central":
            found.append("setting 'mode': experts of peers learn from images without noise; with [privacy] set mode=central")
        return found

    def device_bytes(self, images: int, memory: int, half: bool) -> int | None:
        """Of a generator and of the classifier, whichever is larger."""
        s = self.settings
        made = s.images_per_class * len(self.task.classes)
        return max(training_bytes(s, self.task, made, memory, half), factory_bytes(s, self.task, images, memory))

    @property
    def inseparable(self) -> str:
        """What has seen a class and stays when it is forgotten: experts learn from images that never left their clients."""
        peer = self.settings.mode == "peer"
        return "experts of clients that hold the class go on learning it from their own images" if peer else ""

    def architectures(self) -> Sequence[str]:
        return ("",)  # generators travel, not classifiers, and there is one kind of them

    def contract(self, architecture: str) -> Contract:
        return contract_of_factories(self.settings, self.task)

    def client_phase(self, shard: Shard, ctx: Context) -> Payload:
        if ctx.plan.privacy is not None:
            return private_factories(shard, self.settings, self.task, ctx)
        return train_factories(shard, self.settings, self.task, ctx)

    def without_class(self, payload: Payload, label: int) -> Payload:
        tensors = {name: value for name, value in payload.tensors.items() if not name.startswith(prefix(label))}
        return Payload(tensors, facts_without(payload.facts, label))

    def exposed(self, payload: Payload, shard: Shard, ctx: Context) -> Iterator[Exposed]:
        """Each generator in an upload, beside the site's images of its class."""
        for label in range(len(self.task.classes)):
            if tensors := under(payload.tensors, prefix(label)):
                yield exposed_class(tensors, label, shard, self.settings, self.task, ctx)

    # --- what it costs ---

    def every_image(self) -> bool:
        """Mixtures have as many components as a class has images for."""
        return bool(self.settings.factory == "mixture")

    def shortened(self) -> Mapping[str, tuple[object, object]]:
        s, batch = self.settings, min(self.settings.edm_batch, 64)
        edm = {"edm_batch": (batch, batch), "edm_images": (2 * batch, 4 * batch)} if s.factory == "edm" else {}
        vae = {"vae_steps": (20, 40)} if s.factory == "vae" else {}
        peer = {"expert_epochs": (1, 2)} if s.expert_epochs else {}
        return {**super().shortened(), "images_per_class": (100, 200), **edm, **vae, **peer}

    def keeps(self) -> Sequence[str]:
        return ("images_per_class",)

    def work(self, phase: Phase, images: int, clients: Sequence[ClientId]) -> Sequence[float]:
        """Steps of the generators, images sampled, and the classifiers' passes over them."""
        s = self.settings
        if phase == "client":
            return (1, images, s.edm_images if s.factory == "edm" else s.vae_steps if s.factory == "vae" else 0)
        made, real = s.images_per_class, images if s.mode == "peer" else 0
        epochs = (s.expert_epochs or s.epochs) if s.mode == "peer" else s.epochs
        if (phase == "server") == (s.mode == "peer"):
            return (1, images)
        return (1, made, made * epochs, real * epochs)

    # --- A: one classifier at the server ---

    def server_phase(self, uploads: Sequence[Upload], ctx: Context) -> Release:
        cells = self._cells(uploads)
        if self.settings.mode == "peer":
            return self._pass_on(cells, uploads, ctx)
        pool = self._pool(cells, self._asked(cells, ctx), ctx, uploads)
        self._show(cells, uploads, pool, ctx)
        learned = self._learn(pool, self.settings.epochs, ctx, "classifier")
        if ctx.plan.privacy is not None:
            learned = Payload(learned.tensors, {**learned.facts, SEES: "public directions"})
        return Release(learned)

    def samples(self, uploads: Sequence[Upload], ctx: Context) -> Dataset:
        """The synthetic images that the server trains on, by class and client."""
        cells = self._cells(uploads)
        return self._pool(cells, self._asked(cells, ctx), ctx, uploads)

    def probed(self, upload: Upload, ctx: Context) -> Probed:
        """A few images of each generator."""
        cells = cells_of([upload], len(self.task.classes))
        counts = tuple(upload.payload.facts["class_counts"])
        if not cells:
            return Probed(counts)
        pool = self._pool(cells, {cell.place: PROBED for cell in cells}, ctx)
        return Probed(counts, None, pool.images, pool.labels, pixels=True)

    def preview(self, payload: Payload, ctx: Context) -> Mapping[str, Json]:
        """A few images of each generator in a message: what others will see of this client."""
        passed_on = payload.facts.get("cells")
        cells = (
            cells_of([Upload("preview", "", payload)], len(self.task.classes)) if passed_on is None else self._given(payload)
        )
        if not cells:
            return {}
        pool = self._pool(cells, {cell.place: 6 for cell in cells}, ctx)
        note = "Synthetic: made by the generators in this message, as many as anybody likes. Nobody should be recognizable."
        return {"What its generators make": by_class(to_input(pool.images), pool.labels, self.task.classes, each=6, note=note)}

    def _cells(self, uploads: Sequence[Upload]) -> list[Cell]:
        cells = cells_of(uploads, len(self.task.classes))
        if not cells:
            raise TrainingError(
                "no client has sent a generator",
                field="least",
                expected=f"classes of at least {self.settings.least} images",
                fix="Use more images a client.",
            )
        return cells

    def _asked(self, cells: Sequence[Cell], ctx: Context) -> Mapping[tuple[int, ClientId], int]:
        return quotas(cells, self.settings.images_per_class, self.settings.prior, ctx.plan.limits.share)

    def _pool(
        self,
        cells: Sequence[Cell],
        asked: Mapping[tuple[int, ClientId], int],
        ctx: Context,
        uploads: Sequence[Upload] | None = None,
    ) -> Dataset:
        """Images of all cells in the order of class and client; cells are sampled side by side."""
        done: list[Cell] = []
        if uploads is not None and ctx.spreads:
            return self._labeled(cells, self._sampled_apart(cells, asked, uploads, ctx))

        def sample(cell: Cell) -> torch.Tensor:
            images = sample_cell(cell, asked[cell.place], self.settings, self.task, ctx)
            done.append(cell)
            ctx.progress("cells sampled", len(done), len(cells))
            return images

        return self._labeled(cells, ctx.map(sample, cells))

    def _sampled_apart(
        self, cells: Sequence[Cell], asked: Mapping[tuple[int, ClientId], int], uploads: Sequence[Upload], ctx: Context
    ) -> list[torch.Tensor]:
        """Each cell's images on another worker or device."""

        def part(cell: Cell) -> Part:
            count = asked[cell.place]
            facts = {"label": cell.label, "seen": cell.seen, "count": count}
            return Part(
                (cell.client,),
                Payload({}, facts),
                lambda: cell_key(cell, cell.tensors, count, self.settings, self.task, ctx),
            )

        made = ctx.spread(self, sampled_cell, uploads, [part(cell) for cell in cells])
        return [payload.tensors["images"].cpu() for payload in made]

    def _labeled(self, cells: Sequence[Cell], parts: list[torch.Tensor]) -> Dataset:
        labels = [torch.full((len(part),), cell.label) for part, cell in zip(parts, cells, strict=True)]
        return Dataset(torch.cat(parts), torch.cat(labels))

    def _learn(self, data: Dataset, epochs: int, ctx: Context, *labels: str) -> Payload:
        """A classifier; its start and its order of images do not depend on how many cells there are."""
        s = replace(self.settings, epochs=epochs)
        model = first_model(s, s.architecture, self.task, ctx.generator("init", s.architecture))
        fit(
            model,
            data,
            s,
            ctx.generator(*labels),
            device=ctx.device,
            noise=s.noise_std,
            progress=lambda done, total: ctx.progress(" ".join(labels), done, total),
        )
        return Payload(named(model, "model"), {"architecture": s.architecture})

    def _show(self, cells: Sequence[Cell], uploads: Sequence[Upload], pool: Dataset | None, ctx: Context) -> None:
        clients = sorted(upload.client for upload in uploads)
        ctx.show("Generative matrix", heatmap(cells, self._asked(cells, ctx), self.task.classes, clients))
        if pool is not None:
            ctx.show("Synthetic images", by_class(to_input(pool.images), pool.labels, self.task.classes, each=6))

    # --- B: generators passed on, an expert at every client, a product of experts ---

    def _pass_on(self, cells: Sequence[Cell], uploads: Sequence[Upload], ctx: Context) -> Release:
        """To each client the generators of others: of the classes that it lacks, or of all."""
        self._show(cells, uploads, None, ctx)
        personal = {}
        for client in sorted(upload.client for upload in uploads):
            held = {cell.label for cell in cells if cell.client == client}
            lacks_only = self.settings.fill == "lacking"
            given = [cell for cell in cells if cell.client != client and not (lacks_only and cell.label in held)]
            tensors = {
                f"{cell.client}/{prefix(cell.label)}{name}": value for cell in given for name, value in cell.tensors.items()
            }
            personal[client] = Payload(tensors, {"cells": [[cell.label, cell.client, cell.seen] for cell in given]})
        return Release(Payload({}, {"classes": sorted({cell.label for cell in cells})}), personal)

    def personalize(self, release: Release, shard: Shard, ctx: Context) -> Payload:
        if self.settings.mode == "central":
            return with_site_prior(release, shard, len(self.task.classes), self.settings)
        given = release.for_client(shard.client)
        cells = self._received(given, shard, ctx)
        real = torch.bincount(shard.train.labels, minlength=len(self.task.classes)).tolist()
        asked = self._wanted(cells, real, ctx.plan.limits.share)
        used = [cell for cell in cells if asked.get(cell.place)]
        parts = [sample_cell(cell, asked[cell.place], self.settings, self.task, ctx) for cell in used]
        labels = [torch.full((asked[cell.place],), cell.label) for cell in used]
        mixed = Dataset(torch.cat([shard.train.images, *parts]), torch.cat([shard.train.labels, *labels]))
        epochs = self.settings.expert_epochs or self.settings.epochs
        expert = self._learn(mixed, epochs, ctx, "expert", shard.client)
        return Payload(expert.tensors, {**expert.facts, "client": shard.client})

    def _received(self, given: Payload, shard: Shard, ctx: Context) -> list[Cell]:
        """The passed on generators, and where classes are filled up also the client's own, which never traveled back."""
        cells = self._given(given)
        if self.settings.fill == "balance":
            seen = torch.bincount(shard.train.labels, minlength=len(self.task.classes)).tolist()
            for label in enough(shard, self.settings, len(self.task.classes)):
                made = kept_factory(shard, label, self.settings, self.task, ctx)
                cells.append(Cell(label, shard.client, seen[label], made))
        return sorted(cells, key=lambda cell: cell.place)

    def _given(self, part: Payload) -> list[Cell]:
        """The generators of others in a personal part."""
        return [
            Cell(label, client, seen, under(part.tensors, f"{client}/{prefix(label)}"))
            for label, client, seen in part.facts.get("cells", [])
        ]

    def _wanted(self, cells: Sequence[Cell], real: Sequence[int], share: float) -> dict[tuple[int, ClientId], int]:
        """Images of each cell: up to the target together with the real ones, or the whole target where there are none; with
        `fill=all` the whole target of every class, beside the real ones."""
        found: dict[tuple[int, ClientId], int] = {}
        targets = quotas(cells, self.settings.images_per_class, self.settings.prior, share)
        if self.settings.fill == "all":
            return targets
        for label in sorted({cell.label for cell in cells}):
            row = [cell for cell in cells if cell.label == label]
            target = sum(targets[cell.place] for cell in row)
            found |= quotas(row, max(0, target - real[label]), share=share)
        return found

    def after_round(self, payloads: Mapping[ClientId, Payload]) -> Payload | None:
        """The joint model: every client's expert. To answer together they must all have been sent to all."""
        if self.settings.mode == "central" or self.settings.inference == "own":
            return None
        clients = sorted(payloads)
        tensors = {f"{client}/{name}": value for client in clients for name, value in payloads[client].tensors.items()}
        return Payload(tensors, {"experts": {client: payloads[client].facts["architecture"] for client in clients}})

    def _seeing(self, model: nn.Module, payload: Payload) -> nn.Module:
        """A classifier of a private round, behind the directions that its synthetic images have."""
        if SEES not in payload.facts:
            return model
        dims = min(self.settings.mixture_dims, math.prod(self.task.image))
        return nn.Sequential(InPublicDirections(dims, self.task.image, self.settings.mixture_norm), model).eval()

    def build(self, payload: Payload) -> nn.Module:
        experts = payload.facts.get("experts")
        if experts is None:
            return corrected(self._seeing(classifier(without_site_prior(payload), self.task), payload), payload)
        members = [
            classifier(Payload(payload.tensors, {"architecture": architecture}), self.task, f"{client}/model")
            for client, architecture in sorted(experts.items())
        ]
        return ProductOfExperts(members, self.settings.floor).eval()


def sampled_cell(method: FederatedFactory, uploads: Sequence[Upload], part: Part, ctx: Context) -> Payload:
    """The images of one cell, wherever they are computed."""
    facts, tensors = part.payload.facts, under(uploads[0].payload.tensors, prefix(part.payload.facts["label"]))
    cell = Cell(facts["label"], uploads[0].client, facts["seen"], tensors)
    return sampled(cell, tensors, facts["count"], method.settings, method.task, ctx)
