"""The rules: each names sites for one reason, with the number that it found and its bound. All are about what others sent, too.

Bounds were set on rounds that no other figure uses; benchmarks/honest_rounds.py counts false alarms of honest rounds, and
benchmarks/lying_sites.py attacks.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from types import MappingProxyType

import torch

from osfl.core.types import ClientId, Probed, Upload
from osfl.rounds.judging.probes import PANEL, Comparison, variance_of, within

CLAIM = 10.0  # times as many images as all together that claim less
COPY = 0.02  # of the distance below which a quarter of all pairs lie; where few can be compared, `EXACT`
EXACT = 1e-6  # of their numbers
LEAST_PAIRS = 3
AGREE = 0.2  # agreement with all others together beyond chance (1: always), below which a site may contradict them
CLASSES = 0.9  # classes in all that the others recognize of each other and not of a site, for a contradiction
ON_AVERAGE = 0.4  # of each class that was asked
FAR = 6.0  # robust deviations from the other sites
FAR_CLASSES = 1.8  # times as far as different classes are from each other; honest sites have been seen at 1.3, noise at 2.4
LARGER = 3.0  # times as large as the others' numbers, or as small
FAR_ALONE = 2.2  # the same for a site none of whose classes anybody else has: one class may lie apart from all the others
ALIKE = 0.02  # of the others' variance within classes
ENOUGH = 30  # images of a class that vary for sure
_SAMPLED = 2_000  # numbers of an upload that are compared with others
_USUAL = 2_000  # pairs of uploads whose distances say what is near
_SCALED = 1.4826  # the median absolute deviation of normal numbers, as a standard deviation


@dataclass(frozen=True)
class Suspicion:
    """What a rule found against a site: a number and the bound that it is beyond."""

    client: ClientId
    rule: str
    text: str
    value: float
    bound: float


@dataclass(frozen=True)
class Numbers:
    """What is kept of an upload's numbers while all are compared."""

    samples: float  # images that it claims
    sampled: torch.Tensor  # some of them, at the same places in every upload of the same length
    scales: Mapping[tuple[str, tuple[int, ...]], float]  # log of the root mean square of each weight, by name and shape


def numbers_of(upload: Upload) -> Numbers:
    tensors = upload.payload.tensors
    weights = {(n, tuple(t.shape)): _log_rms(t) for n, t in tensors.items() if t.is_floating_point() and t.ndim > 1}
    return Numbers(float(upload.payload.facts.get("samples", 0)), _sample([tensors[name] for name in sorted(tensors)]), weights)


