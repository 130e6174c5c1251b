"""Training a classifier on one client's images: the settings that methods share, the loop, and a client's local model."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Self

import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import TrainingError, UsageError
from osfl.core.method import Context
from osfl.core.names import architecture_rule
from osfl.core.types import ADDED, Dataset, Payload, Privacy, Shard, Task, settings_as_json
from osfl.ingredients.training.dp_sgd import mechanism_for, private_fit
from osfl.ingredients.training.loss import classification_loss
from osfl.models.build import Network, architecture_for, architectures_in, build_model, check_architecture
from osfl.models.flops import forward_flops, on_meta, training_flops
from osfl.models.inputs import to_input
from osfl.models.memory import training_memory
from osfl.models.naming import load_named, named
from osfl.models.norms import norms, recalibrate_bn
from osfl.models.pretrained import fit_problems, pin_problems, pixels_for, start_from
from osfl.models.weights_table import KNOWN
from osfl.runtime.devices import ahead
from osfl.runtime.memory import available, micro_batch, too_little
from osfl.runtime.meter import spend
from osfl.runtime.precision import advance, backward, descend, half

Adjust = Callable[[nn.Module], None]  # changes the gradients between backward and step
After = Callable[[nn.Module, float], None]  # changes the weights after a step with this learning rate


@dataclass(frozen=True)
class Training:
    """How a client trains; defaults are those of FedISCA's clients, which FedBiCross inherits (ResNet-18, 100 epochs)."""

    architecture: str = "resnet18"  # `osfl ls architectures`; "client-01:cnn,*:resnet18" gives clients their own
    epochs: int = 100  # passes over the client's images
    batch_size: int = 128  # images a step
    optimizer: Literal["sgd", "adam"] = "sgd"  # sgd with momentum, or adam
    lr: float = 1e-3  # learning rate
    momentum: float = 0.9  # SGD only
    weight_decay: float = 5e-4  # pulls weights towards zero; 0 = off
    schedule: Literal["steps", "cosine", "constant"] = "steps"  # steps: times 0.1 at half and three quarters
    augment: Literal["none", "flip", "flip+crop", "flip+turn"] = "none"  # mirror; crop: shift by an eighth; turn: by quarters
    clip: float = 0.0  # largest gradient norm; 0 = do not clip
    pretrained: str = field(default="", metadata=ADDED)  # weights to start from: a known name, a safetensors file, hub:name
    pretrained_sha256: str = field(default="", metadata=ADDED)  # what that file must hash to, at every site
    # table: what the weights or the architecture are published for
    pretrained_pixels: Literal["table", "symmetric", "imagenet"] = field(default="table", metadata=ADDED)  # symmetric: [-1, 1]
    recalibrate_bn: bool = field(default=False, metadata=ADDED)  # recompute BN statistics after training

    def resolved(self) -> Self:
        """The same settings, with the pixels of a file named where the table has others than [-1, 1]: the plan names them."""
        if self.pretrained_pixels != "table" or not self.pretrained or self.pretrained in KNOWN:
            return self
        try:
            names = architectures_in(self.architecture)
            found = {pixels_for(self.pretrained, "table", name) for name in names}
        except UsageError:  # named among the problems of these settings
            return self
        return replace(self, pretrained_pixels="imagenet") if found == {"imagenet"} else self


# A small network for two cores: 28 px, a few thousand images, half a minute for five clients.
CPU_TRAINING = {
    "architecture": "cnn-w16",
    "epochs": 20,
    "batch_size": 64,
    "lr": 0.05,
    "schedule": "cosine",
    "clip": 5.0,
}
SMOKE_TRAINING = {
    "architecture": "cnn-w8",
    "epochs": 1,
    "batch_size": 32,
    "lr": 0.05,
    "schedule": "cosine",
    "clip": 5.0,
}
# What a round with [privacy] begins with: gradients of single images are small, and many of them drown the noise.
PRIVATE_TRAINING: Mapping[str, object] = {"clip": 1.0, "weight_decay": 0.0, "batch_size": 256, "augment": "none"}
TRAINING_PRESETS = {"paper": {}, "cpu": CPU_TRAINING, "smoke": SMOKE_TRAINING}


def training_problems(settings: Training, task: Task, *, one: str = "") -> list[str]:
    """Settings that cannot train anything, a sentence each. `one`: why all clients must share an architecture."""
    found = too_low(settings, {"epochs": 1, "batch_size": 2, "momentum": 0, "weight_decay": 0, "clip": 0})
    if not (settings.lr > 0 and math.isfinite(settings.lr)):
        found.append(f"setting 'lr': expected a positive number, got {settings.lr}")
    if settings.augment == "flip+turn" and task.image[1] != task.image[2]:
        found.append(f"setting 'augment': only square images can be turned, these are {task.image[1]} x {task.image[2]}")
    found += pin_problems(settings.pretrained, settings.pretrained_sha256, "pretrained")
    one = one or ("one file of weights fits one architecture" if settings.pretrained else "")
    wrong = architecture_problems("architecture", settings.architecture, task, one=one)
    if not wrong:
        found += fit_problems(settings.pretrained, settings.pretrained_pixels, architectures_in(settings.architecture))
    return found + wrong


