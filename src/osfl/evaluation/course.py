"""Accuracy of intermediate models: over server epochs, or over the rounds of a multi-round reference.

From these curves follows what the accuracy of a one-shot method would have cost in many rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from osfl.core.result import Course, Result
from osfl.core.types import Dataset, Json, RunMap
from osfl.evaluation.gains import same_shards
from osfl.evaluation.scores import probabilities


def course_of(models: Mapping[int, nn.Module], unit: str, test: Dataset, *, device: torch.device, run_map: RunMap) -> Course:
    """Accuracy of each model on the test images; multi-label, where it would say little, none."""
    labels = test.labels.numpy()
    if labels.ndim == 2:
        return {"unit": unit, "at": [], "accuracy": []}
    found = [
        float((probabilities(model, test.images, device, run_map).argmax(1) == labels).mean()) for model in models.values()
    ]
    return {"unit": unit, "at": list(models), "accuracy": found}


def mean_courses(groups: Mapping[str, Sequence[Result]]) -> dict[str, Course]:
    """By method the mean curve over its seeds, where all seeds were looked at in the same places."""
    found: dict[str, Course] = {}
    for name, group in groups.items():
        curves = [result["course"] for result in group if "course" in result]
        if curves and all(curve["at"] == curves[0]["at"] for curve in curves):
            rows = zip(*(curve["accuracy"] for curve in curves), strict=True)
            found[name] = {**curves[0], "accuracy": [sum(row) / len(row) for row in rows]}
    return found


def equal_accuracy(groups: Mapping[str, Sequence[Result]]) -> list[dict[str, Json]]:
    """What each one-shot method's accuracy costs by many rounds: for each pair of methods, over the seeds that both have.

    A reference has reached it at the first round that was scored and is at least as good; nothing is interpolated.
    """
    one_shot = {name: group for name, group in groups.items() if _messages(group) == 1}
    many = {name: group for name, group in groups.items() if _messages(group) > 1 and any("course" in r for r in group)}
    rows = []
    for name, group in one_shot.items():
        for other, runs in many.items():
            pairs = [(a, b) for a in group for b in runs if "course" in b and same_shards(a, b)]
            if pairs:
                rows.append({"method": name, "reference": other, **_compared(pairs)})
    return rows


def _messages(group: Sequence[Result]) -> int:
    return max(result["costs"]["messages_per_client"] for result in group)


def _compared(pairs: Sequence[tuple[Result, Result]]) -> dict[str, object]:
    """Means over seeds; rounds and bytes of the reference only where every seed reached the accuracy."""
    rounds = [_reached(one["scores"]["global"]["accuracy"], other["course"]) for one, other in pairs]
    needed = [value for value in rounds if value is not None]
    each = [_bytes(other) / other["costs"]["messages_per_client"] for _, other in pairs]
    own = _mean([_bytes(one) for one, _ in pairs])
    whole = len(needed) == len(rounds)
    cost = _mean([count * share for count, share in zip(needed, each, strict=True)]) if whole else None
    return {
        "other_network": any(_network(one) != _network(other) for one, other in pairs),  # then bytes are no fair comparison
        "accuracy": _mean([one["scores"]["global"]["accuracy"] for one, _ in pairs]),
        "best": _mean([max(other["course"]["accuracy"]) for _, other in pairs]),  # of the reference
        "bytes": own,  # up and down, all clients
        "rounds": _mean(needed) if whole else None,  # of the reference until it is as good; None: not within its rounds
        "of_rounds": pairs[0][1]["costs"]["messages_per_client"],
        "reference_bytes": cost,
        "ratio": cost / own if cost is not None and own else None,
        "reached": len(needed),
        "n": len(pairs),
    }


def _reached(accuracy: float, course: Course) -> int | None:
    return next((at for at, value in zip(course["at"], course["accuracy"], strict=True) if value >= accuracy), None)


def _network(result: Result) -> object:
    return result["settings"].get("architecture")


def _bytes(result: Result) -> float:
    return float(result["costs"]["upload_bytes"] + result["costs"]["download_bytes"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
