"""Generators of one class behind one interface: learn from its images, travel as named tensors, make images from a seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch.nn import functional

from osfl.core.errors import FilesError, TrainingError, UsageError
from osfl.core.method import Context
from osfl.core.types import Contract, Exposed, Json, Payload, Shard, Task, digest_of
from osfl.ingredients.statistics.private_gaussians import images_to_sum, private_facts
from osfl.ingredients.statistics.support import Readable
from osfl.ingredients.training.local import not_positive, too_low
from osfl.ingredients.training.one_upload import working_on
from osfl.methods.federated_factory.autoencoders import Vae, VaeSettings
from osfl.methods.federated_factory.cells import Cell, prefix
from osfl.methods.federated_factory.diffusion import LAST_LEVEL, LOST, SAMPLING, Diffusion, DiffusionSettings
from osfl.methods.federated_factory.mixtures import Mixture, MixtureSettings
from osfl.methods.federated_factory.symmetries import Symmetry, orbit
from osfl.models.inputs import to_input
from osfl.models.unet import parse_unet
from osfl.runtime.meter import measure
from osfl.runtime.near_copies import without_near_copies
from osfl.runtime.payloads import payload_digest
from osfl.runtime.precision import current_precision

if TYPE_CHECKING:
    from osfl.core.types import Tensors


SIDE = 32  # pixels at which the egress check compares images
ATTACKED = 64  # samples that it draws of a generator


class Factory(Protocol):
    """What a kind of generator provides. `fit` sees one class of one client, `sample` only tensors."""

    def contract(self) -> Contract: ...
    def fit(
        self, images: torch.Tensor, rng: torch.Generator, progress: Callable[[int, int], None], kept: Path | None = None
    ) -> dict[str, torch.Tensor]: ...
    def sample(self, tensors: Tensors, count: int, rng: torch.Generator) -> torch.Tensor: ...
    def readable(self, tensors: Tensors) -> Readable: ...


@dataclass(frozen=True)
class FactorySettings(MixtureSettings, VaeSettings, DiffusionSettings):
    """Which generator, and for which classes; the parts before say how each kind learns."""

    factory: Literal["edm", "mixture", "vae"] = "edm"  # edm: the paper's diffusion model
    symmetry: Symmetry = "flip"  # what a generator may assume: flip, a mirror (paper); none, for letters; dihedral, turns too


_KINDS: Mapping[str, tuple[Callable[..., Factory], type]] = {
    "mixture": (Mixture, MixtureSettings),
    "vae": (Vae, VaeSettings),
    "edm": (Diffusion, DiffusionSettings),
}


def factory_for(settings: FactorySettings, task: Task, device: torch.device | None = None) -> Factory:
    kind, _ = _KINDS[settings.factory]
    return kind(settings, task.image, settings.symmetry, device or torch.device("cpu"))


def factory_bytes(settings: FactorySettings, task: Task, images: int, memory: int) -> int:
    """Memory that learning a generator takes on its device; the small kinds count for nothing beside a classifier."""
    if settings.factory != "edm":
        return 0
    return Diffusion(settings, task.image, settings.symmetry, torch.device("cpu")).bytes_within(images, memory)


def factory_problems(settings: FactorySettings, task: Task) -> list[str]:
    """Settings that cannot make a generator, a sentence each."""
    positive = (
        "mixture_dims",
        "mixture_components",
        "mixture_prior",
        "mixture_iterations",
        "mixture_norm",
        "vae_latent_dim",
        "vae_width",
        "vae_steps",
        "vae_batch",
        "vae_lr",
        "edm_images",
        "edm_batch",
        "edm_lr",
        "edm_lr_batches",
        "edm_noise_std",
    )
    found = [*not_positive(settings, *positive), *too_low(settings, {"edm_rampup": 0, "edm_directions": 0})]
    if not 0 <= settings.dropout < 1:
        found.append(f"setting 'dropout': expected from 0 to below 1, got {settings.dropout}")
    if not 0 <= settings.edm_ema < 0.28:
        found.append(f"setting 'edm_ema': expected from 0 to 0.28, got {settings.edm_ema}")
    if settings.edm_steps < 2:
        found.append(f"setting 'edm_steps': expected at least 2, got {settings.edm_steps}")
    if settings.edm_start <= LAST_LEVEL:
        found.append(f"setting 'edm_start': expected above {LAST_LEVEL}, where sampling ends, got {settings.edm_start}")
    elif settings.edm_start < LOST and not settings.edm_directions:
        found.append(
            f"setting 'edm_start': expected at least {LOST:g}, got {settings.edm_start}; without edm_directions "
            "images must be lost in the noise that sampling begins with"
        )
    if settings.least < 2:
        found.append(f"setting 'least': expected at least 2, got {settings.least}; a generator of one image is that image")
    if settings.symmetry == "dihedral" and task.image[1] != task.image[2]:
        found.append(f"setting 'symmetry': only square images can be turned, these are {task.image[1]} x {task.image[2]}")
    try:
        parse_unet(settings.unet)
    except UsageError as error:
        found.append(f"setting 'unet': {error.reason}. {error.fix}")
    return found


def factory_key(settings: FactorySettings, task: Task, ctx: Context) -> dict[str, Json]:
    """What names a generator's work besides its data: settings of other kinds do not."""
    _, own = _KINDS[settings.factory]
    recipe = {field.name: getattr(settings, field.name) for field in fields(own)}
    key: dict[str, Json] = {
        "factory": settings.factory,
        "symmetry": settings.symmetry,
        "recipe": recipe,
        "least": settings.least,
        "task": asdict(task),
        "seed": ctx.plan.seed,
    }
    if ctx.device.type != "cpu":  # another device gives other bits
        key["device"] = ctx.device.type
    return key


