"""Networks of many clients within a limit of memory: built from their uploads when they are asked for.

Uploads wait on disk (osfl.rounds.folder.Stored). What was asked for last stays in memory within the limit; all of it where
that is enough, and then nothing is built twice.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeVar, overload

import torch
from torch import nn

from osfl.runtime.machine import available_memory
from osfl.runtime.memory import available

Model = TypeVar("Model", bound=nn.Module)
_SHARE = 4  # of the memory: networks as uploaded, frozen copies of them, and what is computed with them


def networks_limit(device: torch.device) -> int:
    """Bytes that one list of networks may keep: a quarter of `--memory`, or of what the device or this machine has."""
    return (available(device) or available_memory()) // _SHARE


class Networks(Sequence[Model]):
    """Networks that `make` builds, by their places; the last ones stay within `limit` bytes."""

    def __init__(self, count: int, make: Callable[[int], Model], limit: int) -> None:
        self._count, self._make, self.limit = count, make, limit
        self._kept: OrderedDict[int, Model] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, index: int) -> Model: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Model]: ...
    def __getitem__(self, index: int | slice) -> Model | Sequence[Model]:
        if isinstance(index, slice):
            return some_of(self, range(*index.indices(self._count)))
        place = range(self._count)[index]  # an IndexError ends iteration
        with self._lock:
            if place in self._kept:
                self._kept.move_to_end(place)
                return self._kept[place]
        made = self._make(place)
        with self._lock:
            self._keep(place, made)
        return made

    def _keep(self, place: int, made: Model) -> None:
        if place not in self._kept:
            self._bytes += bytes_of(made)
        self._kept[place] = made
        while self._bytes > self.limit:
            self._bytes -= bytes_of(self._kept.popitem(last=False)[1])


def some_of(members: Sequence[Model], places: Sequence[int]) -> Sequence[Model]:
    """Some of them, in this order, each still built only when it is asked for."""
    return Networks(len(places), lambda i: members[places[i]], 0)


def made_of(members: Sequence[Model], change: Callable[[Model], nn.Module], limit: int = 0) -> Sequence[nn.Module]:
    """What is made of each when it is asked for; those within `limit` bytes are kept."""
    return Networks(len(members), lambda i: change(members[i]), limit)


def bytes_of(model: nn.Module) -> int:
    return sum(part.numel() * part.element_size() for part in (*model.parameters(), *model.buffers()))