def _sample(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Some numbers of all tensors, each as likely as another, at places that follow from how many there are."""
    total = sum(tensor.numel() for tensor in tensors)
    if total <= _SAMPLED:
        return torch.cat([torch.zeros(0, dtype=torch.float64), *(tensor.double().flatten() for tensor in tensors)])
    places, start, parts = torch.randint(total, (_SAMPLED,), generator=torch.Generator().manual_seed(0)).sort().values, 0, []
    for tensor in tensors:
        here = places[(places >= start) & (places < start + tensor.numel())] - start
        parts.append(tensor.flatten()[here].double())
        start += tensor.numel()
    return torch.cat(parts)


def claims(probed: Mapping[ClientId, Probed], numbers: Mapping[ClientId, Numbers]) -> list[Suspicion]:
    """Sites that claim far more images than all that claim less together, four fifths of the others: several that lie do not
    hide each other, and a few large sites are measured by no two small ones."""
    sizes = {client: float(sum(one.counts)) or numbers[client].samples for client, one in probed.items()}
    found = []
    for client, size in sizes.items():
        smaller = [other for other in sizes.values() if 2 * other < size]
        if 5 * len(smaller) >= 4 * (len(sizes) - 1) and sum(smaller) > 0 and size > CLAIM * sum(smaller):
            text = f"claims {size:,.0f} images, {len(smaller)} others together {sum(smaller):,.0f}"
            found.append(Suspicion(client, "claim", text, size / sum(smaller), CLAIM))
    return found


def copies(vectors: Mapping[ClientId, torch.Tensor]) -> list[Suspicion]:
    """Sites that sent nearly the same; which of them copied, nobody can tell."""
    found, lengths = list[Suspicion](), {len(vector) for vector in vectors.values()}
    named = {length: sorted(c for c, one in vectors.items() if len(one) == length and bool(one.any())) for length in lengths}
    bound = _copy_bound([torch.stack([vectors[client] for client in names]) for names in named.values() if names])
    for names in named.values():
        found += _alike(names, torch.stack([vectors[client] for client in names]), bound) if len(names) > 1 else []
    return found


def _copy_bound(groups: Sequence[torch.Tensor]) -> float:
    """A share of the distance below which a quarter of all pairs lie, by some pairs where there are many. One far from all
    others is in half of the pairs of four sites: by their median it would make copies of the others."""
    apart = list[torch.Tensor]()
    for rows in groups:
        pairs = torch.combinations(torch.arange(len(rows))) if len(rows) <= PANEL else _some_pairs(len(rows))
        apart += [_apart(rows[part[:, 0]], rows[part[:, 1]]) for part in pairs.split(50)]
    usual = torch.cat(apart) if apart else torch.zeros(0)
    return max(EXACT, COPY * sorted(usual.tolist())[len(usual) // 4]) if len(usual) >= LEAST_PAIRS else EXACT


def _some_pairs(sites: int) -> torch.Tensor:
    pairs = torch.randint(sites, (_USUAL, 2), generator=torch.Generator().manual_seed(0))
    return pairs[pairs[:, 0] != pairs[:, 1]]


def _alike(names: Sequence[ClientId], rows: torch.Tensor, bound: float) -> list[Suspicion]:
    """Pairs within the bound: their lengths are within it, too, so that only neighbors by length are compared."""
    norms, order = rows.norm(dim=1).sort(stable=True)
    lengths, rows, names = norms.tolist(), rows[order], [names[place] for place in order.tolist()]
    count, nearest, first = [0] * len(names), [math.inf] * len(names), [""] * len(names)
    for place in range(len(names)):
        end = bisect_right(lengths, lengths[place] / max(1e-12, 1 - bound))
        values = _apart(rows[place + 1 : end], rows[place])
        for other in (values <= bound).nonzero().flatten().tolist():
            for one, its in ((place, place + 1 + other), (place + 1 + other, place)):
                count[one] += 1
                nearest[one] = min(nearest[one], float(values[other]))
                first[one] = min(first[one] or names[its], names[its])
    return [
        Suspicion(name, "copy", _copied(first[place], count[place]), nearest[place], bound)
        for place, name in enumerate(names)
        if count[place]
    ]


def _copied(other: ClientId, count: int) -> str:
    """One sentence, however many sites sent the same."""
    more = f" and {count - 1} more sites" if count > 1 else ""
    return f"sent nearly the same as {other}{more}: one of them may have copied the other"


def _apart(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The distance of rows, as a share of the longer of both."""
    longer = torch.maximum(one.norm(dim=-1), other.norm(dim=-1))
    return torch.div((one - other).norm(dim=-1), longer)


def sizes(scales: Mapping[ClientId, Mapping[tuple[str, tuple[int, ...]], float]]) -> list[Suspicion]:
    """Sites whose networks have much larger or smaller weights than the others', tensor by tensor."""
    common = sorted(set.intersection(*(set(one) for one in scales.values())))
    if not common:
        return []
    found, rows = [], torch.tensor([[one[name] for name in common] for one in scales.values()], dtype=torch.float64)
    for place, client in enumerate(scales):
        rest = torch.cat([rows[:place], rows[place + 1 :]])
        usual = rest.quantile(0.5, 0)
        typical = float((rows[place] - usual).abs().quantile(0.5))
        spread = float((_SCALED * (rest - usual).abs().quantile(0.5, 0)).quantile(0.5))
        if typical > math.log(LARGER) and typical > FAR * spread:
            times = math.exp(min(typical, 50.0))
            found.append(
                Suspicion(client, "size", f"has weights {times:.3g} times as large or as small as the others", times, LARGER)
            )
    return found


def _log_rms(tensor: torch.Tensor) -> float:
    return math.log(float(tensor.double().square().mean().sqrt()) + 1e-12)


def contradictions(comparison: Comparison) -> list[Suspicion]:
    """Sites whose classes all others together call otherwise, though they recognize the same classes of each other. The one
    whose absence lets the others agree most goes first, and the rest are asked again without it: what a liar says about others
    names nobody."""
    left, found = set(comparison.labels), list[Suspicion]()
    while len(left) > 2:
        values, gains, shown = agreements(comparison, left), dict[ClientId, float](), _shown_by_panel(comparison, left)
        for client, value in values.items():
            if value < AGREE and proven(client, comparison, left, shown):
                without = agreements(comparison, left - {client}, _panel(comparison, left, client))
                gains[client] = median(without.values() or [value]) - value
        if not gains:
            return found
        worst = max(gains, key=lambda client: gains[client])
        text = f"calls classes otherwise than all others together, who agree with {max(0.0, values[worst]):.0%} beyond chance"
        found.append(Suspicion(worst, "contradiction", text, values[worst], AGREE))
        left.discard(worst)
    return found


def agreements(
    comparison: Comparison, among: Collection[ClientId], some: Collection[ClientId] | None = None
) -> dict[ClientId, float]:
    """By site (all `among` them, or `some`), where it can be asked."""
    found = {client: agreement(client, comparison, among) for client in sorted(among if some is None else some)}
    return {client: value for client, value in found.items() if value is not None}


def _panel(comparison: Comparison, among: Collection[ClientId], client: ClientId) -> set[ClientId]:
    """The others that stand for all others: of many sites those of the panel."""
    return (set(among) & set(comparison.panel)) - {client}


Shown = Mapping[ClientId, Mapping[int, float]]  # by site and class, how often the others recognize it


def _shown_by_panel(comparison: Comparison, among: Collection[ClientId]) -> Shown:
    """Of the panel's members, for sites outside of it, which are nobody's voters: once for all of them."""
    if len(comparison.panel) == len(comparison.labels):
        return {}
    return {other: recognized(other, comparison, among, 1) for other in comparison.panel if other in among}


def proven(client: ClientId, comparison: Comparison, among: Collection[ClientId], shown: Shown = MappingProxyType({})) -> bool:
    """Whether the others call its classes otherwise, and not each other's.

    For each class, how much more often the others recognize it of each other than of this site, of whom they know as much;
    without that comparison sites that merely share few classes would be named. Summed over classes it has to be beyond what
    honest sites show, and on average, too, so that many classes of a little each are no proof.
    """
    evidence = evidence_against(client, comparison, among, shown)
    if not evidence:
        return False
    whole = sum(evidence.values())
    return whole >= CLASSES and whole >= ON_AVERAGE * len(evidence)


def evidence_against(
    client: ClientId, comparison: Comparison, among: Collection[ClientId], shown: Shown = MappingProxyType({})
) -> dict[int, float]:
    """By class that it and two others know: the median of how often the others recognize it of each other, less how often they
    do of this site; from -1 to 1."""
    own, rest = recognized(client, comparison, among, 2), set(among) - {client}
    alike = shown if client not in comparison.panel else {}
    names = sorted(_panel(comparison, among, client))
    others = [alike[name] if name in alike else recognized(name, comparison, rest, 1) for name in names]
    found = {}
    for label, share in own.items():
        usual = [one[label] for one in others if label in one]
        if len(usual) >= 2:
            found[label] = median(usual) - share
    return found


def recognized(client: ClientId, comparison: Comparison, among: Collection[ClientId], least: int) -> dict[int, float]:
    """By class that a site knows, and at least so many others (`among` these): how often those call its points by it."""
    labels, (given, voters) = comparison.labels[client], _votes(client, comparison, among)
    asked = [label for label in labels.unique().tolist() if comparison.known[client][label] and voters[label] >= least]
    return {label: float((given[labels == label] == label).double().mean()) for label in asked}


def _votes(client: ClientId, comparison: Comparison, among: Collection[ClientId]) -> tuple[torch.Tensor, torch.Tensor]:
    """What the others of the panel (`among` these) together call a site's points, (n,), by the median of those who know a
    class; and how many know each class, (classes,)."""
    places = [place for place, other in enumerate(comparison.panel) if other != client and other in among]
    if not places:
        nobody = torch.zeros(len(comparison.known[client]), dtype=torch.int64)
        return torch.full((len(comparison.labels[client]),), -1), nobody
    known = torch.stack([comparison.known[comparison.panel[place]] for place in places])
    answers = comparison.answers[client][places].float()
    votes = answers.masked_fill(~known[:, None], math.nan).nanquantile(0.5, 0)
    return votes.masked_fill(~known.any(0), -math.inf).argmax(1), known.sum(0)


def agreement(client: ClientId, comparison: Comparison, among: Collection[ClientId]) -> float | None:
    """How often all others together (`among` these) call a site's points by the classes that it says, beyond chance: 1
    always, 0 as by chance. Asked for classes that it and two others know; None where there is none, or nothing to mistake it
    for."""
    labels, (given, voters) = comparison.labels[client], _votes(client, comparison, among)
    asked, covered = (comparison.known[client] & (voters >= 2))[labels], int((voters > 0).sum())
    if not bool(asked.any()) or covered < 2:
        return None
    chance = 1 / covered
    return (float((given[asked] == labels[asked]).double().mean()) - chance) / (1 - chance)


def constants(probed: Mapping[ClientId, Probed], comparison: Comparison) -> list[Suspicion]:
    """Classifiers that answer everything alike, of sites that claim images of several classes."""
    found = []
    for client, given in comparison.given.items():
        counts = torch.tensor(list(probed[client].counts), dtype=torch.float64)
        several = len(counts) and int((counts >= 0.2 * counts.sum()).sum()) >= 2
        share = float(given.max()) / int(given.sum())
        if several and share >= 0.99:
            found.append(Suspicion(client, "constant", "answers everything alike", share, 0.99))
    return found


def distances(probed: Mapping[ClientId, Probed]) -> list[Suspicion]:
    """Sites whose classes lie farther from everybody's than different classes usually lie from each other."""
    sites = large_classes(probed)
    if len(sites) < 4:
        return []
    found, scale = [], within(list(sites.values())).sqrt()
    means = {client: _class_means(one, scale) for client, one in sites.items()}
    order = torch.randperm(len(sites), generator=torch.Generator().manual_seed(0)).tolist()
    panel = [list(means)[place] for place in order[:PANEL]]
    nearest = {client: _nearest(client, means, panel) for client in means}
    for client, (to_any, _) in nearest.items():
        usual = [far for other, (_, rows) in nearest.items() if other != client for far in rows if math.isfinite(far)]
        value, typical = sum(to_any) / len(to_any), median(usual) if usual else math.inf
        shared = any(label in mine for other, mine in means.items() if other != client for label in means[client])
        bound = (FAR_CLASSES if shared else FAR_ALONE) * typical
        if value > bound:
            text = f"has classes {value / typical:.3g} times as far from the others' as different classes are from each other"
            found.append(Suspicion(client, "distance", text, value, bound))
    return found


def _nearest(
    client: ClientId, means: Mapping[ClientId, Mapping[int, torch.Tensor]], panel: Sequence[ClientId]
) -> tuple[list[float], list[float]]:
    """How far each class of a site is from the nearest one of any other site, and from the nearest of another class there."""
    others = [(label, mean) for other in panel if other != client for label, mean in means[other].items()]
    labels, rows = torch.tensor([label for label, _ in others]), torch.stack([mean for _, mean in others]).double()
    to_any, to_other = list[float](), list[float]()
    for label, mean in means[client].items():
        apart = (rows - mean).square().mean(1).sqrt()
        to_any.append(float(apart.min()))
        to_other.append(float(apart.masked_fill(labels == label, math.inf).min()))
    return to_any, to_other


def diversity(probed: Mapping[ClientId, Probed]) -> list[Suspicion]:
    """Sites whose samples of a class are all alike, of classes with enough images to vary."""
    spread = {client: float(variance_of(one).mean()) for client, one in large_classes(probed).items()}
    found = []
    for client, value in spread.items() if len(spread) > 2 else ():
        usual = median([other for name, other in spread.items() if name != client])
        if value < ALIKE * usual:
            text = f"has samples of a class that vary by {value / usual:.2g} of what the others' do"
            found.append(Suspicion(client, "diversity", text, value / usual, ALIKE))
    return found


def large_classes(probed: Mapping[ClientId, Probed]) -> dict[ClientId, Probed]:
    """The points of classes that count as known; sites that have none are left out."""
    found = {}
    for client, one in probed.items():
        if one.points is None or one.labels is None or one.pixels or not len(one.points):
            continue  # `pixels`: images that a classifier was asked for, no samples of its site
        counts = torch.tensor(list(one.counts) or [ENOUGH] * (int(one.labels.max()) + 1))
        kept = counts[one.labels] >= ENOUGH
        if bool(kept.any()):
            found[client] = replace(one, points=one.points[kept], labels=one.labels[kept])
    return found


def _class_means(one: Probed, scale: torch.Tensor) -> dict[int, torch.Tensor]:
    """By class, (d,) in units of what images of a class differ by."""
    assert one.points is not None and one.labels is not None
    rows, labels = one.points.flatten(1), one.labels.unique().tolist()
    return {label: (rows[one.labels == label].double().mean(0) / scale).float() for label in labels}
