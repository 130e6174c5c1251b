"""Findings about a bundle without attacking it, each with its severity and what to do.

`serious`: do not send or use it. `caution`: somebody should decide. `note`: good to know. `good`: was checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from osfl.core.errors import Rejected
from osfl.core.names import shown
from osfl.core.types import Json, Limits
from osfl.roles.inspection.known import Known
from osfl.roles.inspection.numbers import Numbers
from osfl.roles.inspection.tensor_descriptions import Description
from osfl.wire.bundle import TensorEntry
from osfl.wire.contract import check_contract
from osfl.wire.facts import architecture_of, check_well_known
from osfl.wire.values import FLOATS
from osfl.wire.window import Seen

Severity: TypeAlias = Literal["serious", "caution", "note", "good"]
SEVERITIES: tuple[Severity, ...] = ("serious", "caution", "note", "good")
FEW = 2  # images of a class that may point to single persons
SMALL = 20  # training images that a network can memorize
LONG_TEXT = 80
LARGE_FACTS = 4096
USUAL_FACTS = {"samples", "class_counts", "architecture", "keys"}


@dataclass(frozen=True)
class Finding:
    severity: Severity
    check: str  # what was looked at
    message: str  # what was found
    todo: str = ""

    def as_json(self) -> dict[str, Json]:
        return {"severity": self.severity, "check": self.check, "message": self.message, "todo": self.todo}


@dataclass(frozen=True)
class Material:
    """A bundle that was looked at, and what is known about its round."""

    seen: Seen
    known: Known
    described: Mapping[str, Description]
    numbers: Mapping[str, Numbers]

    def named(self, kind: str) -> list[str]:
        return [name for name, role in self.described.items() if role.kind == kind]

    def image_long(self) -> list[str]:
        """Tensors of floats, other than pictures, with rows as long as an image of the round."""
        pixels, pictures = math.prod(self.known.image), set(self.named("pictures"))
        floats = {name: raw.shape for name, raw in self.seen.bundle.tensors.items() if raw.dtype in FLOATS and raw.shape}
        return [
            name
            for name, shape in floats.items()
            if self.known.image and name not in pictures and pixels in (shape[-1], math.prod(shape[1:]))
        ]


def findings(material: Material) -> list[Finding]:
    """All of them, the most serious first."""
    found = [finding for check in _CHECKS for finding in check(material)]
    return sorted(found, key=lambda finding: SEVERITIES.index(finding.severity))


# --- who made it, and for what ----------------------------------------------------------------------------------------


def _signature(m: Material) -> Iterator[Finding]:
    key, whose = m.known.key_for(m.seen.bundle)
    if not key:
        yield Finding(
            "caution",
            "Signature",
            "WHO MADE THIS FILE IS NOT KNOWN. It carries a signature, but no key to check it "
            "with was given, so everything below is only what the file claims.",
            "Name the signer's public key with --key, or the round with --round.",
        )
    elif m.seen.signed_by(key):
        yield Finding("good", "Signature", f"Signed with {whose} ({key[:16]}…). Nothing was changed since.")
    else:
        yield Finding(
            "serious",
            "Signature",
            f"THE SIGNATURE IS NOT BY {whose.upper()} ({key[:16]}…). Somebody else made this "
            "file, or it was changed afterwards.",
            "Do not use it; ask its sender for the original.",
        )


def _integrity(m: Material) -> Iterator[Finding]:
    for no in m.seen.doubts:
        yield Finding("serious", "Integrity", f"The file is damaged or was rewritten: {no.reason}.", no.fix or "")
    if not m.seen.doubts:
        yield Finding("good", "Integrity", "Every tensor matches the list in the file, and nothing else is in it.")


def _round(m: Material) -> Iterator[Finding]:
    if m.known.plan is None:
        return
    if m.seen.bundle.plan != m.known.round:
        yield Finding(
            "serious",
            "Round",
            f"It was made for round {m.seen.bundle.plan[:16]}…, not for {m.known.round[:16]}…, which is {m.known.place}.",
            "Use the plan that everybody agreed on.",
        )
        return
    yield Finding("good", "Round", f"It belongs to the round {m.known.place}.")
    if m.seen.bundle.kind == "upload" and m.seen.bundle.client not in m.known.plan["clients"]:
        yield Finding("serious", "Sender", f"{m.seen.bundle.client!r} is no client of this round.")


def _withdrawn(m: Material) -> Iterator[Finding]:
    why = m.known.withdrawal_of(m.seen)
    if why is not None:
        yield Finding("serious", "Forgotten", f"It was {why}.", "Do not use it; delete this copy.")
    elif m.known.withdrawn.certificates:
        yield Finding("good", "Forgotten", f"No certificate of forgetting ({m.known.withdrawn.certificates} read) withdrew it.")


def _contract(m: Material) -> Iterator[Finding]:
    """Only uploads have a contract; a release is what the server made."""
    if m.known.plan is None or not m.known.contracts or m.seen.bundle.kind != "upload":
        return
    try:
        facts = dict(m.seen.bundle.facts)
        lines = {name: TensorEntry(raw.dtype, raw.shape, "") for name, raw in m.seen.bundle.tensors.items()}
        check_contract(lines, m.known.contracts[architecture_of(facts, m.known.contracts)])
        check_well_known(facts, len(m.known.classes), m.known.limits or Limits(), m.known.several)
    except Rejected as no:
        yield Finding(
            "serious",
            "Contents",
            f"It holds something else than the method announces: {no.reason} (expected {no.expected}, got {no.got}).",
            no.fix or "",
        )
    else:
        yield Finding(
            "good",
            "Contents",
            f"It holds exactly the tensors that the method {m.known.plan['method']} announces, and no other.",
        )


# --- what it reveals about people -------------------------------------------------------------------------------------


def _pictures(m: Material) -> Iterator[Finding]:
    names = m.named("pictures")
    if names:
        many = sum(m.seen.bundle.tensors[name].shape[0] for name in names)
        yield Finding(
            "caution",
            "Pictures",
            f"{many:,} pictures are inside, in {_listed(names)}. They should be synthetic.",
            "Look at them below: nobody should be recognizable.",
        )
    elif m.known.image and not m.image_long():
        yield Finding("good", "Pictures", "No tensor has the shape of the round's images, or rows as long as one.")


def _image_long(m: Material) -> Iterator[Finding]:
    """Means and directions of generators have a number for each pixel: what rests on few images can be one of them."""
    if names := m.image_long():
        yield Finding(
            "note",
            "Image-long rows",
            f"{_listed(names)}: a number for each pixel of an image. Averages over many "
            "images look like this, and so does a single image.",
            "Give --data to compare them with your images.",
        )


def _class_counts(m: Material) -> Iterator[Finding]:
    counts = _counts(m)
    if counts is None:
        return
    yield Finding("note", "Images by class", f"The number of training images of each class leaves: {_counted(counts)}.")
    few = {name: n for name, n in counts.items() if 0 < n <= FEW}
    if few:
        yield Finding(
            "caution",
            "Rare classes",
            f"Of some classes there are only one or two images: {_counted(few)}. With other "
            "knowledge such a count can point to a person.",
            "Ask whether these cases may be known to exist here.",
        )
    held = [name for name, n in counts.items() if n]
    if len(held) == 1:
        yield Finding(
            "caution",
            "One class",
            f"All training images are of one class, {held[0]!r}. Whatever is learned about "
            "this upload is learned about these persons.",
        )


def _samples(m: Material) -> Iterator[Finding]:
    samples = m.seen.bundle.facts.get("samples")
    if type(samples) is not int:
        return
    yield Finding("note", "Images", f"According to its facts, {samples:,} training images were used.")
    if 0 < samples < SMALL:
        yield Finding(
            "caution",
            "Few images",
            f"It was trained on {samples} images only. Networks can memorize so few, "
            "and what they memorize can be extracted from them.",
            "Consider not to take part with so few.",
        )
    capacity = _capacity(m, samples)
    if capacity:
        yield Finding("note", "Size", capacity)


def _capacity(m: Material, samples: int) -> str:
    """A message smaller than a single image can hold none; a larger one than all of them could hold them all."""
    if not m.known.image or samples < 1 or m.seen.bundle.kind != "upload":
        return ""
    channels, height, width = m.known.image
    one, sent = channels * height * width, sum(len(raw.data) for raw in m.seen.bundle.tensors.values())
    if sent < one:
        return "The tensors together are smaller than a single image."
    return f"The tensors take as many bytes as {sent / one:,.0f} raw images of this round; it was trained on {samples:,}."


def _statistics(m: Material) -> Iterator[Finding]:
    names = m.named("statistics")
    if names:
        yield Finding(
            "note",
            "Averages",
            f"{len(names)} tensors are averages and spreads over the training images, as normal "
            "for networks with batch normalization. They describe all images together, not one of them.",
        )


def _features(m: Material) -> Iterator[Finding]:
    """A sum over one image is that image's features."""
    if not m.named("features"):
        return
    single = {name: n for name, n in (_counts(m) or {}).items() if n == 1}
    if single:
        yield Finding(
            "caution",
            "Sums",
            f"It holds sums of features. Of some classes there is a single image: {_counted(single)}. "
            "The sum of such a class is all that the network sees in this one image.",
            "Consider to leave these images out.",
        )
    else:
        yield Finding(
            "note",
            "Sums",
            "It holds sums of features over the images of each class. Who knows all images of a "
            "class but one can compute what the network sees in that one.",
        )


