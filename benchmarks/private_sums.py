"""What differential privacy costs OneSum: accuracy over epsilon on three data sets, and a membership attack with canaries.

    python -m benchmarks.private_sums             all cells and the attacks; what the record has is not made again
    python -m benchmarks.private_sums digits      one cell, all of it anew; `attack` the attacks alone
    python -m benchmarks.private_sums --draw      the figure alone, from the record

Five sites, Dirichlet 0.1, test images, three seeds. `share`: the sites' noise adds up to that of a trusted curator; `site`:
each site adds all of it. Noise cannot be repeated, so each seed is the mean of `DRAWS` rounds on the same exact sums. inf is
OneSum without noise, with its ordinary features and the same symmetry, measured here on the same splits.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.claims_picture import WIDTH, alone
from osfl.core.method import Context
from osfl.core.registry import load
from osfl.core.result import write_json
from osfl.core.types import Dataset, Json, Payload, Plan, Privacy, Shard, Upload
from osfl.ingredients.statistics.gaussian_mechanism import multiplier_for
from osfl.ingredients.statistics.private_sums import Noise, noised, site_noise
from osfl.ingredients.statistics.public_map import LEVELS
from osfl.methods.onesum import OneSum
from osfl.methods.onesum.head import Classifier, head_of
from osfl.reports.svg import label, tag
from osfl.rounds.secure_sum import masked, total_of
from osfl.runtime.payloads import PayloadCache
from osfl.runtime.workers import Workers, compute_threads
from osfl.simulate.simulation import Federation, Simulation, prepare
from osfl.wire.signing import SigningKey

RECORD = Path(__file__).parent / "records" / "private_sums.json"
FIGURE = Path(__file__).parents[1] / "docs" / "methods" / "private-sums.svg"
EPSILONS, DELTA, SEEDS, DRAWS = (1.0, 2.0, 3.0, 4.0, 8.0, 16.0), 1e-5, (0, 1, 2), 3
_SPLIT = {"clients": 5, "partition": "dirichlet:0.1", "preset": "cpu"}
CELLS: Mapping[str, Simulation] = {
    "blood, no symmetry": Simulation("onesum", "bloodcells-28", samples=4000, **_SPLIT),  # type: ignore[arg-type]
    "blood, square": Simulation("onesum", "bloodcells-28", samples=4000, changes={"symmetry": "square"}, **_SPLIT),  # type: ignore[arg-type]
    "digits": Simulation("onesum", "digits", **_SPLIT),  # type: ignore[arg-type]
    "brain": Simulation("onesum", "brain-mri-subset", image_size=224, changes={"features": "encoder"}, **_SPLIT),  # type: ignore[arg-type]
}
NOISES: Sequence[Literal["share", "site"]] = ("share", "site")
CANARIES, TRIALS, ROUNDS = 4, 3000, 1500


# --- accuracy over epsilon ----------------------------------------------------------------------------------------------


def curve(simulation: Simulation, known: Mapping[str, Any]) -> dict[str, Any]:
    """Accuracy in percent by epsilon and kind of noise, one number a seed; what is known is not made again."""
    missing = [e for e in EPSILONS if f"{e:g}" not in known.get("share", {}) or f"{e:g}" not in known.get("site", {})]
    found: dict[str, Any] = {noise: dict(known.get(noise, {})) for noise in NOISES}
    for noise in found:
        found[noise] |= {f"{e:g}": [] for e in missing}
    stated, inf = dict(known.get("stated", {})), [] if "inf from" in known else list(known.get("inf", []))
    for seed in SEEDS if missing else ():
        with tempfile.TemporaryDirectory() as folder, compute_threads(1):
            private = prepare(replace(simulation, seed=seed, privacy=Privacy(1.0, DELTA)))
            kept: dict[str, torch.Tensor] = {}
            for noise in NOISES:
                for epsilon in missing:
                    plan = replace(private.plan, privacy=Privacy(epsilon, DELTA, noise))
                    draws = [_accuracy(private, plan, Path(folder), kept) for _ in range(DRAWS)]
                    found[noise][f"{epsilon:g}"].append(round(statistics.mean(one[0] for one in draws), 2))
                    stated[f"{noise} {epsilon:g}"] = draws[0][1]
        print(f"{time.strftime('%H:%M:%S')} {simulation.dataset} seed {seed}", found, file=sys.stderr, flush=True)
    for noise in found:
        found[noise] = {f"{e:g}": found[noise][f"{e:g}"] for e in EPSILONS}
    settings = prepare(replace(simulation, privacy=Privacy(1.0, DELTA))).plan.as_json()["settings"]
    return {
        "command": simulation.command("DIR"),
        "settings": settings,
        **found,
        "stated": stated,
        "inf": inf or _clean(simulation),
    }


def _clean(simulation: Simulation) -> list[float]:
    """OneSum without noise on the same splits, with its ordinary features."""
    found = []
    for seed in SEEDS:
        with tempfile.TemporaryDirectory() as folder, compute_threads(1):
            plain = prepare(replace(simulation, seed=seed))
            found.append(_accuracy(plain, plain.plan, Path(folder), {})[0])
        print(f"{time.strftime('%H:%M:%S')} {simulation.dataset} seed {seed} without noise", found, file=sys.stderr, flush=True)
    return found


def _accuracy(federation: Federation, plan: Plan, folder: Path, kept: dict[str, torch.Tensor]) -> tuple[float, Any]:
    """A round without wire and report: client phases, server phase, answers on the test images. `kept`: their features."""
    method = load(plan.method)(plan.task, plan.settings)
    assert isinstance(method, OneSum)
    ctx = Context(plan, torch.device("cpu"), map=Workers(1).map, get_or_compute=PayloadCache(folder).get_or_compute)
    uploads = [Upload(shard.client, plan.digest, method.client_phase(shard, ctx)) for shard in federation.shards]
    for upload in uploads:
        method.check_upload(upload, ctx)
    release = method.server_phase(uploads, ctx).shared
    features = kept["test"] if "test" in kept else kept.setdefault("test", method.encode(federation.test.images, ctx))
    right = Classifier(head_of(release.tensors))(features).argmax(1) == federation.test.labels
    return round(100 * float(right.double().mean()), 2), release.facts.get("privacy", {}).get("epsilon")


# --- the attack ---------------------------------------------------------------------------------------------------------


def attack(epsilon: float = 1.0, trials: int = TRIALS) -> dict[str, Any]:
    """The best test for one image, by who knows all other images, the features of this one and the noise's deviation: is it
    in the sums or not? Canaries have features of full length in random directions.
    """
    digits = prepare(replace(CELLS["digits"], privacy=Privacy(epsilon, DELTA)))
    method, plan = OneSum(digits.plan.task, digits.plan.settings), digits.plan
    ctx, noise, rng = Context(plan, torch.device("cpu")), site_noise(plan), torch.Generator().manual_seed(0)
    d, classes = method.width(), len(plan.task.classes)
    base = method.client_phase(digits.shards[0], ctx).tensors  # what is there besides does not matter: it is subtracted again
    scores: dict[str, list[float]] = {"in": [], "out": []}
    for _ in range(CANARIES):
        step = canary(d, classes, rng)
        for where, add in (("in", 1), ("out", 0)):
            for _ in range(trials):
                sent = noised({name: base[name] + add * step[name] for name in step}, noise)
                scores[where].append(log_likelihood({n: sent[n] - base[n] for n in sent}, step, noise))
    return {"epsilon": epsilon, "delta": DELTA, "canaries": CANARIES, "trials": trials, **judged(scores, epsilon)}


def attack_through_a_round(epsilon: float = 1.0, rounds: int = ROUNDS) -> dict[str, Any]:
    """The same test on what the server of a secure sum gets: a canary image at one site, or not; client phases with their
    shares of the noise, masks, and the sum of masked uploads. The server knows all other images and the canary."""
    digits = prepare(replace(CELLS["digits"], secure_sum=True, privacy=Privacy(epsilon, DELTA, "share")))
    method, plan = OneSum(digits.plan.task, digits.plan.settings), digits.plan
    exact = ExactTerms()
    ctx = Context(plan, torch.device("cpu"), get_or_compute=exact)
    keys = {client: SigningKey.from_seed(client.encode().ljust(32)) for client in plan.clients}
    public = {client: key.public_hex for client, key in keys.items()}
    noise, stated = site_noise(plan).times(math.sqrt(len(plan.clients))), None
    scores: dict[str, list[float]] = {"in": [], "out": []}
    for number in range(CANARIES):
        shards = {"out": digits.shards, "in": [with_canary(digits.shards[0], number), *digits.shards[1:]]}
        sums = {where: exact.total(method, some, ctx) for where, some in shards.items()}
        step = {name: sums["in"][name] - sums["out"][name] for name in sums["in"]}
        for where, some in shards.items():
            for _ in range(rounds):
                uploads = [
                    Upload(
                        s.client,
                        plan.digest,
                        masked(method, method.client_phase(s, ctx), s.client, plan, public, keys[s.client]),
                    )
                    for s in some
                ]
                total = total_of(uploads, method, plan)
                stated = stated or method.server_phase([total], ctx).shared.facts["privacy"]["epsilon"]
                seen = {name: total.payload.tensors[name] - sums["out"][name] for name in step}
                scores[where].append(log_likelihood(seen, step, noise))
    return {
        "epsilon": epsilon,
        "stated": stated,
        "delta": DELTA,
        "canaries": CANARIES,
        "rounds": rounds,
        **judged(scores, epsilon),
    }


class ExactTerms:
    """`get_or_compute` that keeps what methods compute, sites' exact terms among it."""

    def __init__(self) -> None:
        self.kept: dict[str, Payload] = {}

    def __call__(self, key: Json, make: Callable[[], Payload]) -> Payload:
        name = str(key)
        if name not in self.kept:
            self.kept[name] = make()
        return self.kept[name]

    def total(self, method: OneSum, shards: Sequence[Shard], ctx: Context) -> dict[str, torch.Tensor]:
        """The sum of these shards' exact terms, which the attacker is given."""
        terms = []
        for shard in shards:
            method.client_phase(shard, ctx)
            terms.append(next(one.tensors for key, one in self.kept.items() if "exact term" in key and shard.digest in key))
        return {name: torch.stack([one[name] for one in terms]).sum(0) for name in ("counts", "sums", "gram")}


