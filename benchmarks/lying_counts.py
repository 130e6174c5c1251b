"""What one site that lies about its number of images does to a round, with the plan's cap of claimed weights and without it.

    python -m benchmarks.bench lying_counts       # some minutes on one core

Digits (in the package), five sites, every site trains as it should. Then the last one claims as many images of every class as
the gate lets through, and either sends what it learned (`claims`) or also calls every class by the name of the next
(`claims and swaps`). `share` 1 is the software before the cap, with the claim that its gate let through; 0.4 is the default.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from osfl.core.method import Context
from osfl.core.registry import load
from osfl.core.types import Limits, Payload, Upload
from osfl.evaluation.scores import metrics, probabilities
from osfl.runtime.machine import Machine
from osfl.runtime.workers import Workers, compute_threads
from osfl.simulate.simulation import Federation, Simulation, prepare

CASES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "ensemble by class counts": ("ensemble", {"ensemble": "class_count"}),
    "ensemble by odds": ("ensemble", {"ensemble": "odds"}),
    "FedAvg": ("fedavg", {}),
    "FederatedFactory": ("federated_factory", {}),
    "FedMITR": ("fedmitr", {"architecture": "vit", "augment": "none", "pretrained": "vit_signs"}),
}
SLOW = ("FederatedFactory", "FedMITR")  # one partition and seed
PARTITIONS = ("iid", "dirichlet:0.5", "dirichlet:0.1")
BEFORE = Limits(share=1.0, samples=10**9)  # images that the gate let a site claim before the plan bounded them
PLANS = {"share 1": BEFORE, "share 0.5": Limits(share=0.5), "share 0.4": Limits()}


def run(cases: Sequence[str] = tuple(CASES)) -> dict[str, Any]:
    """Accuracy by case and partition, one row a seed."""
    found = {}
    for case in cases:
        partitions, seeds = (("dirichlet:0.5",), (0,)) if case in SLOW else (PARTITIONS, (0, 1, 2))
        found[case] = {p: [_case(*CASES[case], p, seed) for seed in seeds] for p in partitions}
    return {"data": "digits, 5 sites, test images", "preset": "cpu", "accuracy": found}


def _case(method: str, changes: Mapping[str, Any], partition: str, seed: int) -> dict[str, float]:
    federation = prepare(Simulation(method, "digits", 5, partition, "cpu", seed, changes))
    instance = load(method)(federation.plan.task, federation.plan.settings)
    with compute_threads(1):
        ctx = _context(federation, Limits())
        sent = {shard.client: instance.client_phase(shard, ctx) for shard in federation.shards}
        rows = {}
        for name, limits in PLANS.items():
            ctx, liar = _context(federation, limits), max(sent)
            claims = claiming(sent[liar], limits.samples, len(federation.plan.task.classes))
            for what, payload in (("honest", sent[liar]), ("claims", claims), ("claims and swaps", swapped(claims))):
                uploads = [Upload(c, "", payload if c == liar else sent[c]) for c in sorted(sent)]
                rows[f"{what}, {name}"] = _accuracy(instance, uploads, federation, ctx)
    print(method, partition, seed, rows, file=sys.stderr, flush=True)
    return rows


def _context(federation: Federation, limits: Limits) -> Context:
    return Context(replace(federation.plan, limits=limits), torch.device(Machine().device), map=Workers(1).map)


def claiming(payload: Payload, images: int, classes: int) -> Payload:
    """The same upload with a claim of so many images, as many of each class."""
    facts = {**payload.facts, "samples": images}
    if "class_counts" in facts:
        facts["class_counts"] = [images // classes] * classes
    return Payload(payload.tensors, facts)


def swapped(payload: Payload) -> Payload:
    """A classifier that calls every class by the name of the next, or generators under such names."""
    classes = len(payload.facts.get("class_counts", [0] * 10))
    if any(name.startswith("class-") for name in payload.tensors):
        moved = {}
        for name, value in payload.tensors.items():
            label, _, rest = name.removeprefix("class-").partition("/")
            moved[f"class-{(int(label) + 1) % classes}/{rest}"] = value
        return Payload(moved, payload.facts)
    last = {name: value.roll(1, 0) for name, value in list(payload.tensors.items())[-2:] if value.shape[0] == classes}
    assert len(last) == 2, list(payload.tensors)[-3:]
    return Payload({**payload.tensors, **last}, payload.facts)


def _accuracy(instance: Any, uploads: Sequence[Upload], federation: Federation, ctx: Context) -> float:
    model = instance.build(instance.server_phase(uploads, ctx).shared)
    answers = probabilities(model, federation.test.images, ctx.device, ctx.map)
    return round(float(metrics(answers, federation.test.labels.numpy())["accuracy"] or 0.0), 3)


if __name__ == "__main__":
    print(json.dumps(run(sys.argv[1:] or tuple(CASES)), indent=1))
