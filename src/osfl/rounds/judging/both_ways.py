"""Sites that sent a classifier alone: the others are asked about the images that it is sure of, and it about theirs.

Such images look like nothing, so networks recognize few of them, and honest sites of few images hardly any. What tells a site
that renamed classes from these is the sum of both directions: it calls the others' classes otherwise, too. Every answer is
counted beyond what a site gives to all images and what all sites give to a class, because networks prefer some classes.
"""

from __future__ import annotations

from collections.abc import Collection
from statistics import median

import torch

from osfl.core.types import ClientId
from osfl.rounds.judging.probes import Comparison, class_means
from osfl.rounds.judging.rules import Suspicion

LEAST = 4  # sites that can be compared
UNDERSTOOD = 0.2  # of what the others usually have; honest sites have been seen at 0.3


def misunderstood(comparison: Comparison) -> list[Suspicion]:
    """Sites that understand the others, and are understood, far less than the others each other: the worst first, and the rest
    are asked again without it."""
    left, found = set(comparison.labels), list[Suspicion]()
    while True:
        values = understanding(comparison, left)
        shares = dict[ClientId, float]()
        for client, value in values.items() if len(values) >= LEAST else ():
            usual = median(other for name, other in values.items() if name != client)
            if usual > 0:
                shares[client] = value / usual
        worst = min(shares, key=lambda client: shares[client], default=None)
        if worst is None or shares[worst] >= UNDERSTOOD:
            return found
        text = f"and the others call classes otherwise: they agree {max(0.0, shares[worst]):.0%} as much as is usual here"
        found.append(Suspicion(worst, "contradiction", text, shares[worst], UNDERSTOOD))
        left.discard(worst)


def understanding(comparison: Comparison, among: Collection[ClientId]) -> dict[ClientId, float]:
    """By site (`among` these) that knows two classes or more which two others know: how much more often both it and they answer
    a class's images by that class than others, on average; about 0 where they do not know each other's classes."""
    voters = [client for client in comparison.panel if client in among]
    known = torch.stack([comparison.known[client] for client in voters]).double()
    shown, replied = _answers(comparison, voters, sorted(among))
    found = {}
    for client in sorted(among):
        others = known[[place for place, other in enumerate(voters) if other != client]]
        asked = others.sum(0) >= 2
        own = comparison.known[client][asked]
        if int(own.sum()) < 2:
            continue
        both = shown[client] + replied.get(client, torch.zeros_like(shown[client]))
        beyond = both[asked][:, asked][own]
        beyond = beyond - beyond.mean(1, keepdim=True)
        beyond = beyond - beyond.mean(0, keepdim=True)
        found[client] = float(beyond[torch.arange(len(beyond)), own.nonzero().flatten()].mean())
    return found


def _answers(
    comparison: Comparison, voters: list[ClientId], among: list[ClientId]
) -> tuple[dict[ClientId, torch.Tensor], dict[ClientId, torch.Tensor]]:
    """By site and class that it calls them by, what the voters answer to its images, and by class that it answers how often it
    does to theirs, (classes, classes) each: means over those who know the class."""
    places = [comparison.panel.index(client) for client in voters]
    known = torch.stack([comparison.known[client] for client in voters]).double()
    shown, replied = dict[ClientId, torch.Tensor](), dict[ClientId, torch.Tensor]()
    total, count = torch.zeros(()), torch.zeros(())
    for client in among:
        means = class_means(comparison.answers[client][places], comparison.labels[client])  # (voters, classes, classes)
        others = torch.tensor([other != client for other in voters])
        weight = known * others[:, None]
        shown[client] = (means * weight[:, None]).sum(0) / weight.sum(0).clamp_min(1)
        if client in voters:
            mine = comparison.known[client].double()[None, :, None] * others[:, None, None]
            total, count = total + means * mine, count + mine
    for place, client in enumerate(voters):
        replied[client] = (total[place] / count[place].clamp_min(1)).T
    return shown, {**{c: t.double().T for c, t in comparison.replies.items() if c in among}, **replied}
