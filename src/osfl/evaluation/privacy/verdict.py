"""What an audit found, in sentences: for each party what it can learn, and what was not shown."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from osfl.core.result import Audit, Membership
from osfl.core.types import Dataset

_STRONG = 0.1  # share of members found at 1 % false positives, from which membership counts as easily told
_SURE = 0.8  # area under the curve from which the same is said
_READ = 0.2  # distance ratio below which an image was read out, as for the egress check (osfl.rounds.exposure)
_WHO = {
    "server": "Who sees the uploads (a curious server)",
    "peers": "Another site, which gets the uploads,",
    "outsider": "Whoever has the released model",
}


class Asked(Protocol):
    @property
    def data(self) -> Dataset: ...


def population(pools: Sequence[Asked], shadows: int) -> str:
    """Who members and non-members are, and what the attacker knows."""
    images = sum(len(pool.data) for pool in pools) // 2
    text = (
        f"{images} training images, and as many of the same classes from the sites' validation parts and the test set: "
        "images like theirs that nobody trained on"
    )
    knows = "; the attacker knows plan, seed and all other images of a site" if shadows else "; the attacker has no shadows"
    return text + knows


def verdict(found: Audit, party: str) -> list[str]:
    """A sentence for each party that has something to look at, and for what else was learned."""
    sentences = [_membership(who, rows) for who in _WHO if (rows := [r for r in found["membership"] if r["party"] == who])]
    if found["canaries"]:
        planted = max(found["canaries"], key=lambda row: row["found"])
        enough = planted["found"] >= 0.9 * planted["planted"]
        sentences.append(
            f"Of {planted['planted']} mislabeled images that were planted into one upload the audit found {planted['found']}: "
            + ("it is able to see what was learned by heart." if enough else "it would miss much of what was learned.")
        )
    near = [row for row in found["rebuilt"] if row["ratio"] < 0.5]
    if near:
        sentences.append(f"Images made from {len(near)} upload(s) are far nearer to training images than to others: copies.")
    elif found["rebuilt"]:
        sentences.append("Images made from the uploads are no copies of training images.")
    read = [row for row in found["readout"] if row["ratio"] < _READ]
    if read:
        kinds, uploads = ", ".join(sorted({row["what"] for row in read})), len({row["of"] for row in read})
        sentences.append(
            f"Images or their features can be read out of {uploads} upload(s): a {kinds} is far nearer to one training image "
            "than to others."
        )
    inferred = [row for row in found["shares"] if row["how"] != "sent in the clear" and row["distance"] < 0.5 * row["blind"]]
    if any(row["how"] == "sent in the clear" for row in found["shares"]):
        sentences.append("How many images of each class a site has is sent in the clear.")
    elif inferred:
        sentences.append("The shares of the classes at a site can be told from its upload.")
    if found["replayed"]:
        sentences.append(
            "Who guesses all images of a site can check the guess: with the plan's seed its upload repeats bit by bit."
        )
    return sentences or ["Nothing leaves the sites that says anything about single images."]


def _membership(party: str, rows: Sequence[Membership]) -> str:
    whole = [row for row in rows if row["of"] == "all"]
    best = max(whole, key=lambda row: row["auc"]["value"])
    rates = [rate for row in whole if (rate := row["tpr"].get("0.01")) is not None]
    rate = max(rates, key=lambda one: one["value"], default=None)
    few = "" if rate is None else f", and {100 * rate['value']:.0f} % of them at 1 % false positives"
    figures = f"area under the curve {best['auc']['value']:.2f} by {best['attack']}{few}"
    if best["auc"]["low"] >= _SURE or (rate is not None and rate["low"] >= _STRONG):
        return f"{_WHO[party]} can tell many of the training images: {figures}."
    if best["auc"]["low"] > 0.5:
        return f"{_WHO[party]} can tell training images better than by chance: {figures}."
    return f"{_WHO[party]} could not tell training images by these attacks: {figures}."


def not_shown(found: Audit, slow: bool, masked: bool, reference: bool) -> list[str]:
    """What was not tried, or cannot be told from so few images."""
    others = max((row["others"] for row in found["membership"]), default=0)
    sentences = ["All figures are lower bounds: other attacks, more shadows or other images may find more."]
    if found["membership"] and others < 1000:
        sentences.append(f"True positives at 0.1 % false ones: {others} non-members are too few to tell.")
    if not found["shadows"]:
        sentences.append("No attack with shadows was tried, only thresholds.")
    if slow:
        sentences.append("The released model was attacked without shadows: its server phase takes too long to be repeated.")
    if masked:
        sentences.append("Uploads are masked: the server sees their sum alone, which was not attacked on its own.")
    if reference:
        sentences.append("This reference sends models many times; only the released one was attacked.")
    sentences.append("Several images of one person, and what several rounds show together, were not attacked.")
    return sentences
