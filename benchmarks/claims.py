"""What the papers say of their methods, asked of our records: two rows of a cell beside each other, seed by seed.

The same rules for every claim:

- *Cells.* A claim is asked of every cell of its tables that has both rows: all 16 with features of a trained encoder for
  FALCON, all silos for FederatedFactory, all with neighbors for FOL. Which cells have a row is decided by what it costs.
- *Recipe.* `paper`: the method's settings are the paper's, with sizes and lengths cut to what two cores do. `ours`: the
  `cpu` preset, which changes more. Where both were run, both stand here.
- *Equal terms.* Students that release a point between the clients' average and their last weights are compared at the same
  point (`%0.6`, from vit-shares.json). A server method that ended below where it began, the clients'
  average, had too small a budget; `gained` leaves such cells out.
- *Every cell.* Such a claim is judged cell by cell: see `judged`. Cells that are not above are named, whatever the verdict.
- *Bytes at equal accuracy.* What FedAvg sends until it is as good is known where it got there within its rounds, and is more
  than it sent where it did not: see `_for_as_much`. A cell in which that decides nothing is open.
- *Many claims.* Of sixty claims three would pass by chance at 5 %. `together` says which still hold when all are taken
  together.
- *Published figures* stand beside rows of the same metric and are no part of any claim.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from scipy.stats import t

from benchmarks.grid import (
    AGAIN,
    ALONE,
    AS_PUBLISHED,
    CELLS,
    FACTORY_PRIOR,
    FALCON_NEAR,
    FALCON_PAPER,
    FEDFTG,
    NEARER,
    OWN_TEACHER,
    PRUNING,
    RECORDS,
    SPARING,
    WITH_PRIOR,
)
from benchmarks.joining import by_seed

OWN, GLOBAL, SENT, RECEIVED = (
    "scores.clients.own.mean",
    "scores.global.accuracy",
    "costs.upload_bytes",
    "costs.download_bytes",
)
EQUAL = "bytes both ways, at equal accuracy"
WORDS = {OWN: "own", GLOBAL: "global", SENT: "% fewer bytes", EQUAL: "% fewer bytes"}
Record = Mapping[str, Any]
Recipe = Literal["paper", "ours"]


@dataclass(frozen=True)
class Claim:
    """`left` is above `times` the `right` row of the same cell, or no more than `margin` below.

    A row is a label of the grid; `label#2` is its own accuracy after the second encounter, `label%1` the student at the end of
    its way, and a number is what to be above. Of what is sent, less is more: the difference is the share that is spared.
    """

    text: str
    left: str
    right: str | float
    cells: Callable[[str], bool]
    metric: str = GLOBAL
    times: float = 1.0
    margin: float = 0.0  # `left` may be so much below
    everywhere: bool = False  # in every cell, not only in the mean of all
    recipe: Recipe = "ours"  # whose settings `left` has
    gained: bool = False  # only cells in which `right` ended above the clients' average, where it began


def _inversion(cell: str) -> bool:
    return cell.startswith(("blood-n", "skin-n", "pneumonia-n"))


def _tokens(cell: str) -> bool:
    return CELLS[cell].method == "falcon" and cell != "digits-tokens"  # the demo's encoder is random


def _silos(cell: str) -> bool:
    return cell.endswith("-silos")


def _shares(cell: str) -> bool:
    return cell.startswith("factory-")  # Dirichlet 0.1


def _sends(cell: str) -> bool:
    return _silos(cell) or _shares(cell)


def _vits(cell: str) -> bool:
    return "-vit-n" in cell and not cell.startswith(AGAIN)


def _as_one(cell: str) -> bool:
    """With the blood cells from a start that was made again: the rows there are beside no others."""
    return "-vit-n" in cell


def _skewed(cell: str) -> bool:
    """Where FedMITR should be ahead: shares that differ much, but no client with one class alone."""
    return _vits(cell) and cell.endswith(("a0.05", "a0.1", "c3"))


def _exchanges(cell: str) -> bool:
    return "-meet-" in cell


_FALCONS: Sequence[tuple[str, str, Recipe]] = (
    ("", "falcon", "ours"),
    ("as published, our rate: ", FALCON_NEAR, "ours"),
    ("as published: ", FALCON_PAPER, "paper"),
)
_BESIDE = {"fedmitr": "the preset", NEARER[1]: "KD only, all as one"}

PAPERS: Mapping[str, Sequence[Claim]] = {
    "fedbicross": (
        *(
            Claim(f"above {name} in every cell", "fedbicross", label, _inversion, OWN, everywhere=True)
            for label, name in {
                "fedavg": "FedAvg of one round",
                "dense": "DENSE",
                "coboosting": "Co-Boosting",
                "fedisca": "FedISCA",
            }.items()
        ),
        Claim("learned weights above uniform ones", "fedbicross", "fedbicross@weights=uniform", _inversion, OWN),
        Claim("uniform weights above intra-cluster", "fedbicross@weights=uniform", "fedbicross@weights=intra", _inversion, OWN),
        Claim("… on the global test set", "fedbicross@weights=uniform", "fedbicross@weights=intra", _inversion),
        Claim("above local models", "fedbicross", "local_only", _inversion, OWN),
        Claim("… whose BN statistics are recalibrated", "fedbicross", "local_only@recalibrate_bn=true", _inversion, OWN),
        Claim("above local models that train as long", "fedbicross", "local_only@epochs=40", _inversion, OWN),
        Claim("above the same stage 3 without any server", "fedbicross", ALONE, _inversion, OWN),
        Claim("above odds and the site's prior, untrained", "fedbicross", WITH_PRIOR[0], _inversion, OWN),
        Claim("above FederatedFactory with the prior", "fedbicross", FACTORY_PRIOR[0], _inversion, OWN),
    ),
    **{
        name: (
            Claim("above 32 %, the best of public code", name, 0.32, _inversion, everywhere=True),
            Claim("reaches its teacher", name, f"ensemble@ensemble={teacher}", _inversion),
            Claim("within 3 points of the odds teacher", name, "ensemble@ensemble=odds", _inversion, margin=0.03),
        )
        for name, teacher in {
            "dense": "class_count",
            "coboosting": "odds",
            "fedisca": "class_count",
            "deepinversion": "odds",
        }.items()
    },
    "fedmitr": (
        Claim("above DeepInversion in every cell", "fedmitr", "deepinversion_vit", _vits, everywhere=True),
        Claim("… with 0.05, 0.1 and three classes", "fedmitr", "deepinversion_vit", _skewed),
        Claim("DeepInversion above FedAvg in every cell", "deepinversion_vit", "fedavg", _vits, everywhere=True),
        Claim("… with 0.05, 0.1 and three classes", "deepinversion_vit", "fedavg", _skewed),
        Claim("as published: above FedAvg", AS_PUBLISHED[0], "fedavg", _vits, recipe="paper"),
        *(
            Claim(f"{at} of the way: above {name}", left, f"{label}{right}", _vits, gained=gained)
            for label, name, gained in (
                (f"dense{SPARING}", "DENSE that gained", True),
                (f"coboosting{SPARING}", "Co-Boosting", False),
                (FEDFTG, "FedFTG that gained", True),
            )
            for at, left, right in (("0.6", "fedmitr", "%0.6"), ("end", "fedmitr%1", ""))
        ),
        *(Claim(f"ours, all as one: above {name}", NEARER[0], label, _as_one) for label, name in _BESIDE.items()),
        Claim(
            "… within 10 points of the odds teacher", NEARER[0], "ensemble@ensemble=odds", _as_one, margin=0.1, everywhere=True
        ),
        Claim("labels of kept patches help", "fedmitr", "fedmitr@lambda1=0", _vits),
        Claim("relabeled patches help", "fedmitr", "fedmitr@lambda2=0", _vits),
        Claim("above the label alone", "fedmitr", "fedmitr@mask=0@kd=0@lambda1=1@lambda2=0", _vits),
    ),
    "falcon": (
        *(
            Claim(f"{prefix}above {name}", label, baseline, _tokens, recipe=recipe)
            for prefix, label, recipe in _FALCONS
            for name, baseline in (("FedPFT", "fedpft"), ("FedCGS", "fedcgs"))
        ),
        Claim("distillation helps", "falcon", "falcon@alpha=0", _tokens),
        Claim("… with the paper's teacher, α = 0.5", OWN_TEACHER, "falcon@alpha=0", _tokens),
        Claim("hierarchical tokens help", "falcon", "falcon@resolution={window}", _tokens),
        Claim("M-AR above AR", "falcon", "falcon@order=ar", _tokens),
        Claim("M-AR above NAR", "falcon", "falcon@order=nar", _tokens),
    ),
    "federated_factory": (
        Claim("in silos above rounds of FedAvg, each cell", "federated_factory", "fedavg_rounds", _silos, everywhere=True),
        *(
            Claim(f"90 % of centralized{name}, each", label, "centralized", _silos, times=0.9, everywhere=True)
            for name, label in (("", "federated_factory"), (", diffusion", "federated_factory@factory=edm"))
        ),
        Claim("sends less than FedAvg's ten rounds, each", "federated_factory", "fedavg_rounds", _sends, SENT, everywhere=True),
        Claim("… than FedAvg until it is as good, each", "federated_factory", "fedavg_rounds", _sends, EQUAL, everywhere=True),
        Claim("peer to peer above central, in silos", "federated_factory@mode=peer", "federated_factory", _silos),
        Claim("Dirichlet: above FedAvg in rounds, each", "federated_factory", "fedavg_rounds", _shares, everywhere=True),
        Claim("… peer to peer above central", "federated_factory@mode=peer", "federated_factory", _shares),
        Claim("… where peers fill up small classes", "federated_factory@mode=peer@fill=balance", "federated_factory", _shares),
    ),
    "fol": (
        Claim("FOL-A above FOL", "fol@answer=ensemble", "fol", _exchanges, OWN),
        Claim("FOL above local models", "fol", "local_only", _exchanges, OWN),
        Claim("… whose BN statistics lag", "fol", "local_only@recalibrate_bn=false", _exchanges, OWN),
        Claim("… that are shown as many images", "fol", "local_only@epochs=250", _exchanges, OWN),
        Claim("… and these changed, as FOL's are", "fol", "local_only@epochs=250@augment=flip+crop", _exchanges, OWN),
        Claim("FOL above odds and prior, untrained", "fol", WITH_PRIOR[0], _exchanges, OWN),
        Claim("… FOL-A above them", "fol@answer=ensemble", WITH_PRIOR[0], _exchanges, OWN),
        Claim("FOL above FederatedFactory with the prior", "fol", FACTORY_PRIOR[0], _exchanges, OWN),
        Claim("alignment helps: FOL above FOL-N", "fol", "fol@align=false", _exchanges, OWN),
        Claim("… FOL-A above FOL-AN", "fol@answer=ensemble", "fol@align=false@answer=ensemble", _exchanges, OWN),
        Claim("FOL above DENSE", "fol", "dense", _exchanges, OWN),
        Claim("… with a quarter of its steps", "fol", f"dense{SPARING}", _exchanges, OWN),
        Claim("FOL above Co-Boosting", "fol", "coboosting", _exchanges, OWN),
        Claim("… with a quarter of its steps", "fol", f"coboosting{SPARING}", _exchanges, OWN),
        Claim("ours: begin at the ensemble's average", "fol", "fol@start=own", _exchanges, OWN),
        Claim("… after one encounter", "fol#1", PRUNING[0], _exchanges, OWN),
        Claim("from its own start, once: above local", PRUNING[0], "local_only", _exchanges, OWN),
        Claim("… with filters pruned", PRUNING[1], "local_only", _exchanges, OWN),
        Claim("a second encounter helps", "fol#2", "fol#1", _exchanges, OWN),
        Claim("a third encounter helps", "fol#3", "fol#2", _exchanges, OWN),
    ),
}


def values(record: Record, row: str | float, metric: str) -> Mapping[str, float]:
    """What a row reached, by seed; empty where the cell does not have it."""
    if isinstance(row, float):
        return {f"seed{seed}": row for seed in record["seeds"]}
    label, point = spelled(record["cell"], row)
    if point.startswith("%"):
        return _on_its_way(record["cell"], label, float(point[1:]))
    found = record["methods"].get(label)
    if found is None:
        return {}
    return by_seed(found, found.get("own_by_encounter", {}).get(point[1:], ()) if point else found[metric]["values"])


def spelled(cell: str, row: str) -> tuple[str, str]:
    """A row's label in this cell, and which of its figures is meant: `#2`, `%0.6` or nothing."""
    window = CELLS[cell].changes.get("window", 112) if cell in CELLS else 112
    place = min((at for mark in "#%" if (at := row.find(mark)) >= 0), default=len(row))
    return row[:place].replace("{window}", str(window)), row[place:]


