"""How many bytes of tensors exist at once: parameters, gradients, what an optimizer remembers, activations, images.

Counted in short rehearsals (osfl.simulate.rehearsal), because looking at every operation makes each of them slower. What a
device takes beside its tensors (workspaces of its libraries, gaps between allocations) is not in it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class TensorBytes(TorchDispatchMode):
    """Counts the storages that pass in this thread, from their first use to their end; a view has the storage of its base."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._alive: dict[int, tuple[int, Any]] = {}

    def enter(self, outermost: bool) -> int:
        """Begin a meter's own high-water mark. The outermost forgets what is there: it counts again once somebody uses it."""
        if outermost:
            self._alive.clear()
            self.now = self.peak = 0
        before, self.peak = self.peak, self.now
        return before

    def leave(self, before: int) -> int:
        found, self.peak = self.peak, max(before, self.peak)
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in _tensors((args, (kwargs or {}).values(), out)):
            self._note(value)
        return out

    def _note(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == "meta" or tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._alive:
            self._alive[key] = (size, weakref.ref(storage, lambda gone: self._freed(key, gone)))
            self.now += size
            self.peak = max(self.peak, self.now)

    def _freed(self, key: int, gone: Any) -> None:
        size, known = self._alive.get(key, (0, None))
        if known is gone:  # else its place belongs to another storage already
            self.now -= size
            del self._alive[key]


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (list, tuple, type({}.values()))):
            yield from _tensors(value)
