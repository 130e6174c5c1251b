"""Weights that come from what sites claim: how many images they have, in all and of each class.

Nobody can check such a claim, so no site gets more than a share of the weight that the plan states (`limits.share`, two
fifths unless it sets another share). Where k sites claim something, the cap is at least 1/k: a single site keeps all, two are
alike. Claims that stay below the cap keep their exact values.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from osfl.core.errors import RoundError, go_on_without
from osfl.core.types import ClientId, Limits, Upload

_SLACK = 1 + 1e-9  # rounding is no excess


def capped(claims: torch.Tensor, share: float) -> torch.Tensor:
    """Claims (sites,) or (sites, classes), each column with its largest entries lowered until none is above `share` of the sum.

    Nothing here looks at a value to decide what to compute: operations are counted without any.
    """
    if share >= 1 or len(claims) < 2:
        return claims
    table = claims.detach().double().reshape(len(claims), -1)
    most = (1 / (table > 0).sum(0).clamp_min(1)).clamp_min(share)  # (columns,)
    ordered = table.sort(0, descending=True).values
    sums = ordered.cumsum(0)
    lowered = torch.arange(1, len(table), dtype=table.dtype, device=table.device)[:, None]  # the first so many are lowered
    room = 1 - lowered * most
    levels = most * (sums[-1] - sums[:-1]) / room.clamp_min(1e-12)
    fits = (room > 1e-12) & (ordered[1:] <= levels * _SLACK)
    level = levels.gather(0, fits.int().argmax(0, keepdim=True))
    over = table > most * sums[-1] * _SLACK
    low = torch.where(over.any(0), torch.minimum(table, level), table)
    return torch.where((low < table).reshape(claims.shape), low.reshape(claims.shape).to(claims.dtype), claims)


def capped_sites(counts: torch.Tensor, share: float) -> torch.Tensor:
    """Counts (sites, classes) in which no site has more than its share of all images; its proportions stay."""
    totals = counts.sum(1)
    return counts * (capped(totals, share) / totals.clamp_min(1e-12))[:, None]


def capped_counts(counts: torch.Tensor, share: float) -> torch.Tensor:
    """The same, and then no site has more than its share of a class; how large a class is, in all, is not changed by that."""
    counts = capped_sites(counts, share)
    lowered = capped(counts, share)
    grown = lowered.sum(0).clamp_min(1e-12)
    return torch.where((lowered == counts).all(0), counts, lowered * (counts.sum(0) / grown))


def whole_counts(counts: torch.Tensor, share: float) -> list[list[int]]:
    """`capped_counts` as whole images; at least one where any were claimed."""
    found = capped_counts(counts, share)
    return [[max(1, int(n)) if n > 0 else 0 for n in row] for row in found.tolist()]


def drawn_for(wanted: Sequence[Sequence[int]], bytes_each: int, limits: Limits) -> list[list[int]]:
    """How many synthetic features of each site and class a server takes, where sites ask for `wanted`.

    As `capped_counts`, and in all no more than the plan has memory for: proportionally fewer then, at least one of each.
    """
    found = whole_counts(torch.tensor(wanted, dtype=torch.float64), limits.share)
    total, most = sum(map(sum, found)), max(1, limits.drawn_bytes // bytes_each)
    if total <= most:
        return found
    return [[max(1, n * most // total) if n else 0 for n in row] for row in found]


def samples_of(upload: Upload) -> float:
    """How many images a site claims, for methods that cannot do without it."""
    samples = upload.payload.facts.get("samples")
    if samples is None:
        raise missing_fact(upload.client, "samples", "the number of its images")
    return float(samples)


def sizes_of(uploads: Sequence[Upload], share: float) -> torch.Tensor:
    """How much each site weighs by its number of images, (sites,) in float64."""
    return capped(torch.tensor([samples_of(upload) for upload in uploads], dtype=torch.float64), share)


def largest(uploads: Sequence[Upload], share: float) -> Upload:
    """The site with most images among those whose claim is below the cap; among all where nobody's is."""
    claims = torch.tensor([samples_of(upload) for upload in uploads], dtype=torch.float64)
    believed = (capped(claims, share) == claims).tolist()
    chosen = [upload for upload, fine in zip(uploads, believed, strict=True) if fine] or list(uploads)
    return min(chosen, key=lambda upload: (-samples_of(upload), upload.client))


def missing_fact(client: ClientId, name: str, what: str) -> RoundError:
    return RoundError(
        f"the upload does not say {what}",
        client=client,
        field=f"facts.{name}",
        expected=what,
        got="nothing",
        fix=go_on_without(client),
    )
