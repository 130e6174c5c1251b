"""Traps in the operating system's calls: the n-th one kills the process, tears a write, or fails.

They replace functions of the `os` module, so the code under test has no hooks of its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CALLS = (
    "open",
    "write",
    "fsync",
    "close",
    "link",
    "unlink",
    "rename",
    "replace",
    "mkdir",
    "stat",
    "fstat",
    "preadv",
    "pread",
    "scandir",
)
Spring = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]


@dataclass
class Trap:
    """Counts calls; from number `at` on (or only there) the spring answers instead of the system."""

    at: int
    spring: Spring
    stays: bool = False
    count: int = 0
    sprung: str = ""
    log: list[tuple[str, tuple[Any, ...], Any]] = field(default_factory=list)

    def call(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        self.count += 1
        if self.count == self.at or (self.stays and self.count > self.at):
            self.sprung = self.sprung or name
            return self.spring(name, real, args)
        result = real(*args, **options)
        kept = tuple(bytes(arg) if isinstance(arg, memoryview) else arg for arg in args)
        self.log.append((name, kept, result))
        return result


@contextlib.contextmanager
def trapped(at: int, spring: Spring, stays: bool = False) -> Iterator[Trap]:
    """All calls inside go through the trap."""
    trap = Trap(at, spring, stays)
    real = {name: getattr(os, name) for name in CALLS}

    def through(name: str) -> Callable[..., Any]:
        return lambda *args, **options: trap.call(name, real[name], args, options)

    try:
        for name in CALLS:
            setattr(os, name, through(name))
        yield trap
    finally:
        for name, function in real.items():
            setattr(os, name, function)


@contextlib.contextmanager
def without_links(active: bool = True) -> Iterator[None]:
    """A file system like exFAT, which knows no hard links."""

    def refuse(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    real = os.link
    try:
        if active:
            os.link = refuse
        yield
    finally:
        os.link = real


def kill(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """kill -9 before the call."""
    os.kill(os.getpid(), signal.SIGKILL)


def tear(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """kill -9 in the middle of a write, or right after any other call."""
    with contextlib.suppress(OSError):
        real(*((args[0], bytes(args[1])[: len(args[1]) // 2]) if name == "write" else args))
    os.kill(os.getpid(), signal.SIGKILL)


def fail(number: int) -> Spring:
    """The call fails with this errno; a failing close still frees its descriptor, as on Linux."""

    def spring(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        if name == "close":
            real(*args)
        raise OSError(number, os.strerror(number))

    return spring


def no_room(name: str, real: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """A full disk: what is there can be read, renamed and removed; nothing can be added."""
    creates = name == "open" and len(args) > 1 and args[1] & os.O_CREAT and not Path(args[0]).exists()
    if name in ("mkdir", "link") or creates or (name == "write" and args[0] > 2):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    return real(*args)
