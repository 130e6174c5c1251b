"""Features on disk, image by image: encoding the same image twice costs nothing, whoever asks and however shards are cut.

    <cache>/features/<encoder and geometry>/<content>.safetensors     some hundred images each: their digests and tokens

A block is written whole or not at all, so an interrupted encoding goes on behind its last block. Everything here can be
deleted at any time; it never leaves the site.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from osfl.core.types import Payload
from osfl.runtime.cache import cache_folder, cache_limit, trim, used
from osfl.runtime.meter import book, measure, spend
from osfl.runtime.payloads import save_payload

_TICK = 100_000_000  # nanoseconds: more than what file systems round times to
_OFTEN = 100  # the limit is looked after whenever so great a part of it was written: a look goes through all files


def image_digests(images: torch.Tensor) -> list[bytes]:
    """sha256 of each uint8 image and its shape."""
    shape = repr(tuple(images.shape[1:])).encode()
    return [hashlib.sha256(shape + image.tobytes()).digest() for image in images.cpu().contiguous().numpy()]


class TokenStore:
    """Tokens of one encoder and geometry, (1 + L, d) an image."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._where: dict[bytes, tuple[str, int]] = {}  # image -> (block, row)
        self._seen: set[str] = set()
        self._listed = -1  # when the folder had last changed before its blocks were listed
        self._put = 0  # bytes since the cache's limit was last looked after

    def missing(self, digests: Sequence[bytes]) -> list[int]:
        """Positions of images that are not here, each image once."""
        self._look()
        first: dict[bytes, int] = {}
        for place, digest in enumerate(digests):
            first.setdefault(digest, place)
        return [place for digest, place in first.items() if digest not in self._where]

    def put(self, digests: Sequence[bytes], tokens: torch.Tensor) -> None:
        """Keep the tokens of these images; a block that somebody else wrote meanwhile is the same block."""
        name = hashlib.sha256(b"".join(digests)).hexdigest()[:32]
        keys = torch.from_numpy(np.frombuffer(b"".join(digests), dtype=np.uint8).reshape(len(digests), 32).copy())
        path = self.folder / f"{name}.safetensors"
        save_payload(path, Payload({"images": keys, "tokens": tokens}))
        with self._lock:
            self._seen.discard(path.name)  # it may have been there before, and damaged
            self._listed = -1
            self._put += path.stat().st_size
            full = self._put > cache_limit() // _OFTEN
        if full:
            self._put = 0
            trim()

    def get(self, digests: Sequence[bytes]) -> torch.Tensor:
        """Tokens of images that are here, (n, 1 + L, d)."""
        self._look()
        rows: dict[str, list[tuple[int, int]]] = {}
        for place, digest in enumerate(digests):
            block, row = self._where[digest]
            rows.setdefault(block, []).append((place, row))
        found: torch.Tensor | None = None
        for block, pairs in rows.items():
            used(self.folder / block)
            tokens = _read(self.folder / block, "tokens")
            assert tokens is not None
            if found is None:
                found = torch.empty(len(digests), *tokens.shape[1:])
            places, wanted = zip(*pairs, strict=True)
            found[list(places)] = tokens[list(wanted)]
        assert found is not None
        return found

    def _look(self) -> None:
        """Take notice of blocks that are new in the folder or gone; a damaged one is as if it were not there."""
        with self._lock:
            changed = self.folder.stat().st_mtime_ns if self.folder.exists() else 0
            if changed == self._listed:
                return
            # a folder that changed just now could change again without another time
            self._listed = changed if time.time_ns() - changed > _TICK else -1
            with os.scandir(self.folder) if changed else contextlib.nullcontext(()) as listed:
                there = {entry.name for entry in listed if entry.name.endswith(".safetensors")}
            if gone := self._seen - there:
                self._where = {image: place for image, place in self._where.items() if place[0] not in gone}
            for name in sorted(there - self._seen):
                keys = _read(self.folder / name, "images")
                for row, key in enumerate(keys.numpy() if keys is not None else ()):
                    self._where.setdefault(key.tobytes(), (name, row))
            self._seen = there


def _read(path: Path, name: str) -> torch.Tensor | None:
    try:
        with safe_open(path, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(name)
            return tensor
    except (FileNotFoundError, SafetensorError):
        return None


@lru_cache(maxsize=16)
def _store(folder: Path) -> TokenStore:
    trim()
    return TokenStore(folder)


def store_of(digest: str) -> TokenStore:
    """The store of an encoder and geometry in the user's cache; where nothing may be kept, one that ends with this process."""
    if (apart := _apart.get()) is not None:
        return _store(apart.folder / digest[:32])
    if not cache_limit():
        return _store(Path(_passing().name) / digest[:32])
    return _store(cache_folder() / "features" / digest[:32])


@lru_cache(maxsize=1)
def _passing() -> TemporaryDirectory[str]:
    return TemporaryDirectory(prefix="osfl-features-")


# --- rehearsals: what is kept must not make them look cheaper than the run -------------------------------------------------


@dataclass
class Apart:
    """Features of the rehearsals of one estimate, in a folder of their own. What an earlier rehearsal has encoded costs each
    later one what it cost the first."""

    folder: Path
    costs: dict[tuple[Path, bytes], tuple[float, float, float]] = field(default_factory=dict)  # seconds, processor, operations
    booked: set[tuple[Path, bytes]] = field(default_factory=set)  # in the rehearsal that is running


_apart: ContextVar[Apart | None] = ContextVar("osfl_features_apart", default=None)


@contextlib.contextmanager
def features_apart(apart: Apart) -> Iterator[None]:
    """One rehearsal: features inside are read from and kept in `apart` alone."""
    apart.booked.clear()
    token = _apart.set(apart)
    try:
        yield
    finally:
        _apart.reset(token)


@contextlib.contextmanager
def noting_costs(store: TokenStore, digests: Sequence[bytes]) -> Iterator[None]:
    """Encoding of these images, all new, happens inside."""
    if (apart := _apart.get()) is None:
        yield
        return
    with measure() as meter:
        yield
    spend(meter.flops)
    each = tuple(cost / len(digests) for cost in (meter.seconds, meter.processor_seconds, meter.flops))
    for digest in digests:
        apart.costs[store.folder, digest] = (each[0], each[1], each[2])
        apart.booked.add((store.folder, digest))


def book_known(store: TokenStore, digests: Sequence[bytes]) -> None:
    """Book what these images cost an earlier rehearsal, each once in this one."""
    if (apart := _apart.get()) is None:
        return
    again = [key for key in {(store.folder, digest) for digest in digests} if key in apart.costs and key not in apart.booked]
    for seconds, processor, flops in (apart.costs[key] for key in again):
        book(seconds, processor)
        spend(flops)
    apart.booked.update(again)


def share_kept(apart: Apart) -> float:
    """Of the images that these rehearsals encoded, the part whose features are in the user's cache: a run need not."""
    if not (apart.costs and cache_limit()):
        return 0.0
    asked: dict[str, list[bytes]] = {}
    for folder, digest in apart.costs:
        asked.setdefault(folder.name, []).append(digest)
    missing = sum(len(_store(cache_folder() / "features" / name).missing(images)) for name, images in asked.items())
    return 1 - missing / len(apart.costs)
