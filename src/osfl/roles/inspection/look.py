"""`look`: everything there is to say about one bundle, as plain values that pages and scripts show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from osfl.core.types import Json
from osfl.roles.inspection.findings import SEVERITIES, Finding, Material, findings, not_checked
from osfl.roles.inspection.known import Known
from osfl.roles.inspection.numbers import numbers_of
from osfl.roles.inspection.own_images import compare, ratio_chart
from osfl.roles.inspection.pictures import cautions, galleries, histograms, previews
from osfl.roles.inspection.tensor_descriptions import describe_masked, describe_tensor, owner_of
from osfl.wire.bundle import Bundle
from osfl.wire.masks import COMMITMENTS
from osfl.wire.source import BytesLike
from osfl.wire.window import look_at

_FACTS = {
    "samples": "number of training images",
    "class_counts": "number of training images of each class",
    "architecture": "the kind of network",
    "keys": "digest of all sites' public keys, with which this upload was masked",
}
_HOLDS = {
    "weights": "weights of {owner}",
    "statistics": "averages over the training images in {owner}",
    "counter": "counters in {owner}",
    "pictures": "PICTURES in {owner}",
    "tokens": "tokens in {owner}",
    "labels": "labels in {owner}",
    "features": "sums of features of the training images in {owner}",
    "masked": "numbers of {owner}, masked for a secure sum",
    "numbers": "numbers in {owner} whose meaning is not known",
}


class Look(TypedDict):
    """What `osfl inspect --format json` prints."""

    file: str
    bytes: int
    digest: str  # identity of the contents
    kind: str  # upload, release, personal
    sender: str
    receiver: str
    round: str  # digest of the plan that the bundle names
    method: str  # "" if no plan is known
    description: str
    summary: list[str]  # what this is, a sentence each
    groups: list[dict[str, Json]]  # owner, kind, what, tensors, numbers, bytes
    tensors: list[dict[str, Json]]
    facts: list[dict[str, Json]]
    made_from: dict[str, str]
    findings: list[dict[str, Json]]
    not_checked: list[str]
    ratios: list[dict[str, Json]]  # what the reconstruction attack found in each class (osfl.rounds.exposure)
    figures: dict[str, Json]  # as osfl.reports.figures describes


def look(source: BytesLike | Path, known: Known, *, name: str, data: Path | None = None, draw: bool = True) -> Look:
    """`data` are the reader's own images; `draw` asks for pictures, which may need the method and so torch."""
    seen = look_at(source)
    bundle = seen.bundle
    masked = COMMITMENTS in bundle.tensors
    described = {
        n: describe_masked(n) if masked else describe_tensor(n, raw.dtype, raw.shape, known.image)
        for n, raw in bundle.tensors.items()
    }
    material = Material(seen, known, described, {n: numbers_of(raw) for n, raw in bundle.tensors.items()})
    found = findings(material)
    plan = known.whole_plan() if (data is not None or draw) and not masked else None
    compared = compare(bundle, plan, data, attacks=_is_sound(found)) if plan is not None and data is not None else None
    found += compared.findings if compared else []
    found += cautions(bundle, plan) if plan is not None and _is_sound(found) else []
    attacked = compared.ratios if compared else []
    unknown = (compared.problems if compared else []) + not_checked(material, compared is not None, bool(attacked))
    figures: dict[str, Json] = {}
    if draw:
        figures = ratio_chart(attacked, known.classes) | galleries(material)
        if plan is not None and _is_sound(found):
            drawn, problems = previews(bundle, plan)
            figures, unknown = {**drawn, **figures}, problems + unknown
        figures |= histograms(material)
    method = "" if known.plan is None else str(known.plan["method"])
    groups = _groups(material)
    found.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    return {
        "file": name,
        "bytes": seen.size,
        "digest": bundle.digest,
        "kind": bundle.kind,
        "sender": bundle.client if bundle.kind == "upload" else "the server",
        "receiver": {"upload": "the server", "release": "all sites"}.get(bundle.kind, bundle.client),
        "round": bundle.plan,
        "method": method,
        "description": _description(method),
        "summary": _summary(bundle, groups, material),
        "groups": groups,
        "tensors": _tensors(material),
        "facts": _facts(material),
        "made_from": dict(bundle.made_from),
        "findings": [finding.as_json() for finding in found],
        "not_checked": unknown,
        "ratios": [ratio.as_json() for ratio in attacked],
        "figures": figures,
    }


def worst(look: Look) -> str:
    """The severity of the most serious finding."""
    return str(look["findings"][0]["severity"]) if look["findings"] else "good"


def _is_sound(found: Sequence[Finding]) -> bool:
    """Whether the method's own code may be shown this bundle: only what its round would accept."""
    return not any(finding.severity == "serious" for finding in found)


def _description(method: str) -> str:
    from osfl.core.registry import describe, names

    return describe(method) if method in names() else ""


# --- as text ----------------------------------------------------------------------------------------------------------


def _summary(bundle: Bundle, groups: Sequence[dict[str, Json]], m: Material) -> list[str]:
    """What this is, for somebody who has never seen one."""
    purpose = {
        "upload": f"This is the one message that {bundle.client!r} sends to the server in this round.",
        "release": "This is what the server gives back to all sites.",
        "personal": f"This is the personal part of the release for {bundle.client!r}.",
    }[bundle.kind]
    many = sum(numbers.count for numbers in m.numbers.values())
    groups = [group for group in groups if group["kind"] != "counter"]  # they are in the table; here they would hide the rest
    holds = "; ".join(f"{group['what']} ({group['numbers']:,} numbers)" for group in groups[:6])
    more = f"; and {len(groups) - 6} more groups" if len(groups) > 6 else ""
    contents = f"It holds {many:,} numbers: {holds}{more}." if groups else "It holds no tensor."
    return [purpose, contents, _about_images(m)]


def _about_images(m: Material) -> str:
    if m.named("pictures"):
        return "There are pictures in it; see below."
    if m.image_long():
        return "It holds no tensor of pictures, but rows as long as an image of this round, which can be images; see below."
    if m.known.image:
        return "It holds no picture: no tensor has the shape of an image of this round, or rows as long as one."
    return "Whether it holds pictures is not known without the plan, which gives the image size."


def _groups(m: Material) -> list[dict[str, Json]]:
    """Tensors by what they belong to and what they are, in the order of their names."""
    members: dict[tuple[str, str], list[str]] = {}
    for name, role in m.described.items():
        members.setdefault((owner_of(name, m.known.classes), role.kind), []).append(name)
    return [
        {
            "owner": owner,
            "kind": kind,
            "what": _HOLDS[kind].format(owner=f"the {owner}"),
            "tensors": len(names),
            "numbers": sum(m.numbers[name].count for name in names),
            "bytes": sum(len(m.seen.bundle.tensors[name].data) for name in names),
        }
        for (owner, kind), names in members.items()
    ]


def _tensors(m: Material) -> list[dict[str, Json]]:
    return [
        {
            "name": name,
            "kind": m.described[name].kind,
            "what": m.described[name].what,
            "dtype": raw.dtype,
            "shape": list(raw.shape),
            "bytes": len(raw.data),
            **m.numbers[name].as_json(),
        }
        for name, raw in m.seen.bundle.tensors.items()
    ]


def _facts(m: Material) -> list[dict[str, Json]]:
    return [
        {"name": name, "value": value, "what": _FACTS.get(name, "set by the method")}
        for name, value in m.seen.bundle.facts.items()
    ]