@functools.cache
def _shown() -> Mapping[str, Any]:
    cells: Mapping[str, Any] = json.loads((RECORDS / "vit-shares.json").read_text(encoding="utf-8"))["cells"]
    return cells


def _on_its_way(cell: str, label: str, share: float) -> Mapping[str, float]:
    """A student at that share between the clients' average (0) and its last weights (1)."""
    found = _shown().get(cell, {}).get(label, {})
    return {seed: points[{0.6: 0, 1.0: 1}[share]] for seed, points in found.items() if seed != "mean"}


def differences(claim: Claim, records: Sequence[Record]) -> dict[str, list[float]]:
    """Left minus right by cell and seed. Rows that are still being made are compared on the seeds that both have.

    No difference is known in a cell with an empty list: see `_for_as_much`.
    """
    found = {}
    for record in records:
        if not claim.cells(record["cell"]) or (claim.gained and not _gained(record, claim)):
            continue
        if claim.metric == EQUAL:
            asked, gaps = _for_as_much(record, claim.left, str(claim.right))
        else:
            left, right = (values(record, row, claim.metric) for row in (claim.left, claim.right))
            gaps = [_gap(claim, left[seed], right[seed]) for seed in left if seed in right]
            asked = bool(gaps)
        if asked:
            found[record["cell"]] = gaps
    return found


