"""Signed result summaries: what a site's evaluation found, a few numbers in one small JSON file. No image and no tensor moves.

{"summary": {...}, "signature": hex}     Ed25519 over the canonical JSON of the summary, by the site's enrolled key
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path

from osfl.core.errors import Rejected
from osfl.core.evaluated import Evaluation
from osfl.core.headline import CHOICES
from osfl.core.names import is_client_id, is_digest, shown
from osfl.core.types import ClientId, Json, canonical, digest_of
from osfl.wire import strict_json
from osfl.wire.signing import SigningKey, VerifyKey

LARGEST = 1 << 20
FEWEST = 10  # images of a class: with fewer, neither their number nor a score of them leaves the site
_FORMAT, _WHAT = 1, "osfl result summary"
_KEYS = {"format", "what", "round", "client", "weights", "part", "images", "headline", "majority", "metrics", "classes"}
_METRICS = ("accuracy", "balanced_accuracy", "auroc", "f1", "ece", "nll")
_SEVERAL = ("ap", "auroc_micro", "ap_micro", "f1_micro")  # of multi-label rounds besides
_PARTS = ("test", "validation", "all")
_AGAIN = "Make it again at the site: `osfl evaluate MODEL --data DIR --client NAME --key NAME.key`."


class SummaryRejected(Rejected):
    """A summary that is not from an enrolled site of this round, or no summary; nothing of it was used."""

    title = "Result summary rejected from"


def summary_of(evaluation: Evaluation, client: ClientId) -> dict[str, Json]:
    """What leaves the site: scores with intervals, the number of images, and of each class with at least ten its recall."""
    classes = {
        name: {"images": scored["images"], "recall": dict(scored["recall"])} if scored["images"] >= FEWEST else None
        for name, scored in evaluation["per_class"].items()
    }
    metrics = [name for name in (*_METRICS, *_SEVERAL) if name in evaluation["metrics"]]
    return {
        "format": _FORMAT,
        "what": _WHAT,
        "round": str(evaluation["model"].get("round", "")),
        "client": client,
        "weights": str(evaluation["model"]["weights"]),
        "part": str(evaluation["data"]["part"]),
        "images": int(evaluation["data"]["images"]),
        "headline": evaluation["headline"],
        "majority": evaluation["majority"],
        "metrics": {name: dict(evaluation["metrics"][name]) for name in metrics},
        "classes": classes,
    }


def sign_summary(summary: Mapping[str, Json], key: SigningKey) -> bytes:
    signed = {"summary": dict(summary), "signature": key.sign(canonical(dict(summary)))}
    return (json.dumps(signed, indent=1, sort_keys=True) + "\n").encode()


def read_summary(path: Path, enrolled: Mapping[ClientId, str], plan: str) -> dict[str, Json]:
    """A summary that an enrolled site signed for this round; anything else is refused, and said why."""
    with path.open("rb") as file:
        data = file.read(LARGEST + 1)
    if len(data) > LARGEST:
        raise _no("size", "the file is too large for a summary", f"at most {LARGEST:,} bytes", f"more, in {path.name}")
    try:
        found = strict_json.parse(data)
        summary, signature, client = found["summary"], found["signature"], found["summary"]["client"]
    except (ValueError, KeyError, TypeError):
        raise _no("summary", f"{path.name} is no signed summary", "summary and signature", data[:40]) from None
    if not is_client_id(client) or client not in enrolled:
        raise _no("client", "nobody of this name is enrolled in this round", " or ".join(sorted(enrolled)), client)
    right = isinstance(signature, str) and VerifyKey(enrolled[client]).verify(canonical(summary), signature)
    if not right:
        raise _no(
            "signature", "it is not signed with the key that is enrolled for this site", "its signature", signature, client
        )
    if summary.get("round") != plan:
        raise _no("round", "the summary is of another round", plan, summary.get("round"), client)
    _check(summary, client)
    return dict(summary)


def digest_of_summary(summary: Mapping[str, Json]) -> str:
    return digest_of(dict(summary))


def _check(summary: Mapping[str, Json], client: ClientId) -> None:
    """A signature says who wrote it, not that it makes sense."""
    if set(summary) != _KEYS or summary["format"] != _FORMAT or summary["what"] != _WHAT:
        raise _no("summary", "the summary is malformed", ", ".join(sorted(_KEYS)), ", ".join(map(str, summary)), client)
    for key, good in (
        ("weights", is_digest(summary["weights"])),
        ("part", summary["part"] in _PARTS),
        ("images", type(summary["images"]) is int and 0 < summary["images"] < 10**9),
        ("headline", summary["headline"] in CHOICES),
        ("majority", _share(summary["majority"])),
        ("metrics", _metrics(summary["metrics"])),
        ("classes", _classes(summary["classes"])),
    ):
        if not good:
            raise _no(key, "the value is not possible", "as `osfl evaluate` writes it", summary[key], client)


def _number(value: Json) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _share(value: Json) -> bool:
    return _number(value) and 0 <= value <= 1


def _estimate(value: Json, most: float = 1.0) -> bool:
    return (
        isinstance(value, dict)
        and set(value) == {"value", "low", "high"}
        and all(one is None or (_number(one) and 0 <= one <= most) for one in value.values())
    )


def _metrics(value: Json) -> bool:
    return (
        isinstance(value, dict)
        and set(value) in ({*_METRICS}, {*_METRICS, *_SEVERAL})
        and all(_estimate(one, 1e3 if name == "nll" else 1.0) for name, one in value.items())
    )


def _classes(value: Json) -> bool:
    return isinstance(value, dict) and all(
        one is None
        or (
            isinstance(one, dict)
            and set(one) == {"images", "recall"}
            and type(one["images"]) is int
            and _estimate(one["recall"])
        )
        for one in value.values()
    )


def _no(field: str, reason: str, expected: object, got: object, client: ClientId | None = None) -> SummaryRejected:
    return SummaryRejected(reason, client=client, field=field, expected=expected, got=shown(got), fix=_AGAIN)
