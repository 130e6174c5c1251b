"""Secure sum: a site masks what it adds, and the server adds masked uploads and learns their total only.

Masks are those of osfl.wire.masks, numbers those of osfl.core.sums. Everything is modulo 2^64, in int64 on the wire. The server
adds one upload after the other: its memory does not grow with the sites.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from osfl.core.errors import RoundError, UploadBlocked
from osfl.core.method import Method
from osfl.core.sums import ALL_SITES, most_of, scale_of
from osfl.core.types import ClientId, Contract, Facts, Field, Payload, Plan, Summand, Upload
from osfl.wire.facts import KEYS
from osfl.wire.masks import COMMITMENTS, SEED, add_mask, commitment, is_added, keys_digest, pair_seed
from osfl.wire.repair import commitments_of
from osfl.wire.signing import SigningKey

Numbers = dict[str, NDArray[np.uint64]]  # flat, by summand, in the order of their names
_ANEW = "Nothing can be made of this round. Open a new one (another seed will do), and ask these sites first."


def masked_contract(method: Method, plan: Plan) -> Contract:
    """What a masked upload holds: whole numbers for each summand, and what its sender shares with each client, committed to."""
    summands = {name: Field("I64", summand.shape) for name, summand in method.summands(plan).items()}
    return {**summands, COMMITMENTS: Field("U8", (len(plan.clients), SEED))}


# --- a site --------------------------------------------------------------------------------------------------------------


def masked(
    method: Method, payload: Payload, client: ClientId, plan: Plan, keys: Mapping[ClientId, str], key: SigningKey
) -> Payload:
    """What leaves the site instead of this payload, which the egress check has seen; `keys` are the public ones of all."""
    numbers = encoded(method.to_sum(payload), method.summands(plan), len(plan.clients), client)
    commitments = np.zeros((len(plan.clients), SEED), dtype=np.uint8)
    for row, other in enumerate(sorted(plan.clients)):
        if other != client:
            seed = pair_seed(key, client, other, keys[other], plan.digest)
            add_mask(numbers.values(), seed, subtract=not is_added(client, other))
            commitments[row] = np.frombuffer(commitment(seed), dtype=np.uint8)
    tensors = {name: _tensor(values, summand.shape) for (name, summand), values in _pairs(method, plan, numbers)}
    common = {name: payload.facts[name] for name in method.COMMON if name in payload.facts}
    return Payload({**tensors, COMMITMENTS: torch.from_numpy(commitments)}, {**common, KEYS: keys_digest(keys)})


def encoded(tensors: Mapping[str, torch.Tensor], summands: Mapping[str, Summand], sites: int, client: ClientId) -> Numbers:
    """Tensors as whole numbers within the plan's bounds; what is not there is zero."""
    numbers: Numbers = {}
    for name, summand in sorted(summands.items()):
        value = tensors.get(name, torch.zeros(summand.shape, dtype=torch.int64 if summand.whole else torch.float64))
        largest = _largest(value) if value.numel() else 0
        if not largest <= summand.bound:
            raise UploadBlocked(
                f"{name!r} is beyond the bound that makes sure that the secure sum cannot overflow",
                client=client,
                field=name,
                expected=f"at most {summand.bound:g}",
                got=f"{largest:g}",
                fix="Agree on a larger setting 'bound' or larger limits.samples in the plan.",
            )
        most = most_of(summand, sites)  # rounding to the nearest step may go a part of one beyond it
        steps = value if summand.whole else (value.double() * scale_of(summand, sites)).round()
        whole = steps.reshape(-1).to(torch.int64).clamp(-most, most).contiguous()
        numbers[name] = whole.clone().numpy().view(np.uint64)
    return numbers


def _largest(value: torch.Tensor) -> float:
    """The value furthest from zero; not a number where one is none. Whole numbers are compared as such."""
    if value.is_floating_point():
        return float(value.double().abs().max())
    return max(int(value.max()), -int(value.min()))


