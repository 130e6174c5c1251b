"""Who gains by taking part, and who loses: each client's accuracy on its own distribution over training alone."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from osfl.result import Gains, Result

ALONE = "local_only"  # what a client has without anybody else


def gains_over(result: Result, alone: Result) -> Gains:
    """Differences client by client, on the same shards and test images."""
    own, before = (run["scores"]["clients"]["own"]["values"] for run in (result, alone))
    values = {client: own[client] - before[client] for client in own if client in before}
    everyone, locally = (run["scores"]["clients"]["everyone"]["mean"] for run in (result, alone))
    worst = min(values, key=lambda client: (values[client], client))
    return {
        "over": alone["method"],
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
    """The same results, each with its gains where a run of `local_only` on the same shards is among them."""
    return [_with_gains(result, results) for result in results]


def _with_gains(result: Result, results: Sequence[Result]) -> Result:
    if result["method"] == ALONE:
        return result
    for alone in results:
        if alone["method"] == ALONE and same_shards(alone, result):
            return {**result, "gains": gains_over(result, alone)}
    return result


def same_shards(one: Result, other: Result) -> bool:
    """Runs that may stand beside each other: the same images at the same clients, judged by the same ones."""
    same_data = one["data"].get("evaluated_on") == other["data"].get("evaluated_on")
    return same_data and all(one[key] == other[key] for key in ("seed", "clients", "task"))  # type: ignore[literal-required]