def _gap(claim: Claim, left: float, right: float) -> float:
    return 1 - left / right if claim.metric == SENT else left + claim.margin - claim.times * right


def _for_as_much(record: Record, left: str, right: str) -> tuple[bool, list[float]]:
    """Whether the cell has both rows; and, seed by seed, the share of bytes that `left` spares where that is known.

    `right` sends as much again in each round. Where it ended as good as `left` or better, its bytes are enough, and `left`
    that sends more has spared nothing. Where it ended below, it needs more than its bytes, and `left` that sends less has
    spared at least that share. In the two other cases the rounds that were run decide nothing.
    """
    accuracy = [values(record, row, GLOBAL) for row in (left, right)]
    sent = [_both_ways(record, row) for row in (left, right)]
    seeds = [seed for seed in accuracy[0] if all(seed in known for known in (accuracy[1], *sent))]
    found = []
    for seed in seeds:
        reached, less = accuracy[1][seed] >= accuracy[0][seed], sent[0][seed] < sent[1][seed]
        if reached != less:
            found.append(1 - sent[0][seed] / sent[1][seed])
    return bool(seeds), found


def _both_ways(record: Record, row: str) -> Mapping[str, float]:
    up, down = (values(record, row, metric) for metric in (SENT, RECEIVED))
    return {seed: up[seed] + down[seed] for seed in up if seed in down}


