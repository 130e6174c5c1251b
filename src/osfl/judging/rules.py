"""The rules: each names sites for one reason, with the number that it found and its bound. All are about what others sent, too.

Bounds were set on rounds that no other figure uses; false alarms of honest rounds are counted in
benchmarks/records/honest_rounds.json, and attacks in benchmarks/records/lying_sites.json.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from statistics import median

import torch

from osfl.core.types import ClientId, Probed, Upload
from osfl.judging.probes import Statement, variance_of, within

CLAIM = 10.0  # times as many images as all others together
COPY = 0.02  # of the usual distance between two uploads; where few can be compared, `EXACT`
EXACT = 1e-6  # of their numbers
LEAST_PAIRS = 3
AGREE = 0.1  # agreement with all others together beyond chance (1: always), below which a site contradicts them
LOW = 2.0  # robust deviations below the other sites' agreement, which it has to be beside
TYPICAL = 0.25  # agreement of the others, below which nothing follows from a site's own
FAR = 6.0  # robust deviations from the other sites
LARGER = 3.0  # times as large as the others' numbers, or as small
ALIKE = 0.02  # of the others' variance within classes
ENOUGH = 30  # images of a class that vary for sure
_SAMPLED = 20_000  # numbers of an upload that are compared with others
_USUAL = 2_000  # pairs of uploads, whose median distance is the usual one
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
    parts = [tensors[name].double().flatten() for name in sorted(tensors) if tensors[name].numel()]
    whole = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
    if len(whole) > _SAMPLED:
        whole = whole[torch.randint(len(whole), (_SAMPLED,), generator=torch.Generator().manual_seed(0))]
    weights = {(n, tuple(t.shape)): _log_rms(t) for n, t in tensors.items() if t.is_floating_point() and t.ndim > 1}
    return Numbers(float(upload.payload.facts.get("samples", 0)), whole, weights)


def claims(probed: Mapping[ClientId, Probed], numbers: Mapping[ClientId, Numbers]) -> list[Suspicion]:
    """Sites that claim far more images than all others together."""
    sizes = {client: float(sum(one.counts)) or numbers[client].samples for client, one in probed.items()}
    found = []
    for client, size in sizes.items():
        others = sum(sizes.values()) - size
        if others > 0 and size > CLAIM * others:
            text = f"claims {size:,.0f} images, all others together {others:,.0f}"
            found.append(Suspicion(client, "claim", text, size / others, CLAIM))
    return found


def copies(vectors: Mapping[ClientId, torch.Tensor]) -> list[Suspicion]:
    """Sites that sent nearly the same; which of them copied, nobody can tell."""
    names = [client for client, vector in vectors.items() if bool(vector.any())]
    norms = {client: float(vectors[client].norm()) for client in names}
    pairs = [(a, b) for a, b in combinations(names, 2) if len(vectors[a]) == len(vectors[b])]
    apart = [_apart(vectors[a], vectors[b]) for a, b in pairs[:: len(pairs) // _USUAL + 1]]
    bound = max(EXACT, COPY * median(apart)) if len(apart) >= LEAST_PAIRS else EXACT
    alike: dict[ClientId, list[tuple[float, ClientId]]] = {}
    for a, b in pairs:
        if abs(norms[a] - norms[b]) > bound * norms[a] or (value := _apart(vectors[a], vectors[b])) > bound:
            continue
        alike.setdefault(a, []).append((value, b))
        alike.setdefault(b, []).append((value, a))
    return [
        Suspicion(client, "copy", _copied([other for _, other in found]), min(found)[0], bound)
        for client, found in alike.items()
    ]


def _copied(others: Sequence[ClientId]) -> str:
    """One sentence, however many sites sent the same."""
    more = f" and {len(others) - 1} more sites" if len(others) > 1 else ""
    return f"sent nearly the same as {others[0]}{more}: one of them may have copied the other"


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / one.norm())


def sizes(scales: Mapping[ClientId, Mapping[tuple[str, tuple[int, ...]], float]]) -> list[Suspicion]:
    """Sites whose networks have much larger or smaller weights than the others', tensor by tensor."""
    common = sorted(set.intersection(*(set(one) for one in scales.values())))
    found = []
    for client, own in scales.items() if common else ():
        others = [[one[name] for other, one in scales.items() if other != client] for name in common]
        shift = [own[name] - median(rest) for name, rest in zip(common, others, strict=True)]
        spread = [_SCALED * median([abs(value - median(rest)) for value in rest]) for rest in others]
        typical, usual = median(map(abs, shift)), median(spread)
        if typical > math.log(LARGER) and typical > FAR * usual:
            times = math.exp(min(typical, 50.0))
            found.append(
                Suspicion(client, "size", f"has weights {times:.3g} times as large or as small as the others", times, LARGER)
            )
    return found