# --- the server ----------------------------------------------------------------------------------------------------------


def total_of(
    uploads: Sequence[Upload],
    method: Method,
    plan: Plan,
    missing: Sequence[ClientId] = (),
    repair: Callable[[ClientId], Mapping[ClientId, bytes]] = lambda client: {},
) -> Upload:
    """The sum of masked uploads as one upload of all sites. `repair` gives the seeds that a site shares with the missing."""
    total: Numbers = {}
    commitments: dict[ClientId, dict[ClientId, bytes]] = {}
    facts: Facts = {}
    for upload in uploads:
        tensors = upload.payload.tensors
        commitments[upload.client] = commitments_of(bytes(tensors[COMMITMENTS].numpy().data), plan.clients)
        facts = _same_facts(upload, facts, plan)
        for name in sorted(method.summands(plan)):
            values = tensors[name].reshape(-1).numpy().view(np.uint64)
            if name in total:
                total[name] += values
            else:
                total[name] = values.copy()
    _check_common_masks(commitments)
    for client in commitments:
        seeds = repair(client) if missing else {}
        for other in missing:
            add_mask(total.values(), seeds[other], subtract=is_added(client, other))
    return Upload(
        ALL_SITES, plan.digest, method.from_sum(decoded(total, method, plan, len(commitments), facts), len(commitments))
    )


def _same_facts(upload: Upload, before: Facts, plan: Plan) -> Facts:
    """Facts that stay readable on a masked upload are the same on all: they follow from the plan."""
    facts = {name: value for name, value in upload.payload.facts.items() if name != KEYS}
    if before and facts != before:
        name = next(name for name in sorted({*facts, *before}) if facts.get(name) != before.get(name))
        raise RoundError(
            f"this upload and those before it differ in {name!r}, so their sum means nothing",
            client=upload.client,
            field=f"facts.{name}",
            expected=before.get(name, "nothing"),
            got=facts.get(name, "nothing"),
            fix=_ANEW,
        )
    return facts


def _check_common_masks(commitments: Mapping[ClientId, Mapping[ClientId, bytes]]) -> None:
    """Two sites that deliver share their mask, or it would stay in the sum."""
    for client, own in commitments.items():
        for other in (name for name in commitments if name > client):
            if own[other] != commitments[other][client]:
                raise RoundError(
                    f"the uploads of {client} and {other} were not masked with one mask: their sum means nothing",
                    client=other,
                    field=COMMITMENTS,
                    expected=own[other].hex(),
                    got=commitments[other][client].hex(),
                    fix=_ANEW,
                )


def decoded(total: Numbers, method: Method, plan: Plan, sites: int, facts: Facts) -> Payload:
    """Whole numbers as what was added. A sum beyond what so many sites can add up to still has a mask, or a false term."""
    clients, tensors = len(plan.clients), {}
    for (name, summand), values in _pairs(method, plan, total):
        whole, most = _tensor(values, summand.shape), sites * most_of(summand, clients)
        if whole.numel() and (int(whole.max()) > most or int(whole.min()) < -most):
            raise RoundError(
                f"the sum of {name!r} is beyond what {sites} sites can add up to",
                field=name,
                expected=f"at most {most}",
                got=max(int(whole.max()), -int(whole.min())),
                fix=f"A site's numbers or masks are wrong, and nobody can tell whose. {_ANEW}",
            )
        tensors[name] = whole if summand.whole else whole.double() / scale_of(summand, clients)
    return Payload(tensors, facts)


def _pairs(method: Method, plan: Plan, numbers: Numbers) -> Iterable[tuple[tuple[str, Summand], NDArray[np.uint64]]]:
    return zip(sorted(method.summands(plan).items()), numbers.values(), strict=True)


def _tensor(values: NDArray[np.uint64], shape: tuple[int, ...]) -> torch.Tensor:
    return torch.from_numpy(values.view(np.int64)).reshape(shape)