def _gained(record: Record, claim: Claim) -> bool:
    """Whether the right row, where its student ended, is above the clients' average."""
    ended, began = (values(record, row, GLOBAL) for row in (str(claim.right).partition("%")[0], "fedavg"))
    return bool(ended and began) and statistics.fmean(ended.values()) > statistics.fmean(began.values())


Verdict = Literal["yes", "no", "inconclusive"]


@dataclass(frozen=True)
class Judged:
    """A claim with what the records say of it, in points."""

    method: str
    claim: Claim
    above: float  # mean difference over all cells and seeds
    reach: float  # of its 95 % interval, to both sides
    cells: int
    below: tuple[str, ...]  # cells whose mean is not above
    holds: Verdict
    chance: float = 1.0  # of a difference this large where there is none (two-sided t test)
    seeds: str = ""  # of a cell, as "3" or "1-3"
    together: bool = False  # holds, or does not, when all claims are taken together
    fails: tuple[str, ...] = ()  # cells that are below by more than their own interval, if all cells are asked
    open: tuple[str, ...] = ()  # cells in which nothing is known
    figures: Mapping[str, str] | None = None  # of cells that are not above

    @property
    def scope(self) -> tuple[str, str]:
        """On which images the figure is, and in how many cells it is above zero; for table and picture."""
        return WORDS[self.claim.metric], f"{self.cells - len(self.below) - len(self.open)} of {self.cells}"