def _log_rms(tensor: torch.Tensor) -> float:
    return math.log(float(tensor.double().square().mean().sqrt()) + 1e-12)


def contradictions(said: Mapping[ClientId, Statement]) -> list[Suspicion]:
    """Sites whose classes all others together call otherwise. The worst one goes first, and the rest are asked again without
    it: what a liar says about others names nobody."""
    left, found = set(said), list[Suspicion]()
    while len(left) > 2:
        rows = {client: agreement(client, {c: said[c] for c in left}) for client in sorted(left)}
        known = {client: value for client, value in rows.items() if value is not None}
        values = {client: value for client, value in known.items() if value < min(AGREE, _low(client, known))}
        if not values:
            return found
        worst = min(values, key=lambda client: values[client])
        text = f"calls classes otherwise than all others together, who agree with {max(0.0, values[worst]):.0%} beyond chance"
        found.append(Suspicion(worst, "contradiction", text, values[worst], AGREE))
        left.discard(worst)
    return found


def _low(client: ClientId, values: Mapping[ClientId, float]) -> float:
    """What is unusually low beside the other sites: where honest ones hardly agree, nobody is named."""
    others = [value for other, value in values.items() if other != client]
    if not others or (usual := median(others)) < TYPICAL:
        return -math.inf
    return usual - LOW * _SCALED * median([abs(value - usual) for value in others])


def agreement(client: ClientId, said: Mapping[ClientId, Statement]) -> float | None:
    """How often all others together call a site's points by the classes that it says, beyond chance: 1 always, 0 as by
    chance. Asked for classes that it and two others know; None where there is none, or nothing to mistake it for."""
    own, others = said[client], [one for c, one in said.items() if c != client and client in one.answers]
    if not others:
        return None
    voters = torch.stack([one.known for one in others]).sum(0)
    asked = (own.known & (voters >= 2))[own.labels]
    covered = voters > 0
    if not bool(asked.any()) or int(covered.sum()) < 2:
        return None
    votes = sum(one.answers[client][asked].where(one.known, 0) for one in others) / voters.clamp_min(1)
    given = votes.masked_fill(~covered, -math.inf).argmax(1)
    chance = 1 / int(covered.sum())
    return (float((given == own.labels[asked]).double().mean()) - chance) / (1 - chance)


def constants(probed: Mapping[ClientId, Probed], said: Mapping[ClientId, Statement]) -> list[Suspicion]:
    """Classifiers that answer everything alike, of sites that claim images of several classes."""
    found = []
    for client, one in said.items():
        if probed[client].classifier is None:
            continue
        counts = torch.tensor(list(probed[client].counts), dtype=torch.float64)
        several = len(counts) and int((counts >= 0.2 * counts.sum()).sum()) >= 2
        given = torch.cat([logits.argmax(1) for logits in one.answers.values()])
        share = float(torch.bincount(given).max()) / len(given)
        if several and share >= 0.99:
            found.append(Suspicion(client, "constant", "answers everything alike", share, 0.99))
    return found


def distances(probed: Mapping[ClientId, Probed]) -> list[Suspicion]:
    """Sites whose classes lie far from everybody's, or do not vary as images do."""
    speak = large_classes(probed)
    if len(speak) < 4:
        return []
    scale, found = within(list(speak.values())).sqrt(), []
    own = {client: _class_means(one, scale) for client, one in speak.items()}
    away = {client: _away(client, own) for client in own}
    for client, value in away.items():
        rest = [far for other, far in away.items() if other != client]
        usual = median(rest)
        bound = max(LARGER * usual, usual + FAR * _SCALED * median([abs(far - usual) for far in rest]))
        if value > bound:
            text = f"has classes {value / max(usual, 1e-12):.3g} times as far from the others' as those are from each other"
            found.append(Suspicion(client, "distance", text, value, bound))
    return found


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
        if one.points is None or one.labels is None or not len(one.points):
            continue
        counts = torch.tensor(list(one.counts) or [ENOUGH] * (int(one.labels.max()) + 1))
        kept = counts[one.labels] >= ENOUGH
        if bool(kept.any()):
            found[client] = replace(one, points=one.points[kept], labels=one.labels[kept])
    return found


def _class_means(one: Probed, scale: torch.Tensor) -> dict[int, torch.Tensor]:
    assert one.points is not None and one.labels is not None
    rows = one.points.flatten(1).double() / scale
    return {int(c): rows[one.labels == c].mean(0) for c in one.labels.unique()}


def _away(client: ClientId, own: Mapping[ClientId, Mapping[int, torch.Tensor]]) -> float:
    """The mean distance of a site's classes from the nearest class of any other site: also of one that only it has."""
    others = torch.stack([mean for other, means in own.items() if other != client for mean in means.values()])
    nearest = [float((others - mean).square().mean(1).min().sqrt()) for mean in own[client].values()]
    return sum(nearest) / len(nearest)