def _labels(m: Material) -> Iterator[Finding]:
    for name in m.named("labels"):
        yield Finding("note", "Labels", f"{name!r} gives a class to each of {m.seen.bundle.tensors[name].shape[0]:,} items.")


# --- what is odd about it ----------------------------------------------------------------------------------------------


def _finite(m: Material) -> Iterator[Finding]:
    bad = {name: numbers.not_finite for name, numbers in m.numbers.items() if numbers.not_finite}
    for name, many in bad.items():
        yield Finding(
            "serious",
            "Numbers",
            f"{name!r} holds {many:,} values that are not numbers (NaN or infinite). Every coordinator will refuse it.",
            "Training diverged: lower the learning rate and train again.",
        )
    if not bad:
        yield Finding("good", "Numbers", "All numbers are finite.")


def _masked(m: Material) -> Iterator[Finding]:
    if m.named("masked"):
        yield Finding(
            "note",
            "Masked",
            "The numbers are masked for a secure sum: only the sum over all sites means something. What they would show was "
            "checked at the site before it was masked, and cannot be seen in this file.",
            f"Compare the digest of the keys with the other sites: {shown(m.seen.bundle.facts.get('keys', 'missing'))}.",
        )


def _facts(m: Material) -> Iterator[Finding]:
    for name, value in m.seen.bundle.facts.items():
        text = _longest_text(value)
        if len(text) > LONG_TEXT or (name not in USUAL_FACTS and len(str(value)) > LARGE_FACTS):
            yield Finding(
                "caution",
                "Text",
                f"The fact {name!r} is long ({len(str(value)):,} characters). Text can hold anything, also names.",
                "Read it below before it leaves.",
            )
    strange = sorted(set(m.seen.bundle.facts) - USUAL_FACTS)
    if strange and m.seen.bundle.kind == "upload":
        yield Finding("note", "Facts", f"Besides the usual facts it holds {_listed(strange)}; see below.")


