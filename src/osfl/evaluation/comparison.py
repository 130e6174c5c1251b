"""Several runs as one table of numbers: mean and spread over seeds, by method. Pure; drawing is done in reports."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from osfl.core.headline import constant_answer_of, headline, is_multilabel, is_smoke, judged_counts
from osfl.core.result import Result
from osfl.core.types import Json
from osfl.evaluation.course import equal_accuracy, mean_courses

SCHEMA = 1
POOLED = "centralized"

# By their place in results.json; scripts look them up under the same dotted names.
METRICS = (
    "scores.global.accuracy",
    "scores.global.balanced_accuracy",
    "scores.global.auroc",
    "scores.global.ap",
    "scores.global.f1",
    "scores.global.ece",
    "scores.global.nll",
    "scores.clients.own.mean",
    "scores.clients.own.std",
    "scores.clients.own.median",
    "gains.mean",
    "gains.median",
    "gains.worst",
    "gains.share",
    "gains.everyone",
    "scores.clients.own.worst",
    "scores.clients.everyone.mean",
    "scores.majority",
    "costs.upload_bytes",
    "costs.download_bytes",
    "costs.inference_bytes",
    "costs.messages_per_client",
    "costs.client_seconds",
    "costs.server_seconds",
    "costs.wall_seconds",
    "costs.flops",
    "costs.bytes",
    "costs.flops_per_sample",
    "generators.overall.frechet",
    "generators.overall.kernel",
    "generators.bound.error",
    "generators.bound.value",
    "tokens.overall.mmd",
    "tokens.overall.mmd_floor",
    *(
        f"reconstruction.attackers.{has}.{source}.{score}"
        for has in ("similar images", "the training images")
        for source in ("real", "real_best", "synthetic", "blind", "real_by_original", "synthetic_by_original")
        for score in ("psnr", "ssim")
    ),
)

_WORK = ("client", "server", "personalize")  # phases that make the models; judging them is nobody's cost


def summarize(
    results: Sequence[Result], *, labels: Sequence[str] = (), command: str = "", paths: Sequence[str] = (), metric: str = ""
) -> dict[str, Json]:
    """Group runs by method and take mean and sample standard deviation over seeds.

    Runs that differ in more than the seed (data, clients, preset, settings) are never averaged: each such group has a
    name of its own, the method followed by what sets it apart, unless `labels` name the groups. `metric`: what is read
    first; without it balanced accuracy on unbalanced test images, else accuracy.
    """
    names = list(labels) or group_names(results)
    groups: dict[str, list[Result]] = {}
    for name, result in zip(names, results, strict=True):
        groups.setdefault(name, []).append(result)
    places = list(paths) or [f"{result['method']}/seed{result['seed']}" for result in results]
    return {
        "schema": SCHEMA,
        "command": command,
        "data": _common_data(results),
        "smoke": [name for name, group in groups.items() if any(map(is_smoke, group))],
        **_headline(groups, metric),
        "methods": {name: {metric: over_seeds(metric, group) for metric in METRICS} for name, group in groups.items()},
        "courses": mean_courses(groups),
        "equal_accuracy": equal_accuracy(groups),
        "gaps": {name: gap for name in groups if (gap := _gap(groups[name], results)) is not None},
        "runs": [
            {"method": name, "seed": result["seed"], "path": place, **({"gains": result["gains"]} if "gains" in result else {})}
            for name, result, place in zip(names, results, places, strict=True)
        ],
    }


def _headline(groups: Mapping[str, Sequence[Result]], chosen: str) -> dict[str, Json]:
    """What to read first, why, and which methods are no better at it than always answering the most frequent class."""
    counts = [sum(column) for column in zip(*(judged_counts(r) for group in groups.values() for r in group), strict=False)]
    several = any(is_multilabel(result) for group in groups.values() for result in group)
    metric, why = headline(counts, chosen, several)
    floors = {name: _floor(metric, group) for name, group in groups.items()}
    means = {name: over_seeds(f"scores.global.{metric}", group)["mean"] for name, group in groups.items()}
    below = [name for name, mean in means.items() if mean is not None and mean <= floors[name] + 1e-9]
    floor = next(iter(floors.values())) if len({round(value, 12) for value in floors.values()}) == 1 else None
    constant = {"constant": "always the same yes and no"} if several else {}
    return {"headline": {"metric": metric, "why": why, "floor": floor, **constant}, "below": below}


def _floor(metric: str, group: Sequence[Result]) -> float:
    return statistics.fmean(constant_answer_of(result, metric) for result in group)


def over_seeds(metric: str, group: Sequence[Result]) -> dict[str, Json]:
    """One metric over the runs of a group; a value that does not exist (None) is left out and not counted."""
    return over(_value(metric, result) for result in group)


def over(found: Iterable[float | None]) -> dict[str, Json]:
    """Mean, sample standard deviation, how many, and the values themselves."""
    values = [float(value) for value in found if value is not None]
    mean = statistics.fmean(values) if values else None
    std = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": mean, "std": std if values else None, "n": len(values), "values": values}


def _gap(group: Sequence[Result], results: Sequence[Result]) -> dict[str, Json] | None:
    """How much accuracy pooling all images would gain over methods with generators, seed by seed on the same shards."""
    pooled = [result for result in results if result["method"] == POOLED]
    gaps = [
        other["scores"]["global"]["accuracy"] - result["scores"]["global"]["accuracy"]
        for result in group
        if "generators" in result
        for other in pooled
        if other["seed"] == result["seed"] and other["data"] == result["data"]
    ]
    return over(gaps) if gaps else None


def _value(metric: str, result: Mapping[str, Json]) -> float | None:
    """What results.json holds under this name, or what follows from it: all FLOPs of making, all bytes both ways."""
    costs = result["costs"]
    if metric == "costs.flops":
        return sum(phase["flops"] for name, phase in costs["phases"].items() if name in _WORK) if "phases" in costs else None
    if metric == "costs.bytes":
        return float(costs["upload_bytes"] + costs["download_bytes"])
    if metric == "costs.flops_per_sample":
        return costs["generated"]["flops"] / costs["generated"]["samples"] if "generated" in costs else None
    found: Any = result
    for key in metric.split("."):
        found = found.get(key) if isinstance(found, Mapping) else None
    return found if isinstance(found, (int, float)) else None


# --- which runs belong together --------------------------------------------------------------------------------------


def group_names(results: Sequence[Result]) -> list[str]:
    """The method, and in brackets what differs: data among all runs, preset and settings among runs of the method."""
    data = [_data_facts(result) for result in results]
    own = [{"preset": result["preset"], **result["settings"], **result.get("topology", {})} for result in results]
    names = []
    for index, result in enumerate(results):
        peers = [own[i] for i, other in enumerate(results) if other["method"] == result["method"]]
        parts = [str(data[index][key]) for key in _differing(data) if key in data[index]]
        parts += [f"{key}={own[index].get(key)}" for key in _differing(peers)]
        names.append(f"{result['method']} ({', '.join(parts)})" if parts else result["method"])
    return names


def _data_facts(result: Result) -> dict[str, Json]:
    data = result["data"]
    named = ("dataset", "partition", "samples", "test_samples", "evaluated_on")
    facts = {key: data[key] for key in named if data.get(key) is not None}
    clients = len(result["clients"])
    return {**facts, "clients": f"{clients} client{'s' if clients != 1 else ''}"}


def _differing(facts: Sequence[Mapping[str, Json]]) -> list[str]:
    keys = {key: None for fact in facts for key in fact}  # a set that keeps the order
    return [key for key in keys if any(fact.get(key) != facts[0].get(key) for fact in facts)]


def _common_data(results: Sequence[Result]) -> dict[str, Json]:
    """What all runs share; keys that differ are left out, so a reader never sees one run's value for all."""
    if not results:
        return {}
    facts = [{**result["data"], "clients": len(result["clients"])} for result in results]
    differing = _differing(facts)
    return {key: value for key, value in facts[0].items() if key not in differing}
