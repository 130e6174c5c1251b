"""Several encounters as one result: the scores of the last, the costs of all, and how scores grew from one to the next."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from osfl.core.result import Costs, Encounter, Result
from osfl.core.types import Json

_OF_THE_LAST = ("inference_bytes",)  # paid once, when the last models answer


def after_encounters(result: Result, before: Sequence[Result]) -> Result:
    """The result of the last encounter, with those before it."""
    rounds = [*before, result]
    rows = [_row(number, one) for number, one in enumerate(rounds, 1)]
    return {**result, "costs": _added([one["costs"] for one in rounds]), "encounters": rows}


def _row(number: int, result: Result) -> Encounter:
    return {
        "encounter": number,
        "plan_digest": result["plan_digest"],
        "release_digest": result["release_digest"],
        "models_digest": result["models_digest"],
        "accuracy": result["scores"]["global"]["accuracy"],
        "own": result["scores"]["clients"]["own"],
        "everyone": result["scores"]["clients"]["everyone"],
        "upload_bytes": result["costs"]["upload_bytes"],
        "download_bytes": result["costs"]["download_bytes"],
    }


def _added(costs: Sequence[Costs]) -> Costs:
    whole: Any = _sum([{key: value for key, value in one.items() if key not in _OF_THE_LAST} for one in costs])
    whole |= {key: value for key, value in costs[-1].items() if key in _OF_THE_LAST}
    return cast("Costs", whole)


def _sum(tables: Sequence[Mapping[str, Json]]) -> dict[str, Json]:
    """Numbers by name, added up; the high-water mark of memory is that of the highest."""
    found: dict[str, Json] = {}
    for key in dict.fromkeys(key for table in tables for key in table):
        values = [table[key] for table in tables if key in table]
        if isinstance(values[0], Mapping):
            found[key] = _sum(values)
        else:
            found[key] = max(values) if key == "peak_bytes" else sum(values)
    return found
