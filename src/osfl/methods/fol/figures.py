"""Pictures of what clients learned from their neighbors, for the report (osfl.reports.figures draws them)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from osfl.core.types import ClientId, Json

_BINS = 10


def exchange_figures(notes: Mapping[ClientId, Mapping[str, Json]], own_weight: Mapping[ClientId, float]) -> dict[str, Json]:
    """`notes`: by client, what it wrote down about its candidates, their pruning and the bounds."""
    if not notes:
        return {}
    learned = [entry for entry in notes.values() if "gap" in entry]  # the others could use no upload that they received
    gaps = sorted((entry["gap"] for entry in learned), key=lambda gap: float(gap["bound"]))
    shares = [share for entry in learned for share in entry["pruned"].values()]
    figures = {
        "Weight of the own model in its client's ensemble": {
            **_histogram({"clients": list(own_weight.values())}, "weight"),
            "note": _left_out(notes),
        },
        "Theorem 1: risk of student and ensemble": {
            "kind": "lines",
            "x": list(range(1, len(gaps) + 1)),
            "x_label": "clients, by their bound",
            "y_label": "",
            "series": {
                "difference of risks": [gap["risk"] for gap in gaps],
                "total variation": [gap["variation"] for gap in gaps],
                "bound: mean √(KL/2)": [gap["bound"] for gap in gaps],
            },
            "note": "On each client's held-out images, for an answer drawn from the predicted probabilities. " + _printed(gaps),
        },
    }
    if shares:
        pruned = _histogram({"models": shares}, "share of filters")
        figures["Filters pruned of the neighbors' models"] = {**pruned, "note": _left(list(notes.values()))}
    descents = [entry["descent"] for entry in notes.values() if "descent" in entry]
    if descents:
        figures["Theorem 2: distance to the distilled optimum, last layer only"] = _descents(descents)
    return figures


def _printed(gaps: Sequence[Mapping[str, Json]]) -> str:
    """Theorem 1 as printed is far above all that is drawn."""
    bounds = [float(gap["printed"]) for gap in gaps]
    if not bounds:
        return ""
    return f"The bound as printed is {min(bounds):.3g} to {max(bounds):.3g}: it is above 1, so it cannot fail."


def _left_out(notes: Mapping[ClientId, Mapping[str, Json]]) -> str:
    """Neighbors whose models could not be used, by client that received them."""
    found = [f"{name} (at {client})" for client, entry in notes.items() for name in entry.get("left_out", ())]
    return f"Left out, because they answer with no usable numbers: {', '.join(found)}." if found else ""


def _left(notes: Sequence[Mapping[str, Json]]) -> str:
    """What the ensembles' models shrink to when their silenced filters leave."""
    sizes = [entry["bytes"] for entry in notes if "bytes" in entry]
    whole, kept = (sum(int(size[name]) for size in sizes) for name in ("whole", "kept"))
    return f"Without silenced filters the ensembles' models have {kept / whole:.1%} of their bytes." if whole else ""


def _histogram(values: Mapping[str, Sequence[float]], label: str) -> Json:
    edges = [i / _BINS for i in range(_BINS + 1)]
    counted = {name: [0] * _BINS for name in values}
    for name, row in values.items():
        for value in row:
            counted[name][min(int(value * _BINS), _BINS - 1)] += 1
    return {"kind": "histogram", "bins": edges, "series": counted, "x_label": label, "y_label": ", ".join(values)}


def _descents(descents: Sequence[Mapping[str, Sequence[float]]]) -> Json:
    """Means over clients; each client's own pair is in its model's facts."""
    steps = range(len(descents[0]["measured"]))
    return {
        "kind": "lines",
        "x": list(steps),
        "x_label": "steps of gradient descent",
        "y_label": "share of the first distance",
        "series": {
            name: [fmean(float(d[name][t]) for d in descents) for t in steps] for name in ("measured", "promised", "printed")
        },
        "note": "Mean over clients; the promise is ((L - μ)/(L + μ))^t for each client's own L and μ; the theorem as printed "
        "leaves (1 - (μ/L)³)^(t/2) with its best step.",
    }
