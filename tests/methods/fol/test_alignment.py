"""Aligning a neighbor's model: what its three stages guarantee, and what two architectures share."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from osfl.core.errors import TrainingError
from osfl.core.types import Dataset, Payload
from osfl.ingredients.training.local import After, Training, classifier, fit
from osfl.methods.fol import alignment
from osfl.methods.fol.alignment import Alignment, align, aligned, alignment_problems, likeness, penalties, shared_layers
from osfl.methods.fol.pruning import layers_of, prunable, pruned_share
from osfl.models.build import build_model
from osfl.models.inputs import to_input
from osfl.models.naming import named
from osfl.runtime.payloads import payload_digest
from tests.methods.conftest import TASK, context, shard

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Settings(Training, Alignment):
    pass


SMALL = Settings(
    architecture="cnn-w8",
    align_lr=0.05,
    finetune_epochs=1,
    prune_epochs=2,
    post_epochs=1,
    batch_size=8,
    align_batch=8,
    schedule="constant",
)


def model(seed: int, architecture: str = "cnn-w8") -> nn.Module:
    return build_model(architecture, TASK, torch.Generator().manual_seed(seed))


def rng() -> torch.Generator:
    return torch.Generator().manual_seed(9)


def test_without_penalties_pruning_is_fine_tuning() -> None:
    settings = replace(SMALL, attraction=0.0, sparsity=0.0, sparsity_unshared=0.0, finetune_epochs=0, post_epochs=0)
    one, other = model(1), model(1)
    assert align(one, model(0), shard("a"), settings, rng(), CPU) == 0.0
    fit(other, shard("a").train, replace(settings, epochs=2, lr=0.05, batch_size=8), rng())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))


def test_fine_tuning_alone_is_plain_training() -> None:
    settings = replace(SMALL, finetune_epochs=3, prune_epochs=0, post_epochs=0)
    one, other, start = model(1), model(1), model(1)
    align(one, model(0), shard("a"), settings, rng(), CPU)
    fit(other, shard("a").train, replace(settings, epochs=3, lr=0.05, batch_size=8), rng())
    assert all(torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True))
    assert not torch.equal(next(one.parameters()), next(start.parameters()))


def test_each_stage_trains_as_long_as_its_setting_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fine-tuning, then pruning with penalties, then tuning that keeps pruned filters: epochs and whether anything follows."""
    stages: list[tuple[int, float, int, bool]] = []

    def noted(network: nn.Module, data: Dataset, recipe: Training, *_: Any, after: After | None = None, **__: Any) -> None:
        stages.append((recipe.epochs, recipe.lr, recipe.batch_size, after is not None))

    monkeypatch.setattr(alignment, "fit", noted)
    align(model(1), model(0), shard("a"), replace(SMALL, finetune_epochs=2, prune_epochs=3, post_epochs=4), rng(), CPU)
    assert stages == [(2, 0.05, 8, False), (3, 0.05, 8, True), (4, 0.05, 8, True)]


def test_held_out_images_do_not_train_what_they_will_judge() -> None:
    """Whatever a client holds out: a neighbor's model is aligned to the same bytes."""
    given, own = (Payload(named(model(seed), "model"), {"architecture": "cnn-w8"}) for seed in (1, 0))
    settings, plain = replace(SMALL, recalibrate_personal_bn=True), shard("a")
    found = [
        aligned("b", given, own, replace(plain, val=held_out), settings, TASK, context(settings, "ab"))
        for held_out in (plain.val, shard("b", 12, 7).train, shard("b", 18, 8).train)
    ]
    assert payload_digest(found[0]) == payload_digest(found[1]) == payload_digest(found[2])


