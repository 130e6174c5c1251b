"""The judgment of a round: made before the server phase, kept in judgment.json, shown by `osfl show` and the dashboard.

It is of these very uploads: with one more, or one less, it is made again. Reading it needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from osfl.core.errors import RoundError, go_on_without
from osfl.core.types import ClientId, Json
from osfl.rounds.state import JUDGMENT
from osfl.runtime.atomic import replace_atomically

if TYPE_CHECKING:
    from osfl.core.method import Context, Method
    from osfl.rounds.folder import Round


UNDECIDED = "judgment"  # field of the error


def judged(fl_round: Round, method: Method, among: Collection[ClientId], ctx: Context) -> list[Mapping[str, Json]]:
    """Every suspicion about these uploads; what was found before is not computed again, and stays for who is left out."""
    from osfl.rounds.judging.judge import judge

    uploads, digests = fl_round.uploads(among)
    known = _kept(fl_round.folder)
    if known["judged"] != digests:
        fresh = [{**asdict(one), "upload": digests[one.client]} for one in judge(method, uploads, ctx)]
        earlier = [one for one in known["suspicions"] if one["client"] not in digests]
        known = {"judged": digests, "suspicions": [*fresh, *earlier]}
        replace_atomically(fl_round.folder / JUDGMENT, json.dumps(known, indent=1, sort_keys=True).encode())
    return [one for one in known["suspicions"] if one["client"] in digests]


def suspicions(folder: Path, digests: Mapping[ClientId, str]) -> list[Mapping[str, Json]]:
    """What was found about uploads that are still what they were: client, upload, rule, text, value and bound."""
    return [one for one in _kept(folder)["suspicions"] if one["upload"] == digests.get(one["client"])]


def _kept(folder: Path) -> dict[str, Json]:
    with suppress(OSError, ValueError, KeyError, TypeError):
        found = json.loads((folder / JUDGMENT).read_bytes())
        texts = ("client", "upload", "rule", "text")
        if all(isinstance(one[key], str) for one in found["suspicions"] for key in texts):
            return {"judged": dict(found["judged"]), "suspicions": list(found["suspicions"])}
    return {"judged": {}, "suspicions": []}


def refuse_unusable(found: Sequence[Mapping[str, Json]]) -> None:
    """An upload whose numbers no images can have is no matter of opinion."""
    for one in found:
        if one["rule"] == "unusable":
            client = str(one["client"])
            raise RoundError(str(one["text"]), client=client, field="upload", fix=go_on_without(client))


def ask(found: Sequence[Mapping[str, Json]], keep: Collection[ClientId], folder: Path) -> None:
    """Stop the server phase until the coordinator has decided about everybody who is suspected."""
    open_ones = sorted({str(one["client"]) for one in found} - set(keep))
    if not open_ones:
        return
    texts = [f"{one['client']} {one['text']} ({one['rule']})" for one in found if one["client"] in open_ones]
    command, first = f"osfl server {folder} --key server.key", open_ones[0]
    raise RoundError(
        f"the server phase waits for a decision: {'; '.join(texts)}",
        client=first if len(open_ones) == 1 else None,
        field=UNDECIDED,
        expected="uploads that agree with each other",
        got=f"{len(open_ones)} that do not",
        fix=f"Ask the site what happened. Then leave it out, `{command} --exclude {first}`, or keep it, `{command} --keep "
        f"{first}`. The server signs what you decide.",
    )


def rules(found: Sequence[Mapping[str, Json]], client: ClientId) -> list[str]:
    """By what rules a site is suspected, for the journal: the texts may name others, who may want to be forgotten."""
    return sorted({str(one["rule"]) for one in found if one["client"] == client})
