"""Accuracy over epsilon for six methods on a medical cell, and beside each epsilon what a membership attack still finds.

    python -m benchmarks.bench privacy_curve     what the record has is not made again
    python -m benchmarks.privacy_curve sums      accuracy of these groups alone, first seed, no attack: a minute; the rest stays
                                                 to be made
    python -m benchmarks.privacy_curve           the figure alone, from the record

Blood cells, five sites, Dirichlet 0.5. FedAvg, the ensemble and FedBiCross get the same uploads: models trained with DP-SGD at
the sites (at inf: in the same way without noise). OneSum, FALCON and FederatedFactory's mixtures send what follows from sums
with Gaussian noise; at inf they are the methods' own. Every site adds all of the noise. Settings were chosen before, not by
these figures. The attack is on the first seed, at the smallest epsilon on every seed: offline LiRA and thresholds, with two
shadow rounds, on uploads (`server`) and on the released model (`outsider`); its attacker knows plan, seed and all other images.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.bench import kept_figures, write_record
from benchmarks.claims_picture import WIDTH, alone
from osfl.core.method import Context, Method
from osfl.core.registry import load
from osfl.core.result import Membership
from osfl.core.types import Dataset, Privacy, Release, Upload
from osfl.evaluation.privacy.rates import most_true_positives
from osfl.ingredients.statistics.gaussian_mechanism import multiplier_for
from osfl.models.folding import freeze
from osfl.models.inputs import to_input
from osfl.reports.svg import label, tag
from osfl.runtime.payloads import PayloadCache
from osfl.runtime.workers import Workers, compute_threads
from osfl.simulate.audit import Attempt, Scene, membership_of_release, membership_of_uploads
from osfl.simulate.shadows import all_as_training, pools, shadow_rounds
from osfl.simulate.simulation import Federation, Simulation, prepare

NAME = "privacy_curve"
FIGURE = Path(__file__).parents[1] / "docs" / "privacy-curve.svg"
EPSILONS: Sequence[float | None] = (1.0, 3.0, 8.0, None)
DELTA, SEEDS = 1e-4, (0, 1, 2)
ATTEMPT = Attempt(shadows=2, canaries=0, images=200)
CELL = Simulation("fedavg", "bloodcells-28", 5, "dirichlet:0.5", "cpu", samples=3000, test_samples=1000)
TRAINED = {"architecture": "cnn-w8-g4", "epochs": 8, "batch_size": 128, "clip": 1.0, "weight_decay": 0.0, "lr": 0.1}
LOGITS = {**TRAINED, "ensemble": "logits"}
SYNTHESIS = {**LOGITS, "labels": "balanced", "personalize": False, "images": 32, "steps": 40, "repetitions": 1}
ONE_VIEW = {"resolution": 112, "epochs": 15}  # FALCON's token of the whole image; regions of 28 pixels show no more
SMALL = {"architecture": "cnn-w8-g4", "images_per_class": 300, "epochs": 8}
GROUPS: Mapping[str, Mapping[str, Mapping[str, Any]]] = {  # methods that get the same uploads
    "models": {"fedavg": TRAINED, "ensemble": LOGITS, "fedbicross": SYNTHESIS},
    "sums": {"onesum": {}},
    "images": {"federated_factory": SMALL},
    "tokens": {"falcon": ONE_VIEW},
}
SHOWN = {
    "onesum": "OneSum",
    "falcon": "FALCON",
    "federated_factory": "FederatedFactory, mixtures",
    "ensemble": "ensemble",
    "fedavg": "FedAvg",
    "fedbicross": "FedBiCross",
}


def run() -> dict[str, Any]:
    figures = kept_figures(NAME)
    start = time.perf_counter()
    for seed in SEEDS:
        for group, methods in GROUPS.items():
            for epsilon in EPSILONS:
                if any(_missing(_row(figures, method, epsilon), epsilon, seed) for method in methods):
                    _measure(figures, methods, epsilon, seed, attack=_attacked(epsilon, seed))
                    write_record(NAME, _described(figures), time.perf_counter() - start)
                    print(time.strftime("%H:%M:%S"), group, _named(epsilon), seed, file=sys.stderr, flush=True)
                    FIGURE.write_text(picture(figures["methods"]), encoding="utf-8")
    return _described(figures)


def _described(figures: Mapping[str, Any]) -> dict[str, Any]:
    settings = {name: dict(changes) for methods in GROUPS.values() for name, changes in methods.items()}
    return {
        "cell": CELL.command("DIR"),
        "delta": DELTA,
        "noise": "site",
        "seeds": list(SEEDS),
        "settings": settings,
        "methods": figures["methods"],
    }


def _attacked(epsilon: float | None, seed: int) -> bool:
    return seed == SEEDS[0] or epsilon == EPSILONS[0]


def _missing(row: Mapping[str, Any], epsilon: float | None, seed: int) -> bool:
    return str(seed) not in row["accuracy"] or (_attacked(epsilon, seed) and str(seed) not in row.get("attack", {}))


def _groups_of(method: str) -> list[str]:
    return [group for group, methods in GROUPS.items() if method in methods]


def _named(epsilon: float | None) -> str:
    return "inf" if epsilon is None else f"{epsilon:g}"


def _row(figures: dict[str, Any], method: str, epsilon: float | None) -> dict[str, Any]:
    rows: dict[str, Any] = figures.setdefault("methods", {}).setdefault(method, {})
    found: dict[str, Any] = rows.setdefault(_named(epsilon), {"accuracy": {}})
    return found


def _measure(
    figures: dict[str, Any], methods: Mapping[str, Mapping[str, Any]], epsilon: float | None, seed: int, attack: bool
) -> None:
    """One round of each of these methods, which get the same uploads, and the attack on it."""
    with tempfile.TemporaryDirectory() as folder, compute_threads(1):
        privacy = None if epsilon is None else Privacy(epsilon, DELTA)
        cells = {n: prepare(replace(CELL, method=n, changes=c, seed=seed, privacy=privacy)) for n, c in methods.items()}
        first = next(iter(cells.values()))
        method, ctx = _open(first, Path(folder))
        uploads = [Upload(s.client, first.plan.digest, method.client_phase(s, ctx)) for s in first.shards]
        shadows = _shadows(first, method, ctx) if attack else None
        for name, federation in cells.items():
            method, ctx = _open(federation, Path(folder))
            if privacy is not None:
                for upload in uploads:
                    method.check_upload(upload, ctx)
            release = method.server_phase(uploads, ctx)
            row = _row(figures, name, epsilon)
            row["accuracy"].setdefault(str(seed), _accuracy(method, release, federation.test))  # noise differs every time
            if privacy is not None:
                row["stated"] = method.privacy_statement(release, uploads, federation.plan)["epsilon"]
            if shadows is not None:
                scene = Scene(
                    method, uploads, release, {s.client: s for s in shadows[0]}, federation.test, shadows[1], ctx, ATTEMPT, ""
                )
                found = [
                    *membership_of_uploads(scene, shadows[2], shadows[3]),
                    *membership_of_release(scene, shadows[2], shadows[3])[0],
                ]
                row.setdefault("attack", {})[str(seed)] = best(found, epsilon, "models" not in _groups_of(name))


def _open(federation: Federation, folder: Path) -> tuple[Method, Context]:
    method = load(federation.plan.method)(federation.plan.task, federation.plan.settings)
    kept = PayloadCache(folder).get_or_compute
    return method, Context(federation.plan, torch.device("cpu"), map=Workers(1).map, get_or_compute=kept)


def _shadows(federation: Federation, method: Method, ctx: Context) -> Any:
    """Sites as the attack takes them, the images that it asks about, the shadow rounds, and what each of those saw."""
    held_out = method.adds_held_out(federation.plan)
    shards = [all_as_training(shard) if held_out else shard for shard in federation.shards]
    asked = pools(shards, federation.test, ATTEMPT.images, federation.plan.seed)
    phases, seen = shadow_rounds(method, asked, {s.client: s for s in shards}, ATTEMPT.shadows, ctx)
    return shards, asked, phases, seen


def _accuracy(method: Method, release: Release, test: Dataset) -> float:
    """In percent, of the released model; where each site gets one of its own, their mean."""
    payloads = [release.for_client(client) for client in sorted(release.personal)] or [release.shared]
    return round(statistics.mean(100 * _right(method.build(payload), test) for payload in payloads), 2)


def _right(model: nn.Module, test: Dataset) -> float:
    network = freeze(model)
    with torch.inference_mode():
        answers = [network(to_input(part)).argmax(1) for part in torch.split(test.images, 250)]
    return float((torch.cat(answers) == test.labels).double().mean())


# --- the attack ----------------------------------------------------------------------------------------------------------


def best(rows: Sequence[Membership], epsilon: float | None, sums: bool) -> dict[str, Any]:
    """For each party the attack with the largest area, and the largest share of members found at 1 % false positives; and
    whether any attack found surely more than epsilon allows. `bound` is on that share, by (epsilon, delta) or, where the
    upload is of noisy sums, by the noise itself."""
    found: dict[str, Any] = {"bound": None if epsilon is None else round(most_true_positives(0.01, epsilon, DELTA), 4)}
    found |= {"bound_by_the_noise": round(by_the_noise(epsilon), 4)} if sums and epsilon is not None else {}
    for party in sorted({row["party"] for row in rows}):
        whole = [row for row in rows if row["party"] == party and row["of"] == "all"]
        row = max(whole, key=lambda one: one["auc"]["value"])
        rates = [(rate["value"], rate, one["attack"]) for one in whole if (rate := one["tpr"]["0.01"]) is not None]
        highest = max(rates, key=lambda one: one[0], default=None)
        found[party] = {
            "tried": len(whole),
            "members": row["members"],
            "attack": f"{row['attack']} on {row['signal']}",
            "auc": _rounded(row["auc"]),
            "tpr_at_0.01": None if highest is None else {**_rounded(highest[1]), "attack": highest[2]},
            "beyond_the_bound": sum(bool(one.get("exceeds_bound")) for one in whole),
        }
    return found


def by_the_noise(epsilon: float, false_positives: float = 0.01) -> float:
    """What one upload with Gaussian noise of this epsilon allows (Dong, Roth and Su, 2022): less than (epsilon, delta) does."""
    normal = statistics.NormalDist()
    return normal.cdf(normal.inv_cdf(false_positives) + 1 / multiplier_for(epsilon, DELTA))


def _rounded(rate: Mapping[str, Any]) -> dict[str, float]:
    return {key: round(float(rate[key]), 4) for key in ("value", "low", "high")}


# --- the figure ----------------------------------------------------------------------------------------------------------


def picture(methods: Mapping[str, Any]) -> str:
    """A line a method over epsilon, with the least and the greatest seed."""
    inks = ("#4477aa", "#ee6677", "#228833", "#aa8833", "#66ccee", "#aa3377")
    left, right, top, bottom, height = 56, 620, 56, 340, 392
    places = {_named(epsilon): left + 60 + place * (right - left - 120) / 3 for place, epsilon in enumerate(EPSILONS)}

    def y(percent: float) -> float:
        return bottom - (bottom - top) * percent / 100

    parts = [label(16, 26, f"Accuracy over ε, blood cells, five sites, δ = {DELTA:g}, {_seeds(methods)}", size=15)]
    for tick in range(0, 101, 20):
        parts += [tag("line", x1=left, x2=right, y1=y(tick), y2=y(tick), stroke="#dddddd")]
        parts += [label(left - 6, y(tick) + 4, f"{tick} %", size=11, anchor="end")]
    parts += [
        label(x, bottom + 18, "no noise" if name == "inf" else name, size=11, anchor="middle") for name, x in places.items()
    ]
    parts += [
        label((left + right) / 2, bottom + 38, "ε of one image; each site adds all of the noise", size=12, anchor="middle")
    ]
    for number, (method, shown) in enumerate(SHOWN.items()):
        ink, shift, made = inks[number], 4 * (number - 2.5), methods.get(method, {})
        rows = {name: values for name in places if (values := list(made.get(name, {"accuracy": {}})["accuracy"].values()))}
        if not rows:
            continue
        points = [(places[name] + shift, y(statistics.mean(values))) for name, values in rows.items()]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts += [tag("polyline", points=path, fill="none", stroke=ink, stroke_width=2)]
        parts += [tag("circle", cx=a, cy=b, r=3, fill=ink) for a, b in points]
        parts += [
            tag("line", x1=places[name] + shift, x2=places[name] + shift, y1=y(min(v)), y2=y(max(v)), stroke=ink)
            for name, v in rows.items()
        ]
        place = 80 + 24 * number
        parts += [
            tag("rect", x=right + 16, y=place - 9, width=14, height=4, fill=ink),
            label(right + 38, place - 3, shown, size=12),
        ]
    return alone(WIDTH, height, *parts)


def _seeds(methods: Mapping[str, Any]) -> str:
    """Of how many seeds the points are the mean."""
    numbers = sorted({len(row["accuracy"]) for rows in methods.values() for row in rows.values()} - {0})
    return "one seed" if numbers == [1] else f"{' to '.join(str(n) for n in dict.fromkeys((numbers[0], numbers[-1])))} seeds"


def main(groups: Sequence[str]) -> None:
    if unknown := [name for name in groups if name not in GROUPS]:
        raise SystemExit(f"there is no group {unknown[0]!r}; groups: {', '.join(GROUPS)}")
    figures, start = kept_figures(NAME), time.perf_counter()
    for group in groups:
        for epsilon in EPSILONS:
            if any(str(SEEDS[0]) not in _row(figures, method, epsilon)["accuracy"] for method in GROUPS[group]):
                _measure(figures, GROUPS[group], epsilon, SEEDS[0], attack=False)
                write_record(NAME, _described(figures), time.perf_counter() - start)
    FIGURE.write_text(picture(kept_figures(NAME)["methods"]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