def enough(shard: Shard, settings: FactorySettings, classes: int) -> list[int]:
    """Classes that the client has enough different images of; copies and near-copies of one image are one image."""
    counts = torch.bincount(shard.train.labels, minlength=classes).tolist()
    held = [label for label, count in enumerate(counts) if count >= settings.least]
    return [label for label in held if len(different_images(shard, label)) >= settings.least]


def different_images(shard: Shard, label: int) -> torch.Tensor:
    """The client's training images of a class, one of each group of copies and near-copies (`osfl.runtime.near_copies`)."""
    images = shard.train.images[shard.train.labels == label]
    return images[without_near_copies(thumbnails(to_input(images)))]


def contract_of_factories(settings: FactorySettings, task: Task) -> Contract:
    """Every class may have a generator, none must."""
    lines = factory_for(settings, task).contract()
    return {
        prefix(label) + name: replace(line, required=False, group=prefix(label))  # part of a generator is none
        for label in range(len(task.classes))
        for name, line in lines.items()
    }


def train_factory(shard: Shard, label: int, settings: FactorySettings, task: Task, ctx: Context) -> Tensors:
    """The client's generator of one class, from its images of that class only."""

    images = different_images(shard, label)

    def fit() -> Payload:
        rng = ctx.generator("factory", shard.client, label)
        what = f"{shard.client} learns {task.classes[label]}"
        try:
            factory = factory_for(settings, task, ctx.device)
            kept = ctx.scratch / "factories" / f"{digest_of([key, current_precision()])}.safetensors" if ctx.scratch else None
            made = factory.fit(images, rng, lambda done, total: ctx.progress(what, done, total), kept)
            if broken := [name for name, value in made.items() if not bool(value.isfinite().all())]:  # by its very last step
                raise TrainingError(
                    f"the generator diverged: its tensor {broken[0]!r} is not finite",
                    field="factory",
                    got=settings.factory,
                    fix="Lower its rate: `--set edm_lr=...`, `vae_lr=...`.",
                )
            return Payload(made)
        except TrainingError as error:
            error.client, error.reason = shard.client, f"class {task.classes[label]!r}: {error.reason}"
            raise

    learning = replace(settings, **{name: getattr(DiffusionSettings, name) for name in SAMPLING})  # used in `sample` only
    key = {**factory_key(learning, task, ctx), "what": "factory", "client": shard.client, "data": shard.digest, "class": label}
    if len(images) < int((shard.train.labels == label).sum()):  # else a generator that was kept before is the same
        key["near-copies"] = "one image"
    return ctx.get_or_compute(key, fit).tensors


