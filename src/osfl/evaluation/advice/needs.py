"""What a consortium allows and wants, and why a method is out of the question; checked before anything is ranked."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from osfl.core.errors import UsageError
from osfl.core.method import Method
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import Plan, Task
from osfl.evaluation.advice.known import Row

OF_THE_ROUND = ("topology", "encounters", "epsilon", "delta", "noise", "colluders")  # parts of a label, no settings
TASK = Task("advice", ("a", "b"), (3, 32, 32))  # what a method can do does not depend on it


@dataclass(frozen=True)
class Wants:
    """What a method must keep to. The defaults exclude nothing but what sends nothing."""

    encoder: bool = True  # sites may use published weights: an encoder, or a network to start from
    upload: float | None = None  # bytes that a site may send
    server_seconds: float | None = None
    server: bool = True  # there is one; without it neighbors exchange
    personal: bool = False  # each site wants a model of its own, judged on its own distribution
    forget_class: bool = False  # one class of one site can be removed later
    secure_sum: bool = False  # the server may see the sum of the uploads only
    epsilon: float | None = None  # differential privacy


@dataclass(frozen=True)
class Abilities:
    """What the code of a method with these settings can do."""

    sends: bool
    personal: bool  # sites end with models of their own, made with their images
    forgets_class: bool
    sum_problem: str  # why the release does not follow from a sum over the uploads; empty: it does
    private: bool  # sites may add noise for differential privacy
    relays: bool  # without a server


def settings_in(label: str) -> dict[str, str]:
    """What a label changes: `fol@align=false` as {align: false}."""
    return dict(part.split("=", 1) for part in label.split("@")[1:])


@cache
def abilities(label: str) -> Abilities:
    changes = settings_in(label)
    relays = "topology" in changes or label.startswith("fol")
    changes = {key: value for key, value in changes.items() if key not in OF_THE_ROUND}
    kind = load(label.partition("@")[0])
    method: Method = kind(TASK, resolve_settings(kind, "cpu", changes))
    return Abilities(
        sends=label.partition("@")[0] != "local_only",
        personal=method.needs_images_after_round(),
        forgets_class=method.separable(),
        sum_problem=_sum_problem(method, label),
        private=kind.provides("privacy_problems"),
        relays=relays,
    )


def _sum_problem(method: Method, label: str) -> str:
    """Why a plan with these settings may not have a secure sum, as the method states it; empty: it may."""
    try:
        method.summands(Plan(TASK, label.partition("@")[0], method.settings, ("north", "south")))
    except UsageError as error:
        if not method.provides("summands"):
            return "the server needs every upload, not only their sum"
        return f"{str(error.problems[0]).rpartition(': ')[2]}, which no committed record has"
    return ""


def excluded(label: str, wants: Wants, row: Row) -> str:
    """Why a method is out of the question, from its code and from what it needed in its nearest cell; empty: it is not."""
    can, upload, server, weights = abilities(label), row.upload, row.server, row.weights
    timed, epsilon = wants.server_seconds is not None, row.epsilon
    reasons: Mapping[str, bool] = {
        "sends nothing: it is training alone": not can.sends and not wants.personal,
        f"needs published weights ({weights})": bool(weights) and not wants.encoder,
        "gives all sites one model": wants.personal and not can.personal,
        "needs a server": not wants.server and not can.relays and can.sends,
        "an upload has no part of its own for each class": wants.forget_class and not can.forgets_class and can.sends,
        can.sum_problem: wants.secure_sum and bool(can.sum_problem),
        "has no noise for differential privacy": wants.epsilon is not None and not can.private,
        "no committed record has it with differential privacy": wants.epsilon is not None and can.private and epsilon is None,
        f"no committed record has it with an epsilon below {epsilon or 0:g}": (epsilon or 0) > (wants.epsilon or math.inf),
        f"sends more: {upload / 1e6:.1f} MB a site": wants.upload is not None and upload > wants.upload,
        "no committed record has its server seconds": timed and server is None,
        f"its server takes longer: {server or 0:.0f} s": (server or 0)
        > (math.inf if wants.server_seconds is None else wants.server_seconds),
    }
    return "; ".join(reason for reason, holds in reasons.items() if holds)