def too_low(settings: Any, least: Mapping[str, float]) -> list[str]:
    """Settings below the least that makes sense, a sentence each; what is no number is not enough either."""
    return [
        f"setting {name!r}: expected at least {bound}, got {getattr(settings, name)}"
        for name, bound in least.items()
        if not getattr(settings, name) >= bound
    ]


def not_positive(settings: Any, *names: str) -> list[str]:
    """Settings that must be above zero, and finite, and are not, a sentence each."""
    return [
        f"setting {name!r}: expected a positive number, got {getattr(settings, name)}"
        for name in names
        if not 0 < getattr(settings, name) < math.inf
    ]


def architecture_problems(setting: str, spec: str, task: Task, *, one: str = "") -> list[str]:
    """What is wrong with the architectures that a setting names, before anything is trained; `one` as above."""
    rules = [architecture_rule(part)[0] for part in spec.split(",")]
    try:
        names = architectures_in(spec)
    except UsageError as error:
        return _sentences(setting, error)
    found = []
    if one and any(rules):
        found.append(f"setting {setting!r}: {one}; expected one name such as {names[0]!r}, got {spec!r}")
    elif any(rules) and "*" not in rules:  # who takes part is not known here, only how many
        found.append(f"setting {setting!r}: {spec!r} has no rule for clients that it does not name; add ',*:{names[0]}'")
    for name in names:
        try:
            check_architecture(name, task)
        except UsageError as error:
            found += _sentences(setting, error)
    return found


def _sentences(setting: str, error: UsageError) -> list[str]:
    return [f"setting {setting!r}: {problem}{f'. {error.fix}' if error.fix else ''}" for problem in error.problems]


def fit(
    model: nn.Module,
    data: Dataset,
    settings: Training,
    rng: torch.Generator,
    *,
    device: torch.device | None = None,
    adjust: Adjust | None = None,
    after: After | None = None,
    noise: float = 0.0,
    progress: Callable[[int, int], None] | None = None,
) -> int:
    """Train in place with `classification_loss`; returns the number of steps. `rng` decides order and augmentation.

    `noise`: x + sigma N(0, 1) is shown instead of x, with sigma ~ U(0, noise) for each image.
    """
    device = device or torch.device("cpu")
    model.to(device).train()
    images, labels = data.images.to(device), data.labels.to(device)  # once: copies at each step would make a GPU wait
    part, memory, in_half = settings.batch_size + 1, available(device), half(device) is not None
    if memory:
        part, _ = training_parts(model, settings, tuple(data.images.shape[1:]), len(data), memory, in_half)
    optimizer = _optimizer(model, settings)
    steps = 0
    for epoch in range(settings.epochs):
        lr = settings.lr * decay(settings.schedule, epoch, settings.epochs)
        _set_lr(optimizer, lr)
        total = torch.zeros((), device=device)
        for index, *drawn in ahead(_steps(data, settings, noise, rng), device):
            inputs = to_input(changed(images[index], settings.augment, drawn), device)
            if noise:
                inputs = inputs + drawn[-1]
            total += _step_in_parts(model, optimizer, inputs, labels[index], part, settings.clip, adjust)
            if after is not None:
                after(model, lr)
            steps += 1
        if not math.isfinite(float(total)):  # once an epoch: asking at each step would stall a GPU
            raise TrainingError(
                "the training loss is not finite",
                field="lr",
                got=settings.lr,
                fix="Lower it (`--set lr=...`) or clip gradients (`--set clip=5`).",
            )
        if progress is not None:
            progress(epoch + 1, settings.epochs)
    spend(training_flops(model, tuple(data.images.shape[1:])) * len(data) * settings.epochs)
    model.eval()
    if settings.recalibrate_bn and norms(model):
        recalibrate_bn(model, data.images)
        spend(forward_flops(model, tuple(data.images.shape[1:])) * len(data))
    return steps


def _step_in_parts(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    inputs: torch.Tensor,
    labels: torch.Tensor,
    part: int,
    clip: float,
    adjust: Adjust | None,
) -> torch.Tensor:
    """One step on the cross-entropy of a batch, of which `part` images at once go through the network; returns the loss."""
    optimizer.zero_grad(set_to_none=True)
    total = torch.zeros((), device=inputs.device)
    for x, y in zip(torch.split(inputs, part), torch.split(labels, part), strict=True):
        loss = classification_loss(model(x), y) * (len(x) / len(inputs))
        backward(optimizer, loss)
        total += loss.detach()
    advance(optimizer, inputs.device, functools.partial(_change, model, clip, adjust))
    return total


