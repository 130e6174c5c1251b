"""How sites of OneSum choose their share of the network (`blend=auto`): the rule, and others that could be, in five cells.

    python -m benchmarks.blend_choice            resumable: the record keeps every cell and seed that is finished
    python -m benchmarks.blend_choice CELL       one cell

Each site's own network, its choice among lambda, tau and beta, and what every choice reaches: on held-out images, each judged
by what the site's other held-out images choose, and on test images by the site's shares of the classes. A rule may be preferred
by the first figure alone.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.grid import CELLS, SEEDS
from osfl.core.method import Context
from osfl.core.result import write_json
from osfl.core.types import Dataset, Payload, Shard, Upload
from osfl.evaluation.scores import own_accuracy, per_class_accuracy
from osfl.ingredients.ensembles.ensemble import fast_logits
from osfl.ingredients.statistics.site_prior import corrected_prior, site_log_prior
from osfl.ingredients.training.local import classifier, local_model
from osfl.methods.onesum import OneSum
from osfl.methods.onesum.head import Classifier, Head, head_of
from osfl.methods.onesum.personal import BLENDS, FACTORS, MOST, SOFTNESS, STEP, Choice, default_choice, mixed, offered, steps
from osfl.runtime.workers import compute_threads
from osfl.simulate.simulation import Federation, for_methods, prepare

RECORD = Path(__file__).parent / "records" / "blend_choice.json"
WANTED = ("cifar-meet-n30-a0.1", "skin-meet-n30-a0.1", "blood-meet-n70-a0.1", "skin-n5-a0.1", "factory-cifar-n5-a0.1")
GRID = [Choice(*one) for one in product(FACTORS, SOFTNESS, BLENDS)]
ALONE = Choice(1.0, 1.0, 0.0)
LEAST = -20.0  # as in `choose`
Rule = Callable[[torch.Tensor, float], Choice]  # log-likelihoods (choices, images), the release's lambda


def from_start(start: Callable[[float], Choice]) -> Rule:
    """The most likely choice, where each step away from the start has to gain `STEP` nats."""

    def rule(likelihood: torch.Tensor, shrinkage: float) -> Choice:
        away = torch.tensor([steps(one, start(shrinkage)) for one in GRID], dtype=torch.float64)
        order = sorted(range(len(GRID)), key=lambda at: float(away[at]))
        cost = STEP * away - likelihood.sum(1)
        return GRID[min(order, key=lambda at: float(cost[at]))]

    return rule


def one_standard_error(likelihood: torch.Tensor, shrinkage: float) -> Choice:
    """Lambda and tau of the default; the least share of the network that is no standard error behind the best."""
    start = default_choice(True, shrinkage)
    rows = [likelihood[GRID.index(replace(start, blend=blend))] for blend in BLENDS]
    best = max(rows, key=lambda row: float(row.sum()))
    if len(best) < 2:
        return replace(start, blend=0.0)
    for blend, row in zip(BLENDS, rows, strict=True):
        behind = best - row
        if float(behind.mean()) <= float(behind.std() / len(behind) ** 0.5):
            return replace(start, blend=blend)
    return start


RULES: Mapping[str, Rule] = {
    "auto, as it is": from_start(lambda shrinkage: default_choice(True, shrinkage)),
    "from the prior alone": from_start(lambda shrinkage: ALONE),
    "from the prior alone where lambda is large": from_start(
        lambda shrinkage: ALONE if 3 * shrinkage > MOST else default_choice(True, shrinkage)
    ),
    "one standard error": one_standard_error,
    "prior alone": lambda likelihood, shrinkage: ALONE,
}


def measured(cell: str, seed: int) -> dict[str, Any]:
    """One seed of a cell: own accuracy in percent by rule, and how often each choice was made as it is."""
    (simulation,) = for_methods(replace(CELLS[cell], topology=None), ["onesum@prior=site"])
    federation = prepare(replace(simulation, seed=seed))
    method, ctx = OneSum(federation.plan.task, federation.plan.settings), Context(federation.plan, torch.device("cpu"))
    sent = [Upload(s.client, federation.plan.digest, method.client_phase(s, ctx)) for s in federation.shards]
    release = method.server_phase(sent, ctx).shared
    features = method.encode(federation.test.images, ctx)
    sites = [_site(method, release, shard, federation, features, ctx) for shard in federation.shards]
    learned = [one for one in sites if one is not None]
    shrinkage, rules = float(release.facts["shrinkage"]), dict[str, Any]()
    for name, rule in RULES.items():
        chosen = [rule(likelihood, shrinkage) for likelihood, _, _ in learned]
        right = sum(_held_out(one[0], one[1], rule, shrinkage) for one in learned)
        own = [float(reached[GRID.index(choice)]) for choice, (_, _, reached) in zip(chosen, learned, strict=True)]
        rules[name] = {
            "held_out": round(100 * right / sum(one[1].shape[1] for one in learned), 2),
            "test": round(100 * sum(own) / len(own), 2),
            "of_sites_without_a_network": sum(choice.blend == 0 for choice in chosen),
        }
    return {
        "lambda": round(shrinkage, 4),
        "sites_with_a_network": len(learned),
        "held_out_images": sum(one[1].shape[1] for one in learned),
        "rules": rules,
    }


def _site(
    method: OneSum, release: Payload, shard: Shard, federation: Federation, features: torch.Tensor, ctx: Context
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Of every choice: the log-likelihood of each held-out image and whether it is answered right, (choices, images), and own
    accuracy on test images, (choices,). None for a site that trains no network or holds nothing out."""
    if len(set(shard.train.labels.tolist())) < 2 or not len(shard.val):
        return None
    head, classes = head_of(release.tensors), len(method.task.classes)
    network = classifier(local_model(shard, method.task, method.settings, ctx), method.task)
    prior, heads = corrected_prior(site_log_prior(shard.train.labels, classes), head.prior), offered(release.tensors, head)
    held_out = _answers(heads, method.encode(shard.val.images, ctx), shard.val, network, prior, method.settings.temperature)
    on_test = _answers(heads, features, federation.test, network, prior, method.settings.temperature)
    labels, truth, counts = shard.val.labels, federation.test.labels.numpy(), federation.counts[shard.client]
    likelihood = torch.stack([one.gather(1, labels[:, None])[:, 0].clamp_min(LEAST) for one in held_out])
    reached = [own_accuracy(per_class_accuracy(one.argmax(1).numpy(), truth, classes), counts) for one in on_test]
    right = torch.stack([one.argmax(1) == labels for one in held_out])
    return likelihood, right, torch.tensor(reached, dtype=torch.float64)


