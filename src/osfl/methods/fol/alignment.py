"""Making a neighbor's model one's own: fine-tune it, prune it while it is pulled towards the own model, tune what is left.

Between the tunings the loss is CE + λ Σ_shared ‖V_l - W_l'‖² + γ_sh Σ_shared ‖V_l‖_{2,1} + γ_un Σ_unshared ‖V_l‖_{2,1}.
An optimizer step goes down the cross-entropy; both penalties follow as proximal steps (pruning.py), so that any strength is
stable and zeros are exact. Layers are shared where shapes are equal: all of them within one architecture, some or none
between two.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import torch
from torch import nn

from osfl.core.errors import TrainingError
from osfl.core.method import Context
from osfl.core.types import ClientId, Payload, Shard, Task
from osfl.ingredients.training.local import After, classifier, fit, not_positive, too_low
from osfl.methods.fol.pruning import hold, layers_of, prunable, pruned_share, pull, shrink, silence
from osfl.models.naming import named
from osfl.models.norms import recalibrated_bn
from osfl.runtime.payloads import payload_digest

_TUNING = ("optimizer", "momentum", "weight_decay", "schedule", "augment", "clip")  # as in local training


@dataclass(frozen=True)
class Alignment:
    """How a neighbor's model is aligned; mixed into Settings. The paper gives none of these numbers."""

    finetune_epochs: int = 5  # plain cross-entropy on the own images
    prune_epochs: int = 5  # with both penalties
    post_epochs: int = 5  # plain again; pruned filters stay pruned
    align_lr: float = 1e-3  # learning rate of these three
    align_batch: int = 32  # images a step in these three
    attraction: float = 1e-3  # λ_p, towards the own model's weights in shared layers
    sparsity: float = 1e-4  # γ_sh of the group lasso in shared layers; 0: nothing is pruned there
    sparsity_unshared: float = 5e-4  # γ_un in layers that the own model lacks
    recalibrate_personal_bn: bool = False  # recompute BN statistics on the client's images at the end


def alignment_problems(settings: Alignment) -> list[str]:
    least = {
        "finetune_epochs": 0,
        "prune_epochs": 0,
        "post_epochs": 0,
        "align_batch": 2,
        "attraction": 0,
        "sparsity": 0,
        "sparsity_unshared": 0,
    }
    return too_low(settings, least) + not_positive(settings, "align_lr")


def shared_layers(model: nn.Module, own: nn.Module) -> dict[str, str]:
    """The model's layers that the own model has, too: of one name and shape, or else the next that is left of that shape."""
    free = {layer.name: layer.weight.shape for layer in layers_of(own)}
    layers = {layer.name: layer.weight.shape for layer in layers_of(model)}
    found = {name: name for name, shape in layers.items() if free.get(name) == shape}
    for name in found:
        del free[name]
    for name in [name for name in layers if name not in found]:
        like = next((other for other, shape in free.items() if shape == layers[name]), None)
        if like is not None:
            found[name] = like
            del free[like]
    return found


def likeness(model: nn.Module, own: nn.Module) -> float:
    """Cosine of the shared layers' weights, flattened; 0 where nothing is shared."""
    mine, theirs = {x.name: x.weight for x in layers_of(own)}, {x.name: x.weight for x in layers_of(model)}
    pairs = shared_layers(model, own).items()
    if not pairs:
        return 0.0
    a = torch.cat([theirs[name].detach().cpu().flatten().double() for name, _ in pairs])
    b = torch.cat([mine[name].detach().cpu().flatten().double() for _, name in pairs])
    return float(torch.nn.functional.cosine_similarity(a, b, dim=0))


def align(model: nn.Module, own: nn.Module, shard: Shard, settings: Any, rng: torch.Generator, device: torch.device) -> float:
    """All three stages in place; gives the share of filters that were pruned. `settings`: Training and Alignment."""

    def tune(epochs: int, after: After | None) -> None:
        if epochs:
            recipe = replace(settings, epochs=epochs, lr=settings.align_lr, batch_size=settings.align_batch)
            fit(model, shard.train, recipe, rng, device=device, after=after)

    tune(settings.finetune_epochs, None)
    tune(settings.prune_epochs, penalties(model.to(device), own.to(device), settings))
    masks = silence(model)
    layers = prunable(model)
    tune(settings.post_epochs, lambda _, lr: hold(layers, masks))
    return pruned_share(masks)


def penalties(model: nn.Module, own: nn.Module, settings: Alignment) -> After:
    """What follows each optimizer step of the middle stage: pull shared layers, then shrink all filters but the head's."""
    shared, anchors = shared_layers(model, own), {layer.name: layer.weight.detach() for layer in layers_of(own)}
    pulled = [(layer.weight, anchors[shared[layer.name]]) for layer in layers_of(model) if layer.name in shared]
    shrunk = [
        (layer.weight, settings.sparsity if layer.name in shared else settings.sparsity_unshared) for layer in prunable(model)
    ]

    def follow(_: nn.Module, lr: float) -> None:
        for weight, anchor in pulled if settings.attraction else ():
            pull(weight, anchor, lr * settings.attraction)
        for weight, gamma in shrunk:
            if gamma:
                shrink(weight, lr * gamma)

    return follow


def aligned(neighbor: ClientId, given: Payload, own: Payload, shard: Shard, settings: Any, task: Task, ctx: Context) -> Payload:
    """A neighbor's model after alignment, as `given` was; `pruned` in the facts is the share. Kept by all that names it."""
    recipe = {name: getattr(settings, name) for name in (*_TUNING, *(field.name for field in fields(Alignment)))}

    def work() -> Payload:
        model, mine = classifier(given, task), classifier(own, task)
        rng = ctx.generator("align", shard.client, *ctx.encounter)  # identical neighbors get identical scores
        try:
            pruned = align(model, mine, shard, settings, rng, ctx.device)
            model = recalibrated_bn(model, shard.train.images) if settings.recalibrate_personal_bn else model
        except TrainingError as error:
            error.client, error.field = neighbor, "align_lr"
            error.fix = f"While {shard.client} aligned it; lower align_lr, or clip gradients (`--set clip=5`)."
            raise
        return Payload(named(model, "model"), {**given.facts, "pruned": round(pruned, 6)})

    key: dict[str, object] = {
        "what": "aligned model",
        "version": 2,
        "client": shard.client,
        "data": shard.digest,
        "given": payload_digest(given),
        "own": payload_digest(own),
        "recipe": recipe,
        "seed": ctx.plan.seed,
        "task": asdict(task),
        "encounter": list(ctx.encounter),
    }
    if ctx.device.type != "cpu":
        key["device"] = ctx.device.type
    return ctx.get_or_compute(key, work)
