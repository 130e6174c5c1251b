"""Repeat a server phase from the uploads of a round folder, and compare the release: bit for bit, else by number.

Bits are promised for the same build of osfl and torch and the same instruction set of the processor. Elsewhere an honest server
gets other last bits, so numbers decide. There are three answers: the same bits (yes), within tolerance, and different, which
proves no fraud.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeAlias

import torch

from osfl.core.method import quiet
from osfl.core.registry import one_shot
from osfl.core.types import Plan, Progress
from osfl.roles.coordinator import open_new, read_round_plan, receive
from osfl.rounds.folder import existing_round
from osfl.rounds.head import read_head
from osfl.rounds.phases import computing, run_server_phase
from osfl.rounds.provenance import CLOSE, DIFFERENT, Check
from osfl.rounds.state import read_policy
from osfl.rounds.storage import payload_of
from osfl.runtime.environment import numerics
from osfl.runtime.machine import Machine
from osfl.wire.bundle import Bundle
from osfl.wire.gate import verify_release
from osfl.wire.refusals import HEAD
from osfl.wire.signing import SigningKey

QUESTION = "the release follows from the uploads"
TOLERANCE = 1e-3


@dataclass(frozen=True)
class Difference:
    """The largest difference of two releases, as a share of the largest number of the same tensor."""

    tensor: str
    share: float


def replay(
    folder: Path, tolerance: float = TOLERANCE, machine: Machine = Machine(), progress: Progress = quiet
) -> tuple[Check, float | None]:
    """Whether the release of a round folder follows from its uploads, and the largest difference; None: not compared."""
    plan, policy = read_round_plan(folder), read_policy(folder)
    if why := _not_repeatable(plan, folder):
        return Check(QUESTION, "not checked", why), None
    release = verify_release(folder / "release.safetensors", policy.server, policy.plan, withdrawn=policy.withdrawn)
    uploads = {name.removeprefix("upload/") for name in release.made_from if name.startswith("upload/")}
    missing = sorted(client for client in uploads if not (folder / "inbox" / f"{client}.safetensors").exists())
    if missing or not uploads:
        return Check(
            QUESTION, "not checked", f"uploads are missing here: {', '.join(missing) or 'the release names none'}"
        ), None
    with TemporaryDirectory(prefix="osfl-replay-") as aside:
        again, key = Path(aside) / "round", SigningKey.generate()
        open_new(again, plan, policy.enrolled, key.public_hex)
        for client in sorted(uploads):
            receive(again, folder / "inbox" / f"{client}.safetensors")
        with existing_round(again, plan, key) as repeated, computing(plan, machine, progress, repeated.scratch) as ctx:
            run_server_phase(one_shot(plan), repeated, ctx, sorted(uploads))
        own = verify_release(again / "release.safetensors", key.public_hex, policy.plan)
        if own.digest == release.digest:
            return Check(QUESTION, "yes", "repeated here, to the same bits"), 0.0
        pairs = _pairs(folder, again, policy.server, key.public_hex, policy.plan, release, own)
        return _judged(pairs, tolerance, _computed(folder, policy.server))


def _not_repeatable(plan: Plan, folder: Path) -> str:
    if not (folder / "release.safetensors").exists():
        return "there is no release here"
    if plan.secure_sum:
        return "in a secure sum nobody has the uploads one by one"
    if plan.topology is not None:
        return "in a round without a server each site makes its own model"
    return ""


Tensors: TypeAlias = Mapping[str, torch.Tensor]
Pair: TypeAlias = tuple[str, Tensors, Tensors]


def _pairs(folder: Path, again: Path, server: str, own_server: str, plan: str, release: Bundle, own: Bundle) -> Iterator[Pair]:
    """Tensors of the shared part and of each personal one, as published and as repeated."""
    yield "", payload_of(release).tensors, payload_of(own).tensors
    for name in sorted(name for name in release.made_from if name.startswith("personal/")):
        file = f"{name}.safetensors"
        there, here = folder / file, again / file
        published = payload_of(verify_release(there, server, plan)).tensors if there.exists() else {}
        yield f"{name}/", published, payload_of(verify_release(here, own_server, plan)).tensors if here.exists() else {}


def _judged(pairs: Iterator[Pair], tolerance: float, server: Mapping[str, str]) -> tuple[Check, float | None]:
    """`server`: what it computed with."""
    largest = Difference("", 0.0)
    for part, published, repeated in pairs:
        if wrong := _shapes(published, repeated):
            return Check(QUESTION, "no", f"repeated here, {part}{wrong} is another tensor"), None
        found = largest_difference(published, repeated)
        largest = max(largest, Difference(part + found.tensor, found.share), key=lambda one: one.share)
    difference = f"{largest.share:.2g} of the largest number of {largest.tensor or 'no tensor'}"
    if largest.share <= tolerance:
        why = f"repeated here, other last bits: at most {difference}. {_where(server)}"
        return Check(QUESTION, CLOSE, why), largest.share
    why = (
        f"repeated here, it differs by {difference}, more than {tolerance:g}. That is no proof of fraud: long training drifts "
        f"from one kind of machine to another. {_where(server)}"
    )
    return Check(QUESTION, DIFFERENT, why), largest.share


def _computed(folder: Path, server: str) -> Mapping[str, str]:
    """Versions and instruction set that the server signed."""
    path = folder / HEAD
    return read_head(path, server).get("numerics", {}) if path.exists() else {}


def _where(server: Mapping[str, str]) -> str:
    """How the server's machine differs from this one, and what follows."""
    here = numerics()
    if not server:
        return "What the server computed with is not known: there is no head.json."
    other = [f"{name} {value}, here {here.get(name, 'none')}" for name, value in server.items() if here.get(name) != value]
    if other:
        return f"The server computed with {'; '.join(other)}. Repeat it there for the same bits."
    return "The server signed the same build and instruction set, which should give the same bits: ask for its device."


def _shapes(published: Tensors, repeated: Tensors) -> str:
    """The first tensor that is missing on one side or has another shape or type."""
    described = [{name: (value.shape, value.dtype) for name, value in one.items()} for one in (published, repeated)]
    return next((name for name in sorted({*published, *repeated}) if described[0].get(name) != described[1].get(name)), "")


def largest_difference(published: Tensors, repeated: Tensors) -> Difference:
    found = Difference("", 0.0)
    for name, value in published.items():
        if not value.numel():
            continue
        one, other = value.double(), repeated[name].double()
        scale = float(one.abs().max())
        gap = float((one - other).abs().max())
        found = max(found, Difference(name, gap / scale if scale else gap), key=lambda one: one.share)
    return found