def with_canary(shard: Shard, number: int) -> Shard:
    """One image more: random black and white pixels, as no other looks."""
    rng = torch.Generator().manual_seed(number)
    images = shard.train.images
    odd = 255 * torch.randint(2, (1, *images.shape[1:]), generator=rng, dtype=torch.uint8)
    data = Dataset(torch.cat([images, odd]), torch.cat([shard.train.labels, torch.tensor([number])]))
    return replace(shard, train=data, digest=f"{shard.digest} and canary {number}")


def canary(d: int, classes: int, rng: torch.Generator) -> dict[str, torch.Tensor]:
    """What one image of full length changes."""
    z = torch.randn(d, generator=rng, dtype=torch.float64)
    whole = (z / z.norm() * LEVELS).trunc().to(torch.int64)
    place = int(torch.randint(classes, (1,), generator=rng))
    counts, sums = torch.zeros(classes, dtype=torch.int64), torch.zeros(classes, d, dtype=torch.int64)
    counts[place], sums[place] = LEVELS, whole
    row, column = torch.triu_indices(d, d).unbind()
    return {"counts": counts, "sums": sums, "gram": whole[row] * whole[column]}


def log_likelihood(seen: Mapping[str, torch.Tensor], step: Mapping[str, torch.Tensor], noise: Noise) -> float:
    """ln p(seen | with the canary) - ln p(seen | without): the test that no other beats (Neyman and Pearson)."""
    total, d = 0.0, step["sums"].shape[1]
    row, column = torch.triu_indices(d, d).unbind()
    one = torch.ones((), dtype=torch.float64)
    weights = {"counts": one, "sums": one, "gram": torch.where(row == column, 1.0, 2.0).double()}
    for name, weight in weights.items():
        x, v = seen[name].double(), step[name].double()
        total += float((weight * v * (x - v / 2)).sum()) / getattr(noise, name) ** 2
    return total