def training_parts(
    model: nn.Module, settings: Training, image: tuple[int, ...], images: int, memory: int, in_half: bool
) -> tuple[int, int]:
    """(images that go through the network at once, bytes that training then takes) within so much memory; 0: no limit."""
    needs, batch = training_memory(model, image, half=in_half), min(settings.batch_size + 1, max(2, images))
    copies = 4 if settings.optimizer == "adam" else 3  # weights, gradients, and what the optimizer remembers
    fixed = needs.fixed(copies) + images * math.prod(image)
    part = micro_batch(batch, fixed, needs.each, memory)
    least = batch if norms(model) else 1
    if part < least:
        what = f"training {settings.architecture} on batches of {batch}"
        fix = "Raise --memory, or take another architecture."
        if least > 1:
            fix = "Batch norm needs a batch as a whole: raise --memory, or lower it (`--set batch_size=...`)."
        raise too_little(what, fixed + least * needs.each, memory, fix)
    return part, round(fixed + part * needs.each)


def training_bytes(settings: Training, task: Task, images: int, memory: int, in_half: bool) -> int:
    """Memory that a client's training takes on its device, the largest of the architectures; refused where it cannot fit."""
    built = [on_meta(build_model(name, task)) for name in architectures_in(settings.architecture)]
    return max(training_parts(model, settings, task.image, images, memory, in_half)[1] for model in built)


def step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: torch.Tensor,
    *,
    clip: float = 0.0,
    adjust: Adjust | None = None,
) -> None:
    """One optimizer step; `adjust` may correct the gradients first (FedProx, SCAFFOLD, FedDyn)."""
    descend(optimizer, loss, functools.partial(_change, model, clip, adjust))


def _change(model: nn.Module, clip: float, adjust: Adjust | None) -> None:
    if adjust is not None:
        adjust(model)
    if clip > 0:
        nn.utils.clip_grad_norm_(model.parameters(), clip)


def batches(count: int, size: int, rng: torch.Generator) -> Sequence[torch.Tensor]:
    """A random order cut into batches of at most size + 1: a last batch of one image would have no variance for BatchNorm."""
    order = torch.randperm(count, generator=rng)
    if count == 1:
        return [order.repeat(2)]
    parts = list(torch.split(order, size))
    if len(parts) > 1 and len(parts[-1]) == 1:
        parts[-2:] = [torch.cat(parts[-2:])]
    return parts


def _steps(data: Dataset, settings: Training, noise: float, rng: torch.Generator) -> Iterator[Sequence[torch.Tensor]]:
    """What each step of an epoch draws: which images, how they are changed, and the noise on them."""
    for index in batches(len(data), settings.batch_size, rng):
        shape = (len(index), *data.images.shape[1:])
        drawn = [index, *draw_changes(shape, settings.augment, rng)]
        if noise:
            drawn.append(draw_noise(shape, noise, rng))
        yield drawn


def draw_noise(shape: Sequence[int], most: float, rng: torch.Generator) -> torch.Tensor:
    """sigma N(0, 1) with sigma ~ U(0, most) for each image."""
    sigma = most * torch.rand((shape[0], 1, 1, 1), generator=rng)
    return sigma * torch.randn(tuple(shape), generator=rng)


def batches_on(device: torch.device, count: int, size: int, rng: torch.Generator) -> Iterator[torch.Tensor]:
    """The same order, on the device."""
    return (index for (index,) in ahead(((index,) for index in batches(count, size, rng)), device))


def augment(images: torch.Tensor, how: str, rng: torch.Generator) -> torch.Tensor:
    """Random mirror, and shift or quarter turns, of uint8 images (batch, channels, height, width)."""
    return changed(images, how, draw_changes(images.shape, how, rng))


def draw_changes(shape: Sequence[int], how: str, rng: torch.Generator) -> list[torch.Tensor]:
    """What is drawn to augment a batch of this shape: which images are mirrored, and by how much each is shifted or turned."""
    if how == "none":
        return []
    mirrored = torch.rand(shape[0], generator=rng) < 0.5
    if how == "flip":
        return [mirrored]
    if how == "flip+turn":
        return [mirrored, torch.randint(0, 4, (shape[0],), generator=rng)]
    return [mirrored, torch.randint(0, 2 * _reach(shape[-2]) + 1, (2, shape[0]), generator=rng)]


def changed(images: torch.Tensor, how: str, drawn: Sequence[torch.Tensor]) -> torch.Tensor:
    """The batch, augmented with what was drawn for it."""
    if how == "none":
        return images
    images = torch.where(drawn[0][:, None, None, None], images.flip(-1), images)
    if how == "flip":
        return images
    return _turned(images, drawn[1]) if how == "flip+turn" else _shifted(images, drawn[1])


