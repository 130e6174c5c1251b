"""Deadlines of the dashboard's connections: a sender who dawdles over a request keeps no place for long.

A deadline for each read alone would let one byte now and then hold a connection for ever, before any token is asked for.
"""

from __future__ import annotations

import contextlib
import io
import socket
import threading
import time
from typing import Any

QUIET_SECONDS = 30.0  # nothing was sent or taken for so long: the connection is closed
HEAD_SECONDS = 30.0  # the head of a request has arrived, counted from the end of the one before
SLOWEST = 16 << 10  # bytes a second that a body needs at least


class TimedReads(io.RawIOBase):
    """What a connection sends, until a deadline (`allow`) after which reading fails with TimeoutError."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self.allow(HEAD_SECONDS)

    def allow(self, seconds: float) -> None:
        self._until = time.monotonic() + seconds

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the request took too long")
        self._connection.settimeout(min(left, QUIET_SECONDS))
        try:
            return self._connection.recv_into(buffer)
        finally:
            self._connection.settimeout(QUIET_SECONDS)


class Places:
    """So many connections at once. Where all places are taken, whoever has waited longest with half a request gives way."""

    def __init__(self, most: int) -> None:
        self._most, self._free = most, threading.Condition()
        self._taken: set[socket.socket] = set()
        self._waiting: dict[socket.socket, None] = {}  # no whole head yet, or body of a stranger; longest first

    def take(self, connection: socket.socket, patience: float = 1.0) -> bool:
        """False if none became free; a connection that waits with half a request is closed for it."""
        with self._free:
            if len(self._taken) >= self._most:
                self._close_longest()
                self._free.wait_for(lambda: len(self._taken) < self._most, patience)
            if len(self._taken) >= self._most:
                return False
            self._taken.add(connection)
            self._waiting[connection] = None
            return True

    def waits(self, connection: socket.socket) -> None:
        """It is to send a request."""
        with self._free:
            self._waiting.pop(connection, None)
            self._waiting[connection] = None

    def works(self, connection: socket.socket) -> None:
        """Its request is answered now."""
        with self._free:
            self._waiting.pop(connection, None)

    def leave(self, connection: socket.socket) -> None:
        with self._free:
            self._waiting.pop(connection, None)
            self._taken.discard(connection)
            self._free.notify_all()

    def _close_longest(self) -> None:
        longest = next(iter(self._waiting), None)
        if longest is not None:
            del self._waiting[longest]
            with contextlib.suppress(OSError):  # it has gone by itself
                longest.shutdown(socket.SHUT_RDWR)