def judged(method: str, claim: Claim, gaps: Mapping[str, Sequence[float]]) -> Judged:
    """Seeds of a cell are partitions of their own, so all differences count alike.

    A claim about every cell does not hold where one cell is below zero by more than the interval of its own seeds. It holds
    where the mean of every cell is above zero, and that of all together by more than its interval. Else it is inconclusive.
    """
    known = {cell: found for cell, found in gaps.items() if found}
    every = [gap for found in known.values() for gap in found]
    above, reach = _center(every)
    below = tuple(cell for cell, found in known.items() if statistics.fmean(found) <= 0)
    fails = tuple(cell for cell in below if claim.everywhere and _verdict(known[cell]) == "no")
    undecided = tuple(cell for cell, found in gaps.items() if not found)
    holds, chance = _verdict(every), _chance(every)
    if fails:
        holds, chance = "no", min(1.0, len(known) * min(_chance(known[cell]) for cell in fails))
    elif claim.everywhere and (below or undecided) and holds == "yes":
        holds, chance = "inconclusive", 1.0
    counts = sorted({len(found) for found in known.values()}) or [0]
    seeds = str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
    return Judged(method, claim, 100 * above, 100 * reach, len(gaps), below, holds, chance, seeds, fails=fails, open=undecided)


def _verdict(gaps: Sequence[float]) -> Verdict:
    """Above zero, or below, by more than the 95 % interval of the mean; one difference, or none, decides nothing."""
    above, reach = _center(gaps)
    return "inconclusive" if abs(above) < reach else "yes" if above > 0 else "no"


def _chance(gaps: Sequence[float]) -> float:
    if len(gaps) < 2:
        return 1.0
    spread = statistics.stdev(gaps) / math.sqrt(len(gaps))
    return float(2 * t.sf(abs(statistics.fmean(gaps)) / spread, len(gaps) - 1)) if spread else 0.0


def holm(chances: Sequence[float], level: float = 0.05) -> list[bool]:
    """Which differences are there when all are asked at once: the smallest chance against level / n, the next against
    level / (n - 1), until one is too large. Then not even one of them is an accident, with 95 %."""
    found, passed = [False] * len(chances), True
    for rank, place in enumerate(sorted(range(len(chances)), key=lambda i: chances[i])):
        passed = passed and chances[place] <= level / (len(chances) - rank)
        found[place] = passed
    return found