def kept_factory(shard: Shard, label: int, settings: FactorySettings, task: Task, ctx: Context) -> Tensors:
    """The same generator after the round: it is kept since the upload, where its operations were counted."""
    with measure():
        return train_factory(shard, label, settings, task, ctx)


def private_factories(shard: Shard, settings: FactorySettings, task: Task, ctx: Context) -> Payload:
    """A generator for every class that stands out of the noise, all from one set of noisy sums."""
    mixture = Mixture(settings, task.image, settings.symmetry, torch.device("cpu"))
    found, made = mixture.private(images_to_sum(shard, ctx.plan), task.classes, ctx)
    tensors = {prefix(label) + name: value for label, one in made.items() for name, value in one.items()}
    return Payload(tensors, private_facts(found, ctx.plan))


def train_factories(shard: Shard, settings: FactorySettings, task: Task, ctx: Context) -> Payload:
    """A generator for every class that the client has enough images of, learned side by side."""
    counts = torch.bincount(shard.train.labels, minlength=len(task.classes)).tolist()
    held = enough(shard, settings, len(task.classes))
    made = ctx.map(lambda label: train_factory(shard, label, settings, task, ctx), held)
    tensors = {prefix(label) + name: value for label, one in zip(held, made, strict=True) for name, value in one.items()}
    return Payload(tensors, {"class_counts": counts, "samples": len(shard.train)})


def exposed_class(tensors: Tensors, label: int, shard: Shard, settings: FactorySettings, task: Task, ctx: Context) -> Exposed:
    """What can be read out of a class' generator: what it holds, turned and mirrored as in its training, and samples."""
    factory = factory_for(settings, task, ctx.device)
    read = factory.readable(tensors)
    drawn = to_input(factory.sample(tensors, ATTACKED, ctx.generator("egress check", shard.client, label)))
    kinds = {what: rows.reshape(-1, *task.image) for what, rows in read.candidates.items()} | {"sample": drawn}
    train, held_out = (to_input(part.images[part.labels == label]) for part in (shard.train, shard.val))

    def small(images: torch.Tensor) -> torch.Tensor:
        return thumbnails(images.reshape(-1, *task.image))

    return Exposed(
        label,
        {what: small(orbit(images, settings.symmetry)) for what, images in kinds.items()},
        small(train),
        small(held_out),
        None if read.mean is None else small(read.mean),
        None if read.directions is None else small(read.directions),
    )


def thumbnails(images: torch.Tensor) -> torch.Tensor:
    """Rows of pixels (n, channels * height * width), after averaging to at most `SIDE` pixels a side."""
    height, width = images.shape[-2:]
    if len(images) and max(height, width) > SIDE:
        images = functional.interpolate(images, (min(height, SIDE), min(width, SIDE)), mode="area")
    return images.flatten(1)


def sample_cell(cell: Cell, count: int, settings: FactorySettings, task: Task, ctx: Context) -> torch.Tensor:
    """`count` images of one cell, uint8. The seed is the cell's own, so no other cell has a say in them.

    Kept once they are made: a killed run does not sample again.
    """

    tensors = cell.tensors  # read once
    key = cell_key(cell, tensors, count, settings, task, ctx)
    try:
        return ctx.get_or_compute(key, lambda: sampled(cell, tensors, count, settings, task, ctx)).tensors["images"]
    except OSError as error:
        raise FilesError(
            f"images of class {task.classes[cell.label]!r} by {cell.client!r} could not be kept: {error.strerror}",
            field="path",
            got=error.filename,
            fix="Free some disk space and run the same command again: finished cells are not repeated.",
        ) from error


def cell_key(cell: Cell, tensors: Tensors, count: int, settings: FactorySettings, task: Task, ctx: Context) -> dict[str, Json]:
    """What names the images of a cell completely."""
    return {
        **factory_key(settings, task, ctx),
        "what": "sample",
        "cell": list(cell.place),
        "count": count,
        "tensors": payload_digest(Payload(tensors)),
    }


def sampled(cell: Cell, tensors: Tensors, count: int, settings: FactorySettings, task: Task, ctx: Context) -> Payload:
    with working_on(cell.client):
        factory = factory_for(settings, task, ctx.device)
        return Payload({"images": factory.sample(tensors, count, ctx.generator("sample", cell.label, cell.client))})
