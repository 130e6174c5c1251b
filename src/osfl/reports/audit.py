"""The section of a report about privacy attacks (`osfl audit`), and the same for the model card."""

from __future__ import annotations

from typing import Any

from osfl.core.result import Audit, Canaries, Membership, Rate, Result
from osfl.reports.text import NOTHING, count, decimal, percent

WHO = {"server": "server, uploads", "peers": "other sites, uploads", "outsider": "anybody, release"}
_RATES = ("0.001", "0.01")


def audit_section(result: Result) -> dict[str, Any]:
    """What the template shows; nothing where no audit was made."""
    found = result.get("audit")
    if found is None:
        return {"audit": None}
    hint = (
        f"Membership: was this image in the training data? Asked of {found['population']}. Area: the chance that a member "
        "scores higher than a non-member; 0.5 is guessing. Found: the share of members above a threshold that 0.1 % or 1 % of "
        f"non-members pass; in brackets 95 % intervals. lira and rmia compare with {count(found['shadows'])} shadow rounds."
    )
    return {
        "audit": {
            "verdict": found["verdict"],
            "not_shown": found["not_shown"],
            "hint": hint,
            "membership": [membership_row(row) for row in found["membership"] if row["of"] == "all"],
            "by_client": [membership_row(row) for row in found["membership"] if row["of"] != "all"],
            "canaries": [canary_row(row) for row in found["canaries"]],
            "rebuilt": [_rebuilt_row(row) for row in found["rebuilt"]],
            "others": _others(found),
        }
    }


def membership_row(row: Membership) -> dict[str, Any]:
    return {
        "party": WHO[row["party"]],
        "of": row["of"],
        "attack": row["attack"] if row["attack"] == row["signal"] else f"{row['attack']} on {row['signal']}",
        "members": count(row["members"]),
        "auc": _with_interval(row["auc"]),
        "tpr": [_share(row["tpr"].get(rate)) for rate in _RATES],
    }


def _with_interval(rate: Rate) -> str:
    return f"{decimal(rate['value'])} ({decimal(rate['low'], 2)}–{decimal(rate['high'], 2)})"


def _share(rate: Rate | None) -> str:
    return NOTHING if rate is None else f"{percent(rate['value'])} ({100 * rate['low']:.0f}–{100 * rate['high']:.0f})"


def canary_row(row: Canaries) -> dict[str, str]:
    return {
        "signal": row["signal"],
        "found": f"{row['found']} of {row['planted']}",
        "false": _share(row["false_alarms"]),
        "before": f"{row['found_unplanted']} of {row['planted']}",
    }


def _rebuilt_row(row: Any) -> dict[str, str]:
    return {
        "of": row["of"],
        "how": row["how"],
        **{key: f"{row[key]['psnr']:.1f} / {row[key]['ssim']:.2f}" for key in ("by_original", "by_reconstruction", "blind")},
        "ratio": decimal(row["ratio"], 2),
    }


def _others(found: Audit) -> list[dict[str, str]]:
    """What else was learned about each client, in one table."""
    rows = [
        {
            "of": row["of"],
            "what": f"shares of the classes, {row['how']}: distance",
            "value": decimal(row["distance"], 2),
            "blind": decimal(row["blind"], 2),
        }
        for row in found["shares"]
    ]
    rows += [
        {"of": row["of"], "what": f"nearest {row['what']}: distance ratio", "value": decimal(row["ratio"], 2), "blind": "1.00"}
        for row in found["readout"]
    ]
    return rows + [
        {
            "of": row["of"],
            "what": f"presence in the round, from {row['images']} images: area",
            "value": decimal(row["auc"], 2),
            "blind": "0.50",
        }
        for row in found["presence"]
    ]


def audit_sentences(found: Audit) -> list[str]:
    """For the model card: verdict, the strongest attack of each party, and what was not shown."""
    lines = list(found["verdict"])
    for party, who in WHO.items():
        rows = [row for row in found["membership"] if row["party"] == party and row["of"] == "all"]
        if rows:
            best = membership_row(max(rows, key=lambda row: row["auc"]["value"]))
            lines.append(
                f"Membership inference by {who}, best of {len(rows)} attacks ({best['attack']}): area {best['auc']}, members "
                f"found at 0.1 % false positives {best['tpr'][0]}, at 1 % {best['tpr'][1]}; {best['members']} members"
            )
    return lines + [f"Not shown: {sentence}" for sentence in found["not_shown"]]
