"""Fixed point and masks of whole uploads: the sum is exact or within its stated error, and what spoils it is found."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from osfl.core.errors import RoundError, UploadBlocked
from osfl.core.method import Method
from osfl.core.sums import LARGEST, most_of, scale_of
from osfl.core.types import ClientId, Limits, Payload, Plan, Summand, Task, Upload
from osfl.rounds.secure_sum import decoded, encoded, masked, masked_contract, total_of
from osfl.wire.masks import COMMITMENTS, pair_seed
from osfl.wire.signing import SigningKey

SITES = ("a", "b", "c", "d", "e")
KEYS = {name: SigningKey.from_seed(name.encode().ljust(32)) for name in SITES}
PUBLIC = {name: key.public_hex for name, key in KEYS.items()}
BOUND = 100.0


@dataclass(frozen=True)
class Settings:
    pass


class Adder(Method):
    """Whole numbers and others, and a tensor that a site may leave out."""

    Settings = Settings
    COMMON = ("kind",)

    def summands(self, plan: Plan) -> dict[str, Summand]:
        return {"n": Summand((2,), LARGEST // len(SITES), whole=True), "x": Summand((2, 2), BOUND), "y": Summand((1,), BOUND)}


TASK = Task("two", ("a", "b"), (1, 8, 8))
PLAN = Plan(TASK, "adder", Settings(), SITES, Limits(share=1.0), secure_sum=True)
ADDER = Adder(TASK, Settings())


def payload(number: int) -> Payload:
    rng = np.random.default_rng(number)
    tensors = {
        "n": torch.tensor(rng.integers(-(10**15), 10**15, 2)),
        "x": torch.tensor(rng.uniform(-BOUND, BOUND, (2, 2))),
        **({"y": torch.tensor([1.5], dtype=torch.float32)} if number else {}),
    }
    return Payload(tensors, {"kind": "k", "samples": 7})


TERMS = {client: payload(number) for number, client in enumerate(SITES)}


def sent(client: ClientId, keys: Mapping[ClientId, str] = PUBLIC) -> Upload:
    return Upload(client, PLAN.digest, masked(ADDER, TERMS[client], client, PLAN, keys, KEYS[client]))


def repairs(missing: Sequence[ClientId]) -> Callable[[ClientId], dict[ClientId, bytes]]:
    def of(client: ClientId) -> dict[ClientId, bytes]:
        return {name: pair_seed(KEYS[client], client, name, PUBLIC[name], PLAN.digest) for name in missing}

    return of


def check_sum(found: Upload, among: Sequence[ClientId]) -> None:
    tensors = found.payload.tensors
    assert torch.equal(tensors["n"], torch.stack([TERMS[c].tensors["n"] for c in among]).sum(0))
    step = scale_of(Summand((1,), BOUND), len(SITES))
    exact = torch.stack([TERMS[c].tensors["x"] for c in among]).sum(0)
    assert float((tensors["x"] - exact).abs().max()) <= len(among) / (2 * step) + 1e-12
    assert float(tensors["y"]) == 1.5 * len([c for c in among if c != "a"]) and dict(found.payload.facts) == {"kind": "k"}


@pytest.mark.parametrize("count", range(4))
def test_missing_sites_are_taken_out_of_the_sum(count: int) -> None:
    for missing in (SITES[:count], SITES[5 - count :], SITES[1 : 1 + count]):
        among = [client for client in SITES if client not in missing]
        check_sum(total_of([sent(c) for c in among], ADDER, PLAN, missing, repairs(missing)), among)


def test_a_thousand_random_rounds_sum_exactly_whoever_stays_away() -> None:
    """Two to five sites, up to all but two of them missing and repaired, each round with a plan and masks of its own."""
    rng = np.random.default_rng(0)
    for number in range(1000):
        sites = SITES[: rng.integers(2, 6)]
        missing = sorted(rng.choice(sites, rng.integers(0, len(sites) - 1), replace=False).tolist())
        check_random_round(replace(PLAN, clients=sites, seed=number), missing, rng)


def check_random_round(plan: Plan, missing: Sequence[ClientId], rng: np.random.Generator) -> None:
    keys, sums = {name: PUBLIC[name] for name in plan.clients}, torch.zeros(2, dtype=torch.int64)
    uploads = []
    for client in plan.clients:
        term = torch.from_numpy(rng.integers(-(10**15), 10**15, 2))
        if client not in missing:
            sums += term
            open_term = Payload({"n": term, "x": torch.ones(2, 2)}, {"kind": "k"})
            uploads.append(Upload(client, plan.digest, masked(ADDER, open_term, client, plan, keys, KEYS[client])))

    def repair(client: ClientId) -> dict[ClientId, bytes]:
        return {name: pair_seed(KEYS[client], client, name, PUBLIC[name], plan.digest) for name in missing}

    found = total_of(uploads, ADDER, plan, missing, repair).payload.tensors
    assert torch.equal(found["n"], sums) and (found["x"] == len(uploads)).all()


def test_a_masked_upload_says_nothing_else() -> None:
    """Nothing of its facts but what follows from the plan, and no number as it is."""
    upload = sent("b").payload
    assert set(upload.facts) == {"kind", "keys"} and set(upload.tensors) == set(masked_contract(ADDER, PLAN))
    open_numbers = encoded(TERMS["b"].tensors, ADDER.summands(PLAN), len(SITES), "b")
    for name, values in open_numbers.items():
        assert not (upload.tensors[name].reshape(-1).numpy().view(np.uint64) == values).any()
    assert not upload.tensors[COMMITMENTS][1].any() and bool(upload.tensors[COMMITMENTS][[0, 2, 3, 4]].any(1).all())


@pytest.mark.parametrize("sign", [1, -1])
def test_at_the_bound_nothing_overflows(sign: int) -> None:
    summands = {"n": Summand((1,), LARGEST // 5, whole=True), "x": Summand((1,), BOUND), "z": Summand((1,), 0.3)}
    value = {
        "n": torch.tensor([sign * (LARGEST // 5)]),
        "x": torch.tensor([sign * BOUND]),
        "z": torch.tensor([sign * 0.3], dtype=torch.float64),
    }
    numbers = [encoded(value, summands, 5, "a") for _ in range(5)]
    total = {name: sum((n[name] for n in numbers[1:]), numbers[0][name]) for name in summands}
    for name, one in summands.items():
        whole = [int(n[name].view(np.int64)[0]) for n in numbers]
        assert int(total[name].view(np.int64)[0]) == sum(whole) and abs(sum(whole)) <= LARGEST  # in Python's whole numbers
        assert abs(whole[0]) == most_of(one, 5)
    method = Adder(TASK, Settings())
    method.summands = lambda plan: summands  # type: ignore[method-assign]
    found = decoded(total, method, PLAN, 5, {}).tensors
    assert float(found["x"]) == sign * 5 * BOUND and abs(float(found["z"]) - sign * 1.5) < 1e-15
    assert int(found["n"]) == sign * 5 * (LARGEST // 5)
    for beyond in (LARGEST // 5 + 1, -(LARGEST // 5) - 1, -(2**63)):
        with pytest.raises(UploadBlocked, match="beyond the bound"):
            encoded({"n": torch.tensor([beyond])}, {"n": summands["n"]}, 5, "a")


@pytest.mark.parametrize("value", [BOUND * 1.001, -BOUND * 1.001, float("nan"), float("inf")])
def test_a_value_beyond_the_bound_stays_at_home(value: float) -> None:
    with pytest.raises(UploadBlocked, match="beyond the bound") as caught:
        encoded({"x": torch.tensor([[value, 0], [0, 0]])}, ADDER.summands(PLAN), 5, "north")
    assert caught.value.client == "north" and caught.value.field == "x"


def test_sites_with_other_keys_are_named() -> None:
    unknown_sender = SigningKey.from_seed(b"stranger".ljust(32)).public_hex
    uploads = [sent("a"), sent("b", {**PUBLIC, "d": unknown_sender}), *(sent(c) for c in "cde")]
    with pytest.raises(RoundError, match="b and d were not masked with one mask") as caught:
        total_of(uploads, ADDER, PLAN)
    assert caught.value.field == COMMITMENTS


def test_a_mask_that_stays_is_found_by_the_bound() -> None:
    """A repair too few, or an upload that was changed: the total is beyond what sites can add up to."""
    with pytest.raises(RoundError, match="beyond what 4 sites can add up to"):
        total_of([sent(c) for c in SITES[:4]], ADDER, PLAN)


def test_sites_that_differ_in_what_follows_from_the_plan_are_named() -> None:
    one = sent("b")
    other = Upload("b", PLAN.digest, Payload(one.payload.tensors, {**one.payload.facts, "kind": "other"}))
    with pytest.raises(RoundError, match="differ in 'kind'") as caught:
        total_of([sent("a"), other], ADDER, PLAN)
    assert caught.value.client == "b" and caught.value.field == "facts.kind"
