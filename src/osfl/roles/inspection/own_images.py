"""Compare a bundle with the reader's own images: search for copies, and run the egress check's attack on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from osfl.core.errors import OsflError, UploadBlocked
from osfl.core.types import Json, Plan, Shard
from osfl.roles.inspection.findings import Finding
from osfl.roles.inspection.pictures import payload_of
from osfl.wire.bundle import Bundle

if TYPE_CHECKING:
    from osfl.rounds.exposure import Ratio

_CHECK, _SPAN = "Reconstruction", "Membership"


@dataclass(frozen=True)
class Compared:
    """What comparing with the reader's images gave."""

    findings: list[Finding]
    ratios: list[Ratio] = field(default_factory=list)  # none: the attack was not made
    problems: list[str] = field(default_factory=list)  # why it could not be made


def compare(bundle: Bundle, plan: Plan, data: Path, *, attacks: bool) -> Compared:
    """`attacks`: ask the method's own code what can be read out, as the egress check does; only for a sound bundle."""
    from osfl.roles.site import open_shard

    shard = open_shard(plan, bundle.client or "reader", data)
    copies = _copies(bundle, plan, shard)
    if not attacks or copies.severity == "serious" or bundle.kind != "upload":
        return Compared([copies])
    try:
        ratios = _ratios(bundle, plan, shard)
    except (OsflError, ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:  # strange, but well formed
        return Compared([copies], problems=[f"The reconstruction attack failed ({type(error).__name__}: {error})."])
    return Compared([copies, *_judged(ratios, plan)], ratios)


def _copies(bundle: Bundle, plan: Plan, shard: Shard) -> Finding:
    """Whether a row that is as long as an image is one of the reader's own images."""
    from osfl.rounds.egress import check_no_image, image_rows

    payload, many = payload_of(bundle), len(shard.train) + len(shard.val)
    try:
        check_no_image(payload, shard, plan.task)
    except UploadBlocked as no:
        return Finding(
            "serious",
            "Your images",
            f"ONE OF YOUR IMAGES IS INSIDE, in {no.field!r}.",
            "Do not send it. This is a mistake in the method; please report it.",
        )
    rows = sum(len(tensor) for tensor in image_rows(payload, plan.task).values())
    if not rows:
        return Finding(
            "note", "Your images", f"No tensor has rows as long as an image: no copy of your {many:,} images was looked for."
        )
    return Finding(
        "good",
        "Your images",
        f"None of the {rows:,} rows that are as long as an image is a copy of one of your {many:,} images.",
    )


def _ratios(bundle: Bundle, plan: Plan, shard: Shard) -> list[Ratio]:
    import torch

    from osfl.core.method import Context
    from osfl.core.registry import load
    from osfl.rounds.exposure import attack

    method = load(plan.method)(plan.task, plan.settings)
    if not method.provides("exposed") or plan.privacy is not None:
        return []
    return attack(method.exposed(payload_of(bundle), shard, Context(plan, torch.device("cpu"))))


def _judged(ratios: Sequence[Ratio], plan: Plan) -> list[Finding]:
    """The least ratio as a finding, and what second moments show; nothing where nothing was tried."""
    from osfl.rounds.exposure import BOUND, accepted, compared, of_which, spanned, worst

    classes, most = plan.task.classes, worst(ratios)
    texts = ((_CHECK, accepted(ratios, classes)), (_SPAN, spanned(ratios)))
    decide = "Decide before you send it, with whoever made the plan."
    span = [Finding("caution", check, text, decide) for check, text in texts if text]
    if most is None:
        return span
    if most.ratio < BOUND:
        return [
            Finding(
                "serious",
                _CHECK,
                f"ONE OF YOUR IMAGES CAN BE READ OUT: a {most.what} of {of_which(most.label, classes)} is much nearer to a "
                f"training image than to images that were not used (distance ratio {most.ratio:.2f}, bound {BOUND}).",
                "Do not send it. Agree on a larger `least` in the plan; for sums, on `secure_sum = true` or `[privacy]`.",
            ),
            *span,
        ]
    return [Finding("good", _CHECK, compared(ratios, classes)), *span]


def ratio_chart(ratios: Sequence[Ratio], classes: Sequence[str]) -> dict[str, Json]:
    """The least ratio in each class, of the kinds of candidates that every class has."""
    found: dict[int, dict[str, float]] = {}
    for ratio in filter(lambda ratio: ratio.stops != "none" and ratio.label < len(classes), ratios):
        found.setdefault(ratio.label, {})[ratio.what] = round(ratio.ratio, 2)
    kinds = sorted(set.intersection(*(set(row) for row in found.values()))) if found else []
    if not kinds:
        return {}
    return {
        "What the reconstruction attack found": {
            "kind": "heatmap",
            "rows": [classes[label] for label in sorted(found)],
            "columns": list(kinds),
            "values": [[found[label][kind] for kind in kinds] for label in sorted(found)],
            "row_title": "class",
            "column_title": "read out of",
            "unit": "distance ratio",
            "note": "Distance to the nearest training image over the distance to images that were not used: 0 is a copy.",
        }
    }