def judged(scores: Mapping[str, Sequence[float]], epsilon: float) -> dict[str, Any]:
    """True and false positive rates at thresholds that were fixed before, with 95 % intervals, beside two bounds on the former.

    `allowed`: e^epsilon FPR + delta, by (epsilon, delta) alone. `curve`: Phi(Phi^-1(FPR) + mu), what no test against this noise
    exceeds (Dong, Roth and Su, 2022), and what the best one attains in expectation: half of all experiments are above it. So
    only an interval that is all above a bound contradicts it. The advantage is that at threshold 0, where it is largest.
    """
    mu, normal = 1 / multiplier_for(epsilon, DELTA), statistics.NormalDist()
    rows: list[dict[str, Any]] = []
    for threshold in (-0.25, 0.0, 0.25, 0.5, mu * normal.inv_cdf(0.99) - mu * mu / 2):  # the last one: 1 % false positives
        (tp, tpr), (fp, fpr) = ((sum(s > threshold for s in scores[w]), len(scores[w])) for w in ("in", "out"))
        (low, high), (low_out, high_out) = interval(tp, tpr), interval(fp, fpr)
        allowed = min(1.0, math.exp(min(epsilon, 50.0)) * high_out + DELTA)  # e^1000 is no float
        curve = normal.cdf(normal.inv_cdf(high_out) + mu) if high_out < 1 else 1.0
        rows.append(
            {
                "threshold": round(threshold, 4),
                "tpr": round(tp / tpr, 4),
                "tpr_interval": [round(low, 4), round(high, 4)],
                "fpr": round(fp / fpr, 4),
                "fpr_interval": [round(low_out, 4), round(high_out, 4)],
                "allowed": round(allowed, 4),
                "curve": round(curve, 4),
                "within": low <= min(allowed, curve),
            }
        )
    best, bound = rows[1], 2 * normal.cdf(mu / 2) - 1
    (low, high), (low_out, high_out) = best["tpr_interval"], best["fpr_interval"]
    found = best["tpr"] - best["fpr"]
    reach = math.hypot(best["tpr"] - low, high_out - best["fpr"]), math.hypot(high - best["tpr"], best["fpr"] - low_out)
    between = [round(found - reach[0], 4), round(found + reach[1], 4)]  # Newcombe's interval of a difference of two shares
    return {
        "rates": rows,
        "advantage": round(found, 4),
        "advantage_interval": between,
        "most": round(bound, 4),
        "within": between[0] <= bound,
    }


