"""What of a result is logged: names, numbers and curves, no image, no path, no upload."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import cast

from osfl.core.result import DIGESTS, Result
from osfl.core.types import Json
from osfl.evaluation.privacy.rates import share

_ABOUT_DATA = ("partition", "train_images", "test_images", "evaluated_on")
_WHERE = ("osfl", "python", "torch", "numpy", "system", "device", "precision", "threads", "workers")
Scalar = tuple[str, float, int]  # name, value, step


def facts(result: Result) -> dict[str, str]:
    """Settings, data and digests as text. Of a path only the last name, and no command, which may hold paths."""
    data, environment = result["data"], result["environment"]
    found: dict[str, Json] = {"method": result["method"], "preset": result["preset"], "seed": result["seed"]}
    found |= {"clients": len(result["clients"]), "classes": len(result["task"]["classes"])}
    found |= {"dataset": Path(str(data.get("dataset", result["task"].get("name", "")))).name}
    found |= {key: data[key] for key in _ABOUT_DATA if data.get(key) is not None}
    found |= {f"settings.{key}": value for key, value in result["settings"].items()}
    found |= {key: result[key] for key in DIGESTS if key in result}  # type: ignore[literal-required]
    found |= {f"environment.{key}": environment[key] for key in _WHERE if key in environment}
    found |= {"code": result["code"]} if "code" in result else {}
    return {key: _text(value) for key, value in found.items()}


def _text(value: object) -> str:
    """Settings that name files (weights) keep the last name of their path."""
    if isinstance(value, str):
        return Path(value).name if "/" in value or "\\" in value else value
    return json.dumps(value, ensure_ascii=False)


def scalars(result: Result) -> list[Scalar]:
    """Scores with what is known of their spread, bytes, seconds, operations."""
    scores, costs = result["scores"], result["costs"]
    whole = cast(Mapping[str, Json], result)
    found: dict[str, Json] = {f"scores/{name}": value for name, value in scores["global"].items()}
    found |= {f"scores/{name}": value for name, value in _interval(result).items()}
    found["scores/majority"] = scores["majority"]
    for kind in ("own", "everyone", "weighed"):
        spread = whole["scores"]["clients"].get(kind, {})
        found |= {f"clients/{kind}/{key}": spread.get(key) for key in ("mean", "std", "median", "worst")}
    found |= {f"classes/{name}": value for name, value in scores["per_class"].items()}
    for key in ("upload_bytes", "download_bytes", "messages_per_client", "client_seconds", "server_seconds", "wall_seconds"):
        found[f"costs/{key}"] = whole["costs"][key]
    for phase, spent in costs["phases"].items():
        found |= {f"phases/{phase}/{key}": value for key, value in spent.items()}
    for part in ("gains", "privacy"):
        found |= {f"{part}/{key}": value for key, value in (whole.get(part) or {}).items()}
    for part in ("generators", "tokens"):
        found |= {f"{part}/{key}": value for key, value in whole.get(part, {}).get("overall", {}).items()}
    return [(name, float(value), 0) for name, value in found.items() if _is_number(value)]


def _interval(result: Result) -> dict[str, float]:
    """The exact 95 % interval of the accuracy, where one model was asked about every test image once."""
    confusion = result["scores"].get("confusion") or []
    images = round(sum(sum(row) for row in confusion))
    if result["scores"]["personalized"] or not images:
        return {}
    rate = share(round(sum(row[place] for place, row in enumerate(confusion))), images)
    return {"accuracy_low": rate["low"], "accuracy_high": rate["high"]}


def curves(result: Result) -> Iterator[Scalar]:
    """Accuracy over rounds or server epochs, and the method's own lines over whole numbers (losses over steps)."""
    course = result.get("course")
    if course is not None:
        unit = course["unit"].replace(" ", "_")
        yield from (
            (f"curves/accuracy_by_{unit}", value, at) for at, value in zip(course["at"], course["accuracy"], strict=True)
        )
    for title, figure in result.get("figures", {}).items():
        if not isinstance(figure, Mapping) or figure.get("kind") != "lines":
            continue
        if not all(float(x).is_integer() and x >= 0 for x in figure["x"]):
            continue
        for name, row in figure["series"].items():
            steps = zip(figure["x"], row, strict=False)
            yield from ((f"curves/{title}/{name}", float(value), int(x)) for x, value in steps if _is_number(value))


def comparison_scalars(comparison: Mapping[str, Json]) -> list[Scalar]:
    """Mean and sample standard deviation over seeds, by method."""
    found = []
    for method, metrics in comparison["methods"].items():
        for name, over in metrics.items():
            metric = f"{method}/{name.replace('.', '/')}"
            found += [(metric, float(over["mean"]), 0)] if _is_number(over["mean"]) else []
            found += [(f"{metric}_std", float(over["std"]), 0)] if _is_number(over["std"]) else []
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
