"""Judge all uploads of a round: what every rule found, by site."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from torch import nn

from osfl.core.errors import OsflError
from osfl.core.method import Context, Method
from osfl.core.types import ClientId, Probed, Upload
from osfl.models.folding import freeze
from osfl.rounds.judging import rules
from osfl.rounds.judging.both_ways import misunderstood
from osfl.rounds.judging.probes import by_prototypes, compare, summary
from osfl.rounds.judging.rules import Numbers, Suspicion, numbers_of
from osfl.runtime.workers import return_freed_memory

LEAST = 4  # uploads: among three, one that lies and one that is unlike the others look the same


@dataclass(frozen=True)
class Examined:
    """What is kept of one upload while others are read."""

    client: ClientId
    probed: Probed  # without its classifier
    numbers: Numbers
    classifier: bool  # whether there is one


def judge(method: Method, uploads: Sequence[Upload], ctx: Context) -> list[Suspicion]:
    """Every suspicion, by site. Fewer than four uploads are not compared: nobody could say who is the odd one out.

    Uploads are read one after the other, those with classifiers twice: to learn what each shows, then to classify what all
    show. No more than one upload and its network are in memory.
    """
    rows = list(map(partial(_examine, method, ctx, len(uploads)), uploads))
    found = [one for one in rows if isinstance(one, Suspicion)]
    examined = {one.client: one for one in rows if isinstance(one, Examined)}
    if len(examined) < LEAST:
        return found
    probed = {client: one.probed for client, one in examined.items()}
    numbers = {client: one.numbers for client, one in examined.items()}
    networks = {client: one.numbers.scales for client, one in examined.items() if one.classifier}
    found += rules.claims(probed, numbers) + rules.copies({client: one.sampled for client, one in numbers.items()})
    found += rules.sizes(networks) if len(networks) >= LEAST else []
    if ctx.plan.task.kind != "multiclass":  # of several classes an image the answers are no choice
        return _sorted(found)
    found += rules.distances(probed) + rules.diversity(probed)
    sites = {client: one for client, one in probed.items() if one.points is not None and len(one.points)}
    points = {client: one for client, one in sites.items() if not one.pixels}
    if len(points) > 1:
        found += rules.contradictions(by_prototypes(points, ctx))
    asked = points or sites
    if len(asked) > 1 and all(examined[client].classifier for client in asked):
        places = {one.client: place for place, one in enumerate(rows)}
        comparison = compare(asked, lambda client: _classifier(method, uploads[places[client]], ctx), ctx)
        found += misunderstood(comparison) if comparison.made else rules.contradictions(comparison)
        found += rules.constants(probed, comparison)
    return _sorted(found)


def _sorted(found: Iterable[Suspicion]) -> list[Suspicion]:
    return sorted(set(found), key=lambda one: (one.client, one.rule, one.text))


def _examine(method: Method, ctx: Context, sites: int, upload: Upload) -> Examined | Suspicion:
    try:
        method.check_upload(upload, ctx)
        whole = method.probed(upload, ctx)
        return Examined(
            upload.client, summary(whole, ctx, upload.client, sites), numbers_of(upload), whole.classifier is not None
        )
    except OsflError as error:
        return Suspicion(upload.client, "unusable", error.reason, 1.0, 0.0)
    finally:
        return_freed_memory()  # of the upload before


def _classifier(method: Method, upload: Upload, ctx: Context) -> nn.Module:
    classifier = method.probed(upload, ctx).classifier
    assert classifier is not None
    return freeze(classifier).to(ctx.device)