def interval(hits: int, trials: int) -> tuple[float, float]:
    """Wilson's, 95 %."""
    z, share = 1.96, hits / trials
    middle, reach = share + z * z / (2 * trials), z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials**2))
    return (middle - reach) / (1 + z * z / trials), (middle + reach) / (1 + z * z / trials)


# --- record and figure ----------------------------------------------------------------------------------------------------


def picture(cells: Mapping[str, Any]) -> str:
    """A line a cell and kind of noise, over epsilon; a dashed line without noise."""
    inks = ("#4477aa", "#ee6677", "#228833", "#aa8833")
    left, right, top, bottom, height = 56, 640, 56, 340, 392

    def x(epsilon: float) -> float:
        return left + (right - left) * math.log2(epsilon) / math.log2(EPSILONS[-1])

    def y(percent: float) -> float:
        return bottom - (bottom - top) * (percent - 20) / 80

    parts = [label(16, 26, "Accuracy over ε, δ = 1e-5, five sites, test images, mean of three seeds", size=15)]
    for tick in range(20, 101, 20):
        parts += [tag("line", x1=left, x2=right, y1=y(tick), y2=y(tick), stroke="#dddddd")]
        parts += [label(left - 6, y(tick) + 4, f"{tick} %", size=11, anchor="end")]
    parts += [label(x(e), bottom + 18, f"{e:g}", size=11, anchor="middle") for e in EPSILONS]
    parts += [label((left + right) / 2, bottom + 38, "ε, one image more or less at one site", size=12, anchor="middle")]
    ends: list[float] = []
    for ink, (name, cell) in zip(inks, cells.items(), strict=False):
        clean = statistics.mean(cell["inf"])
        parts += [tag("line", x1=left, x2=right, y1=y(clean), y2=y(clean), stroke=ink, stroke_dasharray="2 4")]
        for noise, width, dash in (("share", 2.5, "none"), ("site", 1.5, "6 4")):
            points = [(x(float(e)), y(statistics.mean(v))) for e, v in cell[noise].items()]
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
            parts += [tag("polyline", points=path, fill="none", stroke=ink, stroke_width=width, stroke_dasharray=dash)]
            parts += [tag("circle", cx=a, cy=b, r=3, fill=ink) for a, b in points]
        place = max(74.0, *(end + 40 for end in ends)) if ends else 74.0
        ends.append(place)
        parts += [
            tag("rect", x=right + 20, y=place - 9, width=14, height=4, fill=ink),
            label(right + 42, place - 3, name, size=12),
        ]
        parts += [label(right + 42, place + 12, f"without noise {clean:.1f} %", size=11)]
    where = max(ends) + 46
    parts += [label(right + 20, where, "thick: noise = share, a trusted server or a secure sum", size=11)]
    parts += [label(right + 20, where + 16, "dashed: noise = site, against the server, too", size=11)]
    parts += [label(right + 20, where + 32, "dotted: OneSum without privacy", size=11)]
    return alone(WIDTH, height, *parts)


def main(names: Sequence[str]) -> None:
    if unknown := [name for name in names if name not in (*CELLS, "attack", "--draw")]:
        raise SystemExit(f"unknown: {unknown[0]}; cells: {', '.join(CELLS)}, attack\n{__doc__}")
    made: dict[str, Any] = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {"cells": {}}
    made |= {"command": "python -m benchmarks.private_sums", "delta": DELTA, "draws": DRAWS, "seeds": list(SEEDS)}
    wanted = [name for name in names if name != "--draw"] or ([] if names else [*CELLS, "attack"])
    for name in wanted:
        if name in CELLS:
            made["cells"][name] = curve(CELLS[name], {} if names else made["cells"].get(name, {}))
        elif name == "attack" and (names or "attack" not in made):
            made["attack"] = {
                "epsilon 1": attack(1.0),
                "almost without noise": attack(1000.0, 250),
                "through a secure sum, epsilon 1": attack_through_a_round(1.0),
                "through a secure sum, almost without noise": attack_through_a_round(1000.0, 25),
            }
        made["cells"] = {cell: made["cells"][cell] for cell in CELLS if cell in made["cells"]}
        made["date"] = time.strftime("%Y-%m-%d", time.gmtime())
        write_json(RECORD, made)
    if made["cells"]:
        FIGURE.write_text(picture(made["cells"]), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
