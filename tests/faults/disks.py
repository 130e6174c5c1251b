"""A disk that forgets: after a power cut only what was synced is sure; everything else is there, half there, or gone.

It is fed the log of a trap. File systems differ in what they keep beyond the promise of fsync, so the rest is drawn at
random: any subset of names whose folder was not synced, any prefix of bytes that were not synced.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Log = Sequence[tuple[str, tuple[Any, ...], Any]]


@dataclass
class _File:
    written: bytes = b""
    synced: int = 0


@dataclass
class Disk:
    names: dict[Path, _File | None] = field(default_factory=dict)  # as processes see them; None is a folder
    kept: dict[Path, _File | None] = field(default_factory=dict)  # sure to survive
    pending: list[tuple[Path, _File | None, bool]] = field(default_factory=list)  # name, file, appears (or vanishes)
    opened: dict[int, _File | Path] = field(default_factory=dict)

    def replay(self, log: Log) -> Disk:
        for name, args, result in log:
            step = getattr(self, f"_{name}", None)
            if step is not None:
                step(args, result)
        return self

    def survivors(self, rng: random.Random | None = None) -> dict[Path, bytes]:
        """Files after the power cut; without `rng` the worst case, in which nothing unsynced survives."""
        names = dict(self.kept)
        for path, file, appears in self.pending:
            if rng is not None and rng.random() < 0.5:
                names.pop(path, None)
                if appears:
                    names[path] = file
        made = {path for path, file in self.names.items() if file is None}
        lost = made - {path for path, file in names.items() if file is None}
        whole = {path: file for path, file in names.items() if file is not None and not lost & set(path.parents)}
        return {path: file.written[: _reach(file, rng)] for path, file in whole.items()}

    def _open(self, args: tuple[Any, ...], result: int) -> None:
        path = Path(args[0])
        if path.is_dir() or self.names.get(path, ...) is None:
            self.opened[result] = path
            return
        if path not in self.names and args[1] & os.O_CREAT:
            self._appear(path, _File())
        self.opened[result] = self.names.get(path) or _File()

    def _write(self, args: tuple[Any, ...], result: int) -> None:
        file = self.opened[args[0]]
        assert isinstance(file, _File)
        file.written += args[1][:result]

    def _fsync(self, args: tuple[Any, ...], result: None) -> None:
        target = self.opened[args[0]]
        if isinstance(target, _File):
            target.synced = len(target.written)
            return
        for path, file, appears in [entry for entry in self.pending if entry[0].parent == target]:
            self.kept.pop(path, None)
            if appears:
                self.kept[path] = file
        self.pending = [entry for entry in self.pending if entry[0].parent != target]

    def _link(self, args: tuple[Any, ...], result: None) -> None:
        self._appear(Path(args[1]), self.names[Path(args[0])])

    def _rename(self, args: tuple[Any, ...], result: None) -> None:
        self._link(args, result)
        self._unlink(args, result)

    _replace = _rename

    def _unlink(self, args: tuple[Any, ...], result: None) -> None:
        path = Path(args[0])
        self.pending.append((path, self.names.pop(path), False))

    def _mkdir(self, args: tuple[Any, ...], result: None) -> None:
        self._appear(Path(args[0]), None)

    def _close(self, args: tuple[Any, ...], result: None) -> None:
        self.opened.pop(args[0], None)

    def _appear(self, path: Path, file: _File | None) -> None:
        self.names[path] = file
        self.pending.append((path, file, True))


def _reach(file: _File, rng: random.Random | None) -> int:
    return file.synced if rng is None else rng.randint(file.synced, len(file.written))