def _size(m: Material) -> Iterator[Finding]:
    limits = m.known.limits
    if limits and m.seen.bundle.kind == "upload" and m.seen.size > limits.upload_bytes:
        yield Finding(
            "serious",
            "Size",
            f"With {m.seen.size:,} bytes it is larger than the plan allows ({limits.upload_bytes:,} bytes).",
            "Every coordinator will refuse it.",
        )
    odd = [name for name in m.named("numbers") if len(m.seen.bundle.tensors[name].data) > 1 << 20]
    if odd:
        yield Finding(
            "caution",
            "Size",
            f"{_listed(odd)}: more than a megabyte each, and this program does not know what they are.",
            "Ask the method's authors what these tensors are.",
        )


def _origin(m: Material) -> Iterator[Finding]:
    made_from = [name.removeprefix("upload/") for name in m.seen.bundle.made_from if name.startswith("upload/")]
    if made_from:
        yield Finding("note", "Origin", f"The server made it from the uploads of {_listed(made_from)}.")


_CHECKS: tuple[Callable[[Material], Iterator[Finding]], ...] = (
    _signature,
    _integrity,
    _round,
    _withdrawn,
    _contract,
    _pictures,
    _image_long,
    _class_counts,
    _samples,
    _statistics,
    _features,
    _labels,
    _finite,
    _masked,
    _facts,
    _size,
    _origin,
)


# --- what nobody looked at ---------------------------------------------------------------------------------------------


def not_checked(m: Material, data_checked: bool, attacked: bool) -> list[str]:
    """As important as the findings: a page without findings is not a proof."""
    found = []
    if m.known.plan is None:
        found.append("Whether it belongs to your round and holds what its method announces: no plan was given (option --plan).")
    if m.named("masked"):
        found.append("Whether a training image can be read out: the numbers are masked. The site compared them before that.")
    elif not data_checked:
        found.append(
            "Whether a training image is inside or can be read out: no images were given to compare with (option --data)."
        )
    else:
        found.append(
            "Whether a training image is inside in disguise: cropped, turned, compressed, or spread over tensors. "
            "Copies were looked for up to brightness and contrast, where rows have the size of an image."
        )
    found.append(
        "Whether images can be reconstructed in other ways: only what stands in the figures was compared with your images."
        if attacked
        else "Whether images can be reconstructed from these numbers: no attack was tried."
    )
    return [
        *found,
        "Whether somebody could find out that a certain person's image was used (membership), or guess something about that "
        "person (attributes). This needs attacks, which were not tried.",
        "Whether a message is hidden in the numbers, or whether they were chosen to do harm.",
    ]


# --- text -------------------------------------------------------------------------------------------------------------


def _counts(m: Material) -> dict[str, int] | None:
    """Images by class, with the classes' names where they are known."""
    counts = m.seen.bundle.facts.get("class_counts")
    if not isinstance(counts, list) or not all(type(n) is int for n in counts):
        return None
    names = m.known.classes if len(m.known.classes) == len(counts) else tuple(f"class {i}" for i in range(len(counts)))
    return dict(zip(names, counts, strict=True))


def _counted(counts: Mapping[str, int]) -> str:
    shown = [f"{name} {n:,}" for name, n in list(counts.items())[:12]]
    return ", ".join(shown) + (f" and {len(counts) - 12} more" if len(counts) > 12 else "")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


def _longest_text(value: Json) -> str:
    if isinstance(value, str):
        return value
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return max((_longest_text(item) for item in inside), key=len, default="")
