"""Judge all uploads of a round: what every rule found, by site."""

from __future__ import annotations

from collections.abc import Sequence

from osfl.core.errors import OsflError
from osfl.core.method import Context, Method
from osfl.core.types import ClientId, Probed, Upload
from osfl.judging import rules
from osfl.judging.probes import as_vectors, statements
from osfl.judging.rules import Numbers, Suspicion, numbers_of

LEAST = 4  # uploads: among three, one that lies and one that is unlike the others look the same


def judge(method: Method, uploads: Sequence[Upload], ctx: Context) -> list[Suspicion]:
    """Every suspicion, by site. Fewer than four uploads are not compared: nobody could say who is the odd one out."""
    one_class = ctx.plan.task.kind == "multiclass"  # of several classes an image the answers are no choice
    found, probed, numbers = list[Suspicion](), dict[ClientId, Probed](), dict[ClientId, Numbers]()
    for upload in uploads:  # one after the other: no more than one is in memory
        try:
            method.check_upload(upload, ctx)
            probed[upload.client] = as_vectors(method.probed(upload, ctx))
            numbers[upload.client] = numbers_of(upload)
        except OsflError as error:
            found.append(Suspicion(upload.client, "unusable", error.reason, 1.0, 0.0))
    if len(probed) < LEAST:
        return found
    found += rules.claims(probed, numbers) + rules.copies({client: one.sampled for client, one in numbers.items()})
    networks = {client: one.scales for client, one in numbers.items() if probed[client].classifier is not None}
    found += rules.sizes(networks) if len(networks) >= LEAST else []
    found += rules.distances(probed) + rules.diversity(probed) if one_class else []
    for said in statements(probed, ctx) if one_class else ():
        found += rules.contradictions(said) + rules.constants(probed, said)
    return sorted(set(found), key=lambda one: (one.client, one.rule, one.text))
