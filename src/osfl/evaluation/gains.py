"""Gain of each client: its accuracy on its own distribution over that of local training."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from osfl.core.result import Gains, Result

LOCAL_ONLY = "local_only"  # what a client reaches by itself
_STARTS = ("pretrained", "pretrained_sha256", "pretrained_pixels")  # settings that exist only where they are used
_DATA = ("dataset", "digest", "partition", "samples", "test_samples", "evaluated_on", "groups")


def gains_over(result: Result, local: Result) -> Gains:
    """Differences client by client, on the same shards and test images."""
    own, before = (run["scores"]["clients"]["own"]["values"] for run in (result, local))
    values = {client: own[client] - before[client] for client in own if client in before}
    everyone, locally = (run["scores"]["clients"]["everyone"]["mean"] for run in (result, local))
    worst = min(values, key=lambda client: (values[client], client))
    differs = training_differs(result, local)
    return {
        "over": f"{local['method']}, trained otherwise ({', '.join(differs)})" if differs else local["method"],
        "mean": statistics.fmean(values.values()),
        "median": statistics.median(values.values()),
        "worst": values[worst],
        "worst_client": worst,
        "share": sum(gain > 0 for gain in values.values()) / len(values),
        "share_that_loses": sum(gain < 0 for gain in values.values()) / len(values),
        "everyone": everyone - locally,
        "values": values,
    }


def with_gains(results: Sequence[Result]) -> list[Result]:
    """The same results, each with its gains where a run of `local_only` on the same shards is among them.

    Of several such runs it is the one whose clients train most like those of the result; the first of equals.
    """
    return [_with_gains(result, results) for result in results]


def _with_gains(result: Result, results: Sequence[Result]) -> Result:
    if result["method"] == LOCAL_ONLY:
        return result
    found = [other for other in results if other["method"] == LOCAL_ONLY and same_shards(other, result)]
    if not found:
        return result
    return {**result, "gains": gains_over(result, min(found, key=lambda local: len(training_differs(result, local))))}


def training_differs(result: Result, local: Result) -> list[str]:
    """Settings of training that both have, and not alike."""
    one, other = result["settings"], local["settings"]
    return sorted(name for name in {*(one.keys() & other.keys()), *_STARTS} if one.get(name) != other.get(name))


def same_shards(one: Result, other: Result) -> bool:
    """Runs that may stand beside each other: the same images at the same clients, judged by the same ones."""
    same_data = all(one["data"].get(key) == other["data"].get(key) for key in _DATA)
    return same_data and all(one.get(key) == other.get(key) for key in ("seed", "clients", "task"))