def _turned(images: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
    """Each image turned by its number of quarters; its sides are equal."""
    for quarter in (1, 2, 3):
        mine = (turns == quarter)[:, None, None, None]
        images = torch.where(mine, torch.rot90(images, quarter, (-2, -1)), images)
    return images


def _reach(side: int) -> int:
    """Images move by up to an eighth of their side."""
    return max(1, side // 8)


def _shifted(images: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
    """Each image moved by its own shift (2, images), the border repeated."""
    count, channels, rows, columns = (torch.arange(size, device=images.device) for size in images.shape)
    padded = functional.pad(images.float(), (_reach(images.shape[-2]),) * 4, mode="replicate").to(images.dtype)
    down, right = shifts
    rows = (rows + down[:, None])[:, None, :, None]
    columns = (columns + right[:, None])[:, None, None, :]
    return padded[count[:, None, None, None], channels[None, :, None, None], rows, columns]


def _optimizer(model: nn.Module, settings: Training) -> torch.optim.Optimizer:
    if settings.optimizer == "adam":
        return torch.optim.Adam(model.parameters(), settings.lr, weight_decay=settings.weight_decay)
    return torch.optim.SGD(model.parameters(), settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay)


def _set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def decay(schedule: str, done: int, total: int) -> float:
    """Factor on the learning rate when `done` of `total` epochs (or rounds) are over."""
    if schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done / total))
    if schedule == "steps":
        return float(0.1 ** ((done >= total * 0.5) + (done >= total * 0.75)))
    return 1.0


def first_model(settings: Training, architecture: str, task: Task, rng: torch.Generator) -> Network:
    """A model before it learns: every weight drawn from `rng`, or all but the head taken from a file."""
    model = build_model(architecture, task, rng)
    if settings.pretrained:
        pixels = pixels_for(settings.pretrained, settings.pretrained_pixels, architecture)
        start_from(model, settings.pretrained, settings.pretrained_sha256, pixels)
    return model


def local_model(shard: Shard, task: Task, settings: Training, ctx: Context) -> Payload:
    """The client's own classifier, trained from the start that all clients of an architecture share (`first_model`).

    Named completely by data, settings and seed, so that `compare` trains it once for all methods that upload it.
    """
    shared, everything = {f.name for f in fields(Training)}, settings_as_json(settings)
    recipe = {name: value for name, value in everything.items() if name in shared}
    architecture = recipe["architecture"] = architecture_for(settings.architecture, shard.client)

    def train() -> Payload:
        model = first_model(settings, architecture, task, ctx.generator("init", architecture))
        privacy = ctx.plan.privacy
        try:
            if privacy is not None:
                return _private_model(model, shard, settings, privacy, architecture, ctx)
            fit(
                model,
                shard.train,
                settings,
                ctx.generator("local", shard.client),
                device=ctx.device,
                progress=lambda done, total: ctx.progress(f"{shard.client} trains", done, total),
            )
        except TrainingError as error:
            error.client = shard.client
            raise
        return Payload(named(model, "model"), {"architecture": architecture, "samples": len(shard.train)})

    key: dict[str, object] = {
        "what": "local model",
        "client": shard.client,
        "data": shard.digest,
        "recipe": recipe,
        "seed": ctx.plan.seed,
        "task": task.as_json(),
    }
    if ctx.device.type != "cpu":  # another device gives other bits
        key["device"] = ctx.device.type
    if ctx.plan.privacy is not None:  # noise is drawn once in a round: drawn again, it would average out
        key["private"] = ctx.plan.digest
    return ctx.get_or_compute(key, train)


def _private_model(
    model: nn.Module, shard: Shard, settings: Training, privacy: Privacy, architecture: str, ctx: Context
) -> Payload:
    """The same with noise, of the site's training images; they alone are looked at."""
    optimizer, count = _optimizer(model, settings), len(shard.train)
    mechanism = mechanism_for(privacy, count, settings.batch_size, settings.epochs)
    private_fit(
        model,
        shard.train,
        settings,
        mechanism,
        optimizer,
        lambda lr: _set_lr(optimizer, lr),
        decay,
        device=ctx.device,
        progress=lambda done, total: ctx.progress(f"{shard.client} trains", done, total),
    )
    facts = {"architecture": architecture, "samples": count, "mechanism": mechanism.as_json()}
    return Payload(named(model, "model"), facts)


def classifier(payload: Payload, task: Task, prefix: str = "model") -> nn.Module:
    """The other way round: a payload's named tensors as a network in evaluation mode."""
    model = build_model(str(payload.facts["architecture"]), task)
    load_named(model, payload.tensors, prefix)
    return model.eval()