def test_pruned_filters_of_a_resnet_stay_silent_while_it_is_tuned() -> None:
    """Behind a residual sum a silenced filter still gets a gradient: only `hold` keeps it at zero."""
    tuned = model(1, "resnet18-w4")
    (layer,) = (layer for layer in prunable(tuned) if layer.name == "layer1.0.conv2")
    with torch.no_grad():
        layer.weight[1] = 0.0
    settings = replace(SMALL, finetune_epochs=0, prune_epochs=0, post_epochs=3)
    share = align(tuned, model(0, "resnet18-w4"), shard("a"), settings, rng(), CPU)
    silent = {layer.name: (layer.weight.flatten(1) == 0).all(1) for layer in prunable(tuned)}
    assert silent[layer.name].tolist() == [False, True, False, False] and pruned_share(silent) == pytest.approx(share)
    tensors = dict(tuned.named_parameters())
    for tensor in (tensors[f"layer1.0.{name}"] for name in ("conv2.weight", "bn2.weight", "bn2.bias")):
        assert not bool(tensor[1].any()) and bool(tensor[0].any())


def test_sparsity_prunes_and_tuning_keeps_it() -> None:
    tuned = model(1)
    share = align(tuned, model(0), shard("a"), replace(SMALL, attraction=0.0, sparsity=3.0, post_epochs=3), rng(), CPU)
    assert 0 < share < 1
    silent = [(layer, (layer.weight.flatten(1) == 0).all(1)) for layer in prunable(tuned)]
    assert sum(int(mask.sum()) for _, mask in silent) / sum(mask.numel() for _, mask in silent) == pytest.approx(share)
    assert all(bool((t[mask] == 0).all()) for layer, mask in silent for t in layer.filter_tensors())
    tuned.train()
    assert bool(torch.isfinite(tuned(torch.zeros(2, *TASK.image))).all())


def test_strong_attraction_ends_at_the_own_model() -> None:
    own, tuned = model(0), model(1)
    settings = replace(SMALL, attraction=1e9, sparsity=0.0, sparsity_unshared=0.0, post_epochs=0)
    align(tuned, own, shard("a"), settings, rng(), CPU)
    for mine, theirs in zip(layers_of(own), layers_of(tuned), strict=True):
        assert torch.allclose(mine.weight, theirs.weight, atol=1e-6)
    assert likeness(tuned, own) == pytest.approx(1.0)


def test_one_architecture_shares_all_layers_by_name() -> None:
    names = [layer.name for layer in layers_of(model(0))]
    assert shared_layers(model(0), model(1)) == dict(zip(names, names, strict=True))


def test_two_architectures_share_layers_of_equal_shape_each_once() -> None:
    wide, own = model(0, "resnet18-w8"), model(1)
    shared = shared_layers(wide, own)
    assert shared["conv1"] == "stages.0.conv"  # 8 filters of 1 x 3 x 3
    assert len(set(shared.values())) == len(shared) < len(layers_of(wide))
    assert shared_layers(model(0, "vit-p4-w16-d1-h2"), own) == {}
    assert likeness(model(0, "vit-p4-w16-d1-h2"), own) == 0.0


def test_layers_that_the_own_model_lacks_feel_only_their_own_sparsity() -> None:
    wide, own = model(0, "resnet18-w8"), model(1)
    before = {layer.name: layer.weight.detach().clone() for layer in layers_of(wide)}
    shared = shared_layers(wide, own)
    penalties(wide, own, replace(SMALL, attraction=0.0, sparsity=0.0, sparsity_unshared=2.0))(wide, 0.1)
    for layer in prunable(wide):
        norms = torch.linalg.vector_norm(layer.weight.flatten(1), dim=1)
        first = torch.linalg.vector_norm(before[layer.name].flatten(1), dim=1)
        expected = first if layer.name in shared else (first - 0.2).clamp_min(0)
        assert torch.allclose(norms, expected, atol=1e-5)
    assert torch.equal(layers_of(wide)[-1].weight, before[layers_of(wide)[-1].name])


