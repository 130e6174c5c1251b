"""How good synthetic images are, how varied, and whether they are copies: the generator figures of `results.json`.

The pool of synthetic images is compared with the clients' training images, and so is an equal number of held-out real
images: what the held-out images get is what a perfect generator could get. Distances and t-SNE look at a sample of every
class (generator_samples.py), so that the cost stays the same whatever the pool; copies are searched among all training images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from osfl.core.result import Bound, ClassOfImages, Generators
from osfl.core.types import Dataset, RunMap, Shard
from osfl.evaluation.bound import DIMENSIONS, excess_risk_bound, generative_error, label_divergence, principal_axes
from osfl.evaluation.distances import frechet, kernel_distance
from osfl.evaluation.embedding import Space, available_space
from osfl.evaluation.generator_figures import figures_of
from osfl.evaluation.generator_samples import KINDS, ByKind, Draw, collect
from osfl.evaluation.privacy.memorization import COPIES, FEW, Memorization, verdict


def judge(
    pool: Dataset,
    shards: Sequence[Shard],
    held_out: Dataset,
    classes: Sequence[str],
    *,
    draw: Draw,
    device: torch.device,
    run_map: RunMap,
    space: Space | None = None,
) -> Generators:
    """All figures about the generators behind `pool`; `draw(*labels)` gives the random numbers for samples."""
    space = space or available_space()
    found = collect(pool, shards, held_out, classes, space, draw=draw, device=device, run_map=run_map)
    verdicts = dict(zip(found, run_map(lambda kinds: _verdict(kinds, device), list(found.values())), strict=True))
    axes = _axes(found)
    errors = {name: _class_error(kinds, axes) for name, kinds in found.items()}
    rows = {name: _class_row(kinds, verdicts[name], errors[name]) for name, kinds in found.items()}
    return {
        "space": space.name,
        "frechet_name": space.frechet,
        "kernel_name": space.kernel,
        "overall": _overall(found),
        "classes": rows,
        "clients": {shard.client: _client_error(shard.client, found, axes) for shard in shards},
        "bound": _bound(rows, errors),
        "warnings": _warnings(rows),
        "figures": figures_of(found, verdicts, space, draw),
    }


# --- one class -------------------------------------------------------------------------------------------------------


def _verdict(kinds: ByKind, device: torch.device) -> Memorization:
    """A sample of synthetic and held-out images against all training images: a copy may be of any of them."""
    images = kinds["synthetic"].shown, kinds["training"].images, kinds["held_out"].shown
    return verdict(*(some.to(device) for some in images))


def _class_row(kinds: ByKind, found: Memorization, error: float | None) -> ClassOfImages:
    row = _compared({kind: kinds[kind].features for kind in KINDS}, {kind: len(kinds[kind].images) for kind in KINDS})
    known = error if error is not None and math.isfinite(error) else None
    return {
        **row,
        "nearest_ratio": found.ratio,
        "copied": found.copied,
        "copied_floor": found.floor,
        "verdict": found.verdict,
        "error": known,
    }


def _compared(features: Mapping[str, torch.Tensor], counts: Mapping[str, int]) -> ClassOfImages:
    """Synthetic and held-out features against training features, the same number of each."""
    n = min(len(rows) for rows in features.values())
    row: ClassOfImages = {
        "synthetic": counts["synthetic"],
        "training": counts["training"],
        "held_out": counts["held_out"],
        "compared": n,
        "frechet": None,
        "frechet_floor": None,
        "kernel": None,
        "kernel_floor": None,
        "nearest_ratio": None,
        "copied": None,
        "copied_floor": None,
        "verdict": "",
        "error": None,
    }
    if n < 2:
        return row
    synthetic, training, held_out = (features[kind][:n] for kind in KINDS)
    return {
        **row,
        "frechet": frechet(synthetic, training),
        "frechet_floor": frechet(held_out, training),
        "kernel": kernel_distance(synthetic, training),
        "kernel_floor": kernel_distance(held_out, training),
    }


def _overall(found: Mapping[str, ByKind]) -> ClassOfImages:
    """All classes together, each with as many images of one kind as of another: a mix of classes is not what is judged."""
    equal = {name: min(len(kinds[kind].features) for kind in KINDS) for name, kinds in found.items()}
    parts = {kind: [found[name][kind].features[:n] for name, n in equal.items() if n] for kind in KINDS}
    features = {kind: torch.cat(rows) if rows else torch.zeros(0, 1) for kind, rows in parts.items()}
    return _compared(features, {kind: sum(len(kinds[kind].images) for kinds in found.values()) for kind in KINDS})


# --- the bound -------------------------------------------------------------------------------------------------------


def _axes(found: Mapping[str, ByKind]) -> torch.Tensor:
    rows = [kinds["training"].features for kinds in found.values() if len(kinds["training"].features)]
    return principal_axes(torch.cat(rows)) if rows else torch.zeros(1, 1, dtype=torch.float64)


def _class_error(kinds: ByKind, axes: torch.Tensor) -> float | None:
    """ε of one class; infinite where clients hold it and there are no synthetic images of it."""
    if len(kinds["training"].images) and not len(kinds["synthetic"].images):
        return math.inf
    return generative_error(kinds["training"].features, kinds["synthetic"].features, axes)


def _client_error(client: str, found: Mapping[str, ByKind], axes: torch.Tensor) -> float | None:
    """ε of one client: its own images of each class against the pool's, weighted by how many it holds; None where there is
    none, or where a class that it holds has no finite one."""
    weights, errors = [], []
    for kinds in found.values():
        training = kinds["training"]
        if client in training.owners and not len(kinds["synthetic"].images):
            return None
        shown = training.sample[: len(training.features)]
        own = torch.tensor([training.owners[int(i)] == client for i in shown], dtype=torch.bool)
        error = generative_error(training.features[own], kinds["synthetic"].features, axes)
        if error == math.inf:
            return None
        if error is not None:
            weights.append(training.owners.count(client))
            errors.append(error)
    return sum(w * e for w, e in zip(weights, errors, strict=True)) / sum(weights) if weights else None


def _bound(rows: Mapping[str, ClassOfImages], errors: Mapping[str, float | None]) -> Bound:
    held = {name: row for name, row in rows.items() if row["training"]}
    infinite = [name for name in held if errors[name] == math.inf]
    known = {name: error for name in held if (error := errors[name]) is not None and math.isfinite(error)}
    total = sum(held[name]["training"] for name in known)
    weights = [held[name]["training"] / total for name in known]
    given = bool(known) and not infinite
    mean = sum(w * e for w, e in zip(weights, known.values(), strict=True)) if given else None
    return {
        "value": excess_risk_bound(weights, list(known.values())) if given else None,
        "error": mean,
        "prior_shift": label_divergence([r["training"] for r in rows.values()], [r["synthetic"] for r in rows.values()]),
        "dimensions": DIMENSIONS,
        "left_out": [name for name in held if errors[name] is None],
        "infinite": infinite,
    }


def _warnings(rows: Mapping[str, ClassOfImages]) -> list[str]:
    copied = [name for name, row in rows.items() if row["verdict"] == COPIES]
    few = [name for name, row in rows.items() if row["verdict"] == FEW and row["training"]]
    missing = [name for name, row in rows.items() if row["training"] and not row["synthetic"]]
    found = []
    if copied:
        found.append(f"Generators copy training images of {', '.join(copied)}: whoever has the generator has these images.")
    if missing:
        found.append(f"No synthetic images of {', '.join(missing)}.")
    if few := [name for name in few if name not in missing]:
        found.append(f"Too few images to say whether generators copy: {', '.join(few)}.")
    return found
