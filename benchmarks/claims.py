"""What the papers say of their methods, asked of our records: two rows of a cell beside each other, seed by seed."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scipy.stats import t

from benchmarks.grid import FACTORY_PRIOR, FEDFTG, SPARING, WITH_PRIOR
from benchmarks.joining import by_seed

OWN, GLOBAL = "scores.clients.own.mean", "scores.global.accuracy"
Record = Mapping[str, Any]


@dataclass(frozen=True)
class Claim:
    """`left` is above `times` the `right` row of the same cell. A row is a label of the grid; `label#2` is its own accuracy
    after the second encounter, and a number is what to be above."""

    says: str
    left: str
    right: str | float
    cells: Callable[[str], bool]
    metric: str = GLOBAL
    times: float = 1.0
    everywhere: bool = False  # the mean of every cell, not only the mean of all


def _inversion(cell: str) -> bool:
    return cell.startswith(("blood-n", "skin-n", "pneumonia-n"))


def _tokens(cell: str) -> bool:
    return cell.startswith(("brain-a", "xray-a"))  # the two datasets of its tables, at the default size


def _silos(cell: str) -> bool:
    return cell.endswith("-silos")


def _shares(cell: str) -> bool:
    return cell.startswith("factory-")  # Dirichlet 0.1


def _vits(cell: str) -> bool:
    return "-vit-n" in cell


def _skewed(cell: str) -> bool:
    """Where FedMITR should be ahead: shares that differ much, but no client with one class alone."""
    return _vits(cell) and cell.endswith(("a0.05", "a0.1", "c3"))


def _meetings(cell: str) -> bool:
    return "-meet-" in cell


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
        Claim("… whose BN statistics are settled", "fedbicross", "local_only@recalibrate_bn=true", _inversion, OWN),
        Claim("above local models that train as long", "fedbicross", "local_only@epochs=40", _inversion, OWN),
        Claim("above odds and the site's prior, untrained", "fedbicross", WITH_PRIOR[0], _inversion, OWN),
        Claim("above FederatedFactory with the prior", "fedbicross", FACTORY_PRIOR[0], _inversion, OWN),
    ),
    **{
        name: (
            Claim("above 32 %, the best of public code", name, 0.32, _inversion, everywhere=True),
            Claim("reaches its teacher", name, f"ensemble@ensemble={teacher}", _inversion),
        )
        for name, teacher in {"dense": "class_count", "coboosting": "odds", "fedisca": "class_count"}.items()
    },
    "fedmitr": (
        Claim("above DeepInversion in every cell", "fedmitr", "deepinversion_vit", _vits, everywhere=True),
        Claim("… with 0.05, 0.1 and three classes", "fedmitr", "deepinversion_vit", _skewed),
        Claim("DeepInversion above FedAvg in every cell", "deepinversion_vit", "fedavg", _vits, everywhere=True),
        Claim("… with 0.05, 0.1 and three classes", "deepinversion_vit", "fedavg", _skewed),
        *(
            Claim(f"above {name}", "fedmitr", label, _vits)
            for label, name in {
                "dense": "DENSE",
                f"dense{SPARING}": "DENSE, quarter of its steps",
                f"coboosting{SPARING}": "Co-Boosting, quarter of its steps",
                "fedftg": "FedFTG",
                FEDFTG: "FedFTG, quarter of its steps",
            }.items()
        ),
        Claim("labels of kept patches help", "fedmitr", "fedmitr@lambda1=0", _vits),
        Claim("relabeled patches help", "fedmitr", "fedmitr@lambda2=0", _vits),
        Claim("above the label alone", "fedmitr", "fedmitr@mask=0@kd=0@lambda1=1@lambda2=0", _vits),
    ),
    "falcon": (
        Claim("above FedPFT", "falcon", "fedpft", _tokens),
        Claim("above FedCGS", "falcon", "fedcgs", _tokens),
        Claim("distillation helps", "falcon", "falcon@alpha=0", _tokens),
        Claim("hierarchical tokens help", "falcon", "falcon@resolution=112", _tokens),
        Claim("autoregressive order above NAR", "falcon", "falcon@order=nar", _tokens),
    ),
    "federated_factory": (
        Claim("in silos above rounds of FedAvg, each cell", "federated_factory", "fedavg_rounds", _silos, everywhere=True),
        Claim("90 % of centralized on blood cells", "federated_factory", "centralized", "blood-silos".__eq__, times=0.9),
        Claim("… with the diffusion model", "federated_factory@factory=edm", "centralized", "blood-silos".__eq__, times=0.9),
        Claim("95 % of centralized on digits", "federated_factory", "centralized", "digits-silos".__eq__, times=0.95),
        Claim("… with the diffusion model", "federated_factory@factory=edm", "centralized", "digits-silos".__eq__, times=0.95),
        Claim("peer to peer above central, in silos", "federated_factory@mode=peer", "federated_factory", _silos),
        Claim("Dirichlet: above FedAvg in rounds, each", "federated_factory", "fedavg_rounds", _shares, everywhere=True),
        Claim("… peer to peer above central", "federated_factory@mode=peer", "federated_factory", _shares),
        Claim("… where peers fill up small classes", "federated_factory@mode=peer@fill=balance", "federated_factory", _shares),
    ),
    "fol": (
        Claim("FOL-A above FOL", "fol@answer=ensemble", "fol", _meetings, OWN),
        Claim("FOL above local models", "fol", "local_only", _meetings, OWN),
        Claim("… whose BN statistics lag", "fol", "local_only@recalibrate_bn=false", _meetings, OWN),
        Claim("… that are shown as many images", "fol", "local_only@epochs=250", _meetings, OWN),
        Claim("… and these changed, as FOL's are", "fol", "local_only@epochs=250@augment=flip+crop", _meetings, OWN),
        Claim("FOL above odds and prior, untrained", "fol", WITH_PRIOR[0], _meetings, OWN),
        Claim("… FOL-A above them", "fol@answer=ensemble", WITH_PRIOR[0], _meetings, OWN),
        Claim("alignment helps: FOL above FOL-N", "fol", "fol@align=false", _meetings, OWN),
        Claim("… FOL-A above FOL-AN", "fol@answer=ensemble", "fol@align=false@answer=ensemble", _meetings, OWN),
        Claim("FOL above DENSE", "fol", "dense", _meetings, OWN),
        Claim("… with a quarter of its steps", "fol", f"dense{SPARING}", _meetings, OWN),
        Claim("FOL above Co-Boosting", "fol", "coboosting", _meetings, OWN),
        Claim("… with a quarter of its steps", "fol", f"coboosting{SPARING}", _meetings, OWN),
        Claim("ours: begin at the ensemble's average", "fol", "fol@start=own", _meetings, OWN),
        Claim("a second encounter helps", "fol#2", "fol#1", _meetings, OWN),
        Claim("a third encounter helps", "fol#3", "fol#2", _meetings, OWN),
    ),
}


def values(record: Record, row: str | float, metric: str) -> Mapping[str, float]:
    """What a row reached, by seed; empty where the cell does not have it."""
    if isinstance(row, float):
        return {f"seed{seed}": row for seed in record["seeds"]}
    label, _, encounter = row.partition("#")
    found = record["methods"].get(label)
    if found is None:
        return {}
    return by_seed(found, found.get("own_by_encounter", {}).get(encounter, ()) if encounter else found[metric]["values"])


def differences(claim: Claim, records: Sequence[Record]) -> dict[str, list[float]]:
    """Left minus right by cell and seed. Rows that are still being made are compared on the seeds that both have."""
    found = {}
    for record in records:
        if not claim.cells(record["cell"]):
            continue
        left, right = (values(record, row, claim.metric) for row in (claim.left, claim.right))
        if gaps := [left[seed] - claim.times * right[seed] for seed in left if seed in right]:
            found[record["cell"]] = gaps
    return found


@dataclass(frozen=True)
class Judged:
    """A claim with what the records say of it, in points."""

    method: str
    claim: Claim
    above: float  # mean difference over all cells and seeds
    reach: float  # of its 95 % interval, to both sides
    cells: int
    below: tuple[str, ...]  # cells whose mean is not above
    holds: Literal["yes", "no", "inconclusive"]

    @property
    def words(self) -> tuple[str, str]:
        """Figures for table and picture: on which images, and in how many cells."""
        where = "own" if self.claim.metric == OWN else "global"
        return where, f"{self.cells - len(self.below)} of {self.cells}"


def judged(method: str, claim: Claim, gaps: Mapping[str, Sequence[float]]) -> Judged:
    """Seeds of a cell are partitions of their own, so all differences count alike."""
    above, reach = _center([gap for found in gaps.values() for gap in found])
    below = tuple(cell for cell, found in gaps.items() if statistics.fmean(found) <= 0)
    held = above > 0 and not (claim.everywhere and below)
    holds: Literal["yes", "no", "inconclusive"] = "inconclusive" if abs(above) < reach else "yes" if held else "no"
    return Judged(method, claim, 100 * above, 100 * reach, len(gaps), below, holds)


def _center(gaps: Sequence[float]) -> tuple[float, float]:
    """Their mean, and the reach of its 95 % interval (Student's t: three seeds say little)."""
    if len(gaps) < 2:
        return statistics.fmean(gaps), math.inf
    return statistics.fmean(gaps), float(t.ppf(0.975, len(gaps) - 1)) * statistics.stdev(gaps) / math.sqrt(len(gaps))


def judge(records: Sequence[Record]) -> list[Judged]:
    """All claims that some record has rows for."""
    asked = [(method, claim, differences(claim, records)) for method, said in PAPERS.items() for claim in said]
    return [judged(method, claim, gaps) for method, claim, gaps in asked if gaps]


HEAD = """# All claims

Claims of the papers about their methods, and further questions, tested on our records. *Difference*: mean over all cells and
seeds, in points, with its 95 % interval. *Cells*: in how many cells the mean difference is above zero. Why a claim fails is in
the method's card. [Results](../results.md) has the summary.

![The same as a picture: differences with their 95 % intervals](../claims.svg)

| method | claim | difference | cells | holds |
|---|---|---|---|---|"""


def table(claims: Sequence[Judged]) -> list[str]:
    """docs/results/claims.md: a line a claim."""
    lines = [HEAD]
    for one in claims:
        where, held = one.words
        failing = f"**no**: {', '.join(one.below)}" if one.claim.everywhere else "**no**"
        cells = [
            f"[{one.method}](../methods/{one.method}.md)",
            one.claim.says,
            f"{_difference(one)} {where}",
            held,
            failing if one.holds == "no" else one.holds,
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def condensed(claims: Sequence[Judged]) -> list[str]:
    """For docs/results.md: a line a method, how many of its claims hold, and its first claim."""
    lines = ["| method | hold | inconclusive | do not hold | first claim: difference in points |", "|---|---|---|---|---|"]
    for method in dict.fromkeys(one.method for one in claims):
        of_it = [one for one in claims if one.method == method]
        counts = [str(sum(one.holds == verdict for one in of_it)) for verdict in ("yes", "inconclusive", "no")]
        first = of_it[0]
        found = f"{first.claim.says}: {_difference(first)} {first.words[0]}, {first.words[1]} cells"
        lines.append(f"| {' | '.join([f'[{method}](methods/{method}.md)', *counts, found])} |")
    return [*lines, ""]


def _difference(one: Judged) -> str:
    return f"{one.above:+.1f} " + (f"± {one.reach:.1f}" if math.isfinite(one.reach) else "(one seed)")