def test_a_model_that_diverges_is_refused_with_its_sender() -> None:
    given, own = (Payload(named(model(seed), "model"), {"architecture": "cnn-w8"}) for seed in (1, 0))
    settings = replace(SMALL, align_lr=1e25)
    with pytest.raises(TrainingError) as caught:
        aligned("b", given, own, shard("a"), settings, TASK, context(settings, "ab"))
    assert (caught.value.client, caught.value.field) == ("b", "align_lr") and "a aligned it" in str(caught.value)


def test_recalibrated_statistics_are_those_of_the_own_images() -> None:
    """The first norm sees what the first convolution says about all own images, not what it said some steps ago."""
    given, own = (Payload(named(model(seed), "model"), {"architecture": "cnn-w8"}) for seed in (1, 0))
    settings = replace(SMALL, recalibrate_personal_bn=True)
    tuned = classifier(aligned("b", given, own, shard("a"), settings, TASK, context(settings, "ab")), TASK)
    with torch.no_grad():
        output = tuned.stages[0].conv(to_input(shard("a").train.images))  # type: ignore[index,union-attr]
    assert torch.allclose(tuned.stages[0].bn.running_mean, output.mean((0, 2, 3)), atol=1e-5)  # type: ignore[index,union-attr]


def test_bad_settings_are_named() -> None:
    wrong = replace(SMALL, prune_epochs=-1, align_batch=1, sparsity=-0.1, align_lr=0.0)
    assert [p.split("'")[1] for p in alignment_problems(wrong)] == ["prune_epochs", "align_batch", "sparsity", "align_lr"]


def test_identical_neighbors_are_aligned_alike() -> None:
    """With several batches an epoch, so that their order matters."""
    given, own = (Payload(named(model(seed), "model"), {"architecture": "cnn-w8"}) for seed in (1, 0))
    one, other = (aligned(name, given, own, shard("a"), SMALL, TASK, context(SMALL, "abc")) for name in "bc")
    assert len(shard("a").train) > SMALL.align_batch
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors) and one.facts == other.facts


def test_layers_of_one_name_are_shared_before_others_of_that_shape() -> None:
    class Net(nn.Module):
        def __init__(self, *names: str) -> None:
            super().__init__()
            for name in names:
                self.add_module(name, nn.Conv2d(4, 4, 3))
            self.head = nn.Linear(4, 2)

    pairs = shared_layers(Net("early", "same"), Net("same", "late"))
    assert pairs == {"same": "same", "early": "late", "head": "head"}


def test_a_step_pulls_by_twice_its_rate_times_the_attraction() -> None:
    own, tuned = model(0), model(1)
    before = [layer.weight.detach().clone() for layer in layers_of(tuned)]
    penalties(tuned, own, replace(SMALL, attraction=2.0, sparsity=0.0, sparsity_unshared=0.0))(tuned, 0.1)
    for first, mine, theirs in zip(before, layers_of(own), layers_of(tuned), strict=True):
        assert torch.allclose(theirs.weight, (first + 0.4 * mine.weight) / 1.4, atol=1e-6)


def test_a_kept_model_answers_only_for_the_same_models_images_and_settings() -> None:
    given, own = (Payload(named(model(seed), "model"), {"architecture": "cnn-w8"}) for seed in (1, 0))
    asked: list[str] = []

    def get_or_compute(key: Any, make: Callable[[], Payload]) -> Payload:
        asked.append(repr(key))
        return given

    def ask(settings: Settings = SMALL, given: Payload = given, own: Payload = own, images: int = 0) -> None:
        ctx = replace(context(settings, "ab"), get_or_compute=get_or_compute)
        aligned("b", given, own, shard("a", seed=images), settings, TASK, ctx)

    ask()
    ask(replace(SMALL, epochs=99))  # of local training
    assert len(set(asked)) == 1
    changes: list[dict[str, Any]] = [
        {"attraction": 0.5},
        {"prune_epochs": 9},
        {"recalibrate_personal_bn": True},
        {"momentum": 0.1},
    ]
    for change in changes:
        ask(replace(SMALL, **change))
    ask(own=given)
    ask(given=own)
    ask(images=1)
    assert len(set(asked)) == len(asked) - 1