def _answers(
    heads: Mapping[float, Head],
    features: torch.Tensor,
    data: Dataset,
    network: torch.nn.Module,
    prior: torch.Tensor,
    temperature: float,
) -> list[torch.Tensor]:
    """Log-probabilities (images, classes) of every choice."""
    own = fast_logits([network], data.images)[0].double().log_softmax(1)
    plain = {f: replace(one, prior=torch.zeros_like(prior), temperature=torch.ones(1)) for f, one in heads.items()}
    scores = {factor: temperature * Classifier(one)(features).double() for factor, one in plain.items()}
    return [mixed((c.softness * scores[c.factor] + prior).log_softmax(1), own, c.blend) for c in GRID]


def _held_out(likelihood: torch.Tensor, right: torch.Tensor, rule: Rule, shrinkage: float) -> int:
    """How many held-out images are right, each answered as the others choose."""
    images = right.shape[1]
    kept = [[i for i in range(images) if i != image] for image in range(images)]
    return sum(bool(right[GRID.index(rule(likelihood[:, others], shrinkage)), i]) for i, others in enumerate(kept))


def main(names: Sequence[str]) -> None:
    made: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"cells": {}}
    for cell, seed in product(names or WANTED, SEEDS):
        found = made["cells"].setdefault(cell, {})
        if f"seed{seed}" in found:
            continue
        with compute_threads(1):
            found[f"seed{seed}"] = measured(cell, seed)
        made |= {"command": "python -m benchmarks.blend_choice", "date": time.strftime("%Y-%m-%d", time.gmtime())}
        write_json(RECORD, made)
        print(time.strftime("%H:%M:%S"), cell, seed, json.dumps(found[f"seed{seed}"]["rules"]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
