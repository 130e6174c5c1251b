"""Simulation: the bytes go straight from a client's hand into the inbox, through the same gate as a stranger's."""

from __future__ import annotations

from osfl.wire.inbox import Inbox, Receipt


def deliver(bundle: bytes, inbox: Inbox) -> Receipt:
    """Hand one bundle over; returns when it is safe on disk."""
    return inbox.receive(bundle)
