"""Shadow rounds of an audit: the round's own method on images that the attacker drew, with the round's own seed.

The attacker is strong: it knows the plan and its seed, so initial weights and random draws are those of the round, and all
images of a site except those that are tested. Of these, members and non-members, each shadow saw a random half.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from osfl.core.method import Context, Method
from osfl.core.seeds import numpy_generator
from osfl.core.types import ClientId, Dataset, Payload, Shard, Upload, digest_of
from osfl.data.source import together
from osfl.evaluation.privacy.rates import Mask
from osfl.rounds.phases import with_secret
from osfl.runtime.payloads import payload_digest


@dataclass(frozen=True)
class Pool:
    """Images of one client whose membership is asked: as many members as non-members of each class."""

    client: ClientId
    data: Dataset
    member: Mask  # (n,)
    rest: Dataset  # its other training images, which the attacker knows


def pools(shards: Sequence[Shard], test: Dataset, most: int, seed: int) -> list[Pool]:
    """A pool for each client. Non-members are its own validation images and test images, which no two clients share."""
    classes = 1 + max(int(data.labels.max()) for shard in shards for data in (shard.train, test) if len(data))
    rng = numpy_generator(seed, "audit", "test images")
    free = {c: rng.permutation(np.flatnonzero(test.labels.numpy() == c)) for c in range(classes)}
    wants = {s.client: _wanted(s, classes, most) for s in shards}
    total = np.maximum(1, sum(wants.values()))
    found, start = [], np.zeros(classes, int)
    for shard in shards:
        mine, there = wants[shard.client], np.array([len(free[c]) for c in range(classes)])
        here = np.minimum(mine, there * mine // total)
        taken = [free[c][start[c] : start[c] + here[c]] for c in range(classes)]
        start += here
        found.append(_pool(shard, test.subset(torch.from_numpy(np.concatenate(taken)).long()), classes, most, seed))
    return found


def _wanted(shard: Shard, classes: int, most: int) -> NDArray[np.int64]:
    """Test images of each class that make as many non-members as members."""
    train, val = (torch.bincount(part.labels, minlength=classes).numpy() for part in (shard.train, shard.val))
    found: NDArray[np.int64] = np.maximum(0, np.ceil(train * min(1.0, most / max(1, len(shard.train)))).astype(int) - val)
    return found


def _pool(shard: Shard, test: Dataset, classes: int, most: int, seed: int) -> Pool:
    others, rng = together([shard.val, test]), numpy_generator(seed, "audit", shard.client)
    scale = min(1.0, most / max(1, len(shard.train)))
    picked: list[list[NDArray[np.int64]]] = [[], []]
    for c in range(classes):
        mine = [np.flatnonzero(part.labels.numpy() == c) for part in (shard.train, others)]
        size = min(len(mine[0]), len(mine[1]), int(np.ceil(len(mine[0]) * scale)))
        for part, index in zip(picked, mine, strict=True):
            part.append(rng.permutation(index)[:size])
    member, other = (torch.from_numpy(np.concatenate(part)).long() for part in picked)
    left = torch.ones(len(shard.train), dtype=torch.bool)
    left[member] = False
    data = together([shard.train.subset(member), others.subset(other)])
    return Pool(shard.client, data, np.arange(len(data)) < len(member), shard.train.subset(left))


def seen_by(pool: Pool, shadows: int, seed: int) -> Mask:
    """Which shadow saw which image (shadows, n): each image was seen by half of them."""
    rng = numpy_generator(seed, "audit", "seen", pool.client)
    order = rng.random((shadows, len(pool.member))).argsort(0)
    found: Mask = order < shadows // 2
    return found


def shadow_shard(pool: Pool, seen: Mask, shard: Shard) -> Shard:
    """The site with the images that a shadow saw in the place of its own."""
    chosen = torch.from_numpy(seen)
    train, val = together([pool.rest, pool.data.subset(chosen)]), pool.data.subset(~chosen)
    return with_images(shard, train, val if len(val) and len(shard.val) else shard.val)


def all_as_training(shard: Shard) -> Shard:
    """The site as its private sums have it: with its held-out images among those that it adds up."""
    return with_images(shard, together([shard.train, shard.val]), shard.val.subset(torch.arange(0)))


def with_images(shard: Shard, train: Dataset, val: Dataset | None = None) -> Shard:
    """The same site with other images, under a digest of their own: work on them is not mixed up with the round's."""
    val = val if val is not None else shard.val
    images = Payload({"images": train.images, "labels": train.labels, "val": val.images, "val labels": val.labels})
    return Shard(shard.client, train, val, digest_of({"audit": payload_digest(images)}))


def client_phase(method: Method, shard: Shard, ctx: Context) -> Payload:
    """One client phase on other images; kept, so that an interrupted audit goes on where it was."""
    scratch = None if ctx.scratch is None else ctx.scratch / "audit" / shard.digest[:16]
    key = {"what": "audit", "plan": ctx.plan.digest, "client": shard.client, "data": shard.digest}
    # where the site's randomness is private the attacker draws its own
    own = with_secret(replace(ctx, scratch=scratch), shard.client)
    return ctx.get_or_compute(key, lambda: method.client_phase(shard, own))


def shadow_rounds(
    method: Method, found: Sequence[Pool], shards: Mapping[ClientId, Shard], shadows: int, ctx: Context
) -> tuple[list[list[Upload]], dict[ClientId, Mask]]:
    """The uploads of each shadow round, in the order of the pools, and who saw what."""
    seen = {pool.client: seen_by(pool, shadows, ctx.plan.seed) for pool in found}
    jobs = [(number, pool) for number in range(shadows) for pool in found]
    done: list[int] = []

    def work(job: tuple[int, Pool]) -> Upload:
        number, pool = job
        payload = client_phase(method, shadow_shard(pool, seen[pool.client][number], shards[pool.client]), ctx)
        done.append(number)
        ctx.progress("shadow client phases", len(done), len(jobs))
        return Upload(pool.client, ctx.plan.digest, payload)

    uploads = ctx.map(work, jobs)
    return [uploads[number * len(found) : (number + 1) * len(found)] for number in range(shadows)], seen