def _center(gaps: Sequence[float]) -> tuple[float, float]:
    """Their mean, and the reach of its 95 % interval (Student's t: three seeds say little)."""
    if len(gaps) < 2:
        return sum(gaps), math.inf
    return statistics.fmean(gaps), float(t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / math.sqrt(len(gaps))


def judge(records: Sequence[Record]) -> list[Judged]:
    """All claims that some record has rows for."""
    asked = [(method, claim, differences(claim, records)) for method, claims in PAPERS.items() for claim in claims]
    found = [(judged(method, claim, gaps), gaps) for method, claim, gaps in asked if gaps]
    sure = holm([one.chance for one, _ in found])
    return [
        replace(one, together=yes, figures={cell: _figure(one.claim, records, cell, gaps[cell]) for cell in one.below})
        for (one, gaps), yes in zip(found, sure, strict=True)
    ]


def _figure(claim: Claim, records: Sequence[Record], cell: str, gaps: Sequence[float]) -> str:
    """Of a cell that is not above: the share that `left` has of `right` where the claim is about one, else the difference."""
    if claim.times == 1:
        return f"{100 * statistics.fmean(gaps):+.1f}"
    record = next(record for record in records if record["cell"] == cell)
    left, right = (values(record, row, claim.metric) for row in (claim.left, claim.right))
    seeds = [seed for seed in left if seed in right]
    return f"{100 * sum(left[seed] for seed in seeds) / sum(right[seed] for seed in seeds):.1f} %"


HEAD = """# All claims

Claims of the papers about their methods, and further questions, tested on our records.

- *Recipe*: whose settings the method has. `paper`: the paper's, with sizes and lengths cut to what two cores do. `ours`:
  the `cpu` preset, which changes more; each change is in the method's card.
- *Difference*: mean over all cells and seeds, with its 95 % interval (Student's t); in points of accuracy on the clients'
  own class distributions (*own*) or on the whole test set (*global*), or in percent of the bytes that all clients upload.
- *Cells*: in how many cells the mean difference is above zero, of all cells of the method's tables that have both rows.
  *Seeds*: of a cell.
- *Holds*: `inconclusive` where the interval includes zero. A claim about *each* or *every* cell does not hold where one
  cell is below zero by more than the interval of its own seeds (by chance in one of forty cells without a difference), and
  holds where the mean of each cell is above zero and the difference of all by more than its interval; cells that are not above
  are named with their difference, or with the share that they reach. *Open*: cells in which the rows decide nothing.
- **Many claims are asked at once**, and at 5 % one in twenty would pass by chance: *together* says which of them still stand
  when all are taken together (Holm's step-down; a claim that single cells refute counts with the chance of the clearest of
  them, times the number of cells).
- *Until it is as good*: FedAvg's bytes in ten rounds, both ways, are enough where it ended as good as the method; where it
  ended below, it needs more. A cell is open where it ended below and had sent less, or was as good and had sent more.
- Students that release a point between the clients' average and their last weights are compared at the same point.
  *That gained*: only cells in which the other method ended above that average; elsewhere its budget here was too small to
  say anything.

Why a claim fails is in the method's card. [Results](../results.md) has the summary.

![The same as a picture: differences with their 95 % intervals](../claims.svg)

| method | claim | recipe | difference | cells | seeds | holds | together |
|---|---|---|---|---|---|---|---|"""


def table(claims: Sequence[Judged]) -> list[str]:
    """docs/results/claims.md: a line a claim."""
    lines = [HEAD]
    for one in claims:
        where, held = one.scope
        cells = [
            f"[{one.method}](../methods/{one.method}.md)",
            one.claim.text,
            one.claim.recipe,
            f"{_difference(one)} {where}",
            held,
            one.seeds,
            _spelled(one),
            "yes" if one.together else "–",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _spelled(one: Judged) -> str:
    """The verdict, and the cells that it rests on where all cells are asked."""
    verdict = "**no**" if one.holds == "no" else one.holds
    if not one.claim.everywhere:
        return verdict
    figures = one.figures or {}
    named = {
        f"{verdict}: ": one.fails,
        "not above: ": tuple(cell for cell in one.below if cell not in one.fails),
        "open: ": one.open,
    }
    parts = [
        head + ", ".join(f"{cell} {figures.get(cell, '')}".rstrip() for cell in cells) for head, cells in named.items() if cells
    ]
    return "; ".join(parts if one.fails else [verdict, *parts])


def condensed(claims: Sequence[Judged]) -> list[str]:
    """For docs/results.md: a line a method, how many of its claims hold, and its first claim."""
    heads = (
        "method",
        "hold",
        "inconclusive",
        "do not hold",
        "hold with all taken together",
        "first claim: difference in points",
    )
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for method in dict.fromkeys(one.method for one in claims):
        of_it = [one for one in claims if one.method == method]
        counts = [str(sum(one.holds == verdict for one in of_it)) for verdict in ("yes", "inconclusive", "no")]
        counts.append(str(sum(one.holds == "yes" and one.together for one in of_it)))
        first = of_it[0]
        found = f"{first.claim.text}: {_difference(first)} {first.scope[0]}, {first.scope[1]} cells"
        lines.append(f"| {' | '.join([f'[{method}](methods/{method}.md)', *counts, found])} |")
    return [*lines, ""]


def _difference(one: Judged) -> str:
    if len(one.open) == one.cells:
        return "open"
    return f"{one.above:+.1f} " + (f"± {one.reach:.1f}" if math.isfinite(one.reach) else "(one seed)")
