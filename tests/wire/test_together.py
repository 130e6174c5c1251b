"""What belongs together in an upload: a contract says it, the gate refuses the rest, and a round folder keeps it."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import pytest

from osfl.core.errors import Rejected
from osfl.core.tensors import RawTensor
from osfl.core.types import Contract, Field, Limits, Plan, Task
from osfl.rounds.folder import agree
from osfl.rounds.state import read_policy
from osfl.wire.bundle import pack
from osfl.wire.gate import AcceptancePolicy, accept
from tests.wire.forge import CLIENT, KEY, OTHER_KEY, PLAN

MAKER: dict[str, Any] = {"required": False, "group": "maker", "choice": "images or maker"}
CONTRACT: Contract = {
    "weights": Field("F32", ("k",), low=0.0, positive_sum=True, needs=("samples", "class_counts"), **MAKER),
    "means": Field("F32", ("k", 2), **MAKER),
    "images": Field("F32", ("n",), required=False, choice="images or maker"),
}
POLICY = AcceptancePolicy(PLAN, {CLIENT: KEY.public_hex}, {"": CONTRACT}, classes=2, limits=Limits(samples=100))
FACTS = {"samples": 4, "class_counts": [1, 3]}


def numbers(*values: float, shape: tuple[int, ...] | None = None) -> RawTensor:
    return RawTensor("F32", shape or (len(values),), struct.pack(f"<{len(values)}f", *values))


WHOLE = {"weights": numbers(0.25, 0.75), "means": numbers(1, 2, 3, 4, shape=(2, 2))}


def sent(tensors: dict[str, RawTensor], facts: dict[str, Any] = FACTS) -> bytes:
    return pack("upload", CLIENT, PLAN, tensors, facts, KEY)


def test_whole_groups_and_either_choice_are_let_in() -> None:
    for tensors in (WHOLE, {"images": numbers(5)}, {**WHOLE, "images": numbers()}):
        assert accept(sent(tensors), POLICY).tensors.keys() == tensors.keys()
    assert accept(sent({"images": numbers(5)}, {}), POLICY)  # only the maker needs facts


@pytest.mark.parametrize(
    ("tensors", "facts", "field", "piece"),
    [
        ({"weights": WHOLE["weights"]}, FACTS, "means", "comes together with tensor 'weights'"),
        ({"means": WHOLE["means"]}, FACTS, "weights", "comes together with tensor 'means'"),
        ({}, FACTS, "images", "nothing of 'images or maker'"),
        ({**WHOLE, "weights": numbers(-0.5, 1.5)}, FACTS, "weights.values", "expected no value below 0, got -0.5"),
        ({**WHOLE, "weights": numbers(0, 0)}, FACTS, "weights.values", "add up to more than zero"),
        ({"weights": numbers(), "means": numbers(shape=(0, 2))}, FACTS, "weights.values", "add up to more than zero"),
        (WHOLE, {"samples": 4}, "facts.class_counts", "the facts lack 'class_counts'"),
        (WHOLE, {"class_counts": [1, 3]}, "facts.samples", "the facts lack 'samples'"),
        (WHOLE, {**FACTS, "samples": 101}, "facts.samples", "expected at most 100, got 101"),
        (WHOLE, {**FACTS, "class_counts": [60, 41]}, "facts.class_counts", "expected at most 100, got 101"),
    ],
)
def test_what_does_not_belong_together_is_refused(
    tensors: dict[str, RawTensor], facts: dict[str, Any], field: str, piece: str
) -> None:
    with pytest.raises(Rejected) as no:
        accept(sent(tensors, facts), POLICY)
    assert no.value.field == field and no.value.client == CLIENT and piece in str(no.value) and no.value.fix


def test_a_round_folder_keeps_all_of_it(tmp_path: Path) -> None:
    plan = Plan(Task("t", ("a", "b"), (1, 8, 8)), "m", {}, (CLIENT,), Limits(samples=7, share=0.25))
    agree(tmp_path, plan, {"": CONTRACT}, {CLIENT: KEY.public_hex}, OTHER_KEY.public_hex)
    policy = read_policy(tmp_path)
    assert policy.contracts == {"": CONTRACT} and policy.limits == plan.limits and policy.plan == plan.digest


def test_plans_that_never_received_of_these_limits_keep_their_digest() -> None:
    plan = Plan(Task("t", ("a", "b"), (1, 8, 8)), "m", {}, (CLIENT,))
    assert plan.as_json()["limits"].keys() == {"upload_bytes", "header_bytes", "facts_bytes"}
    assert dataclasses.replace(plan, limits=Limits(share=1.0)).digest != plan.digest
