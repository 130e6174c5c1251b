"""In-memory transport of simulations: bytes go straight to the inbox, through the same gate as in real rounds."""

from __future__ import annotations

from osfl.wire.inbox import Inbox, Receipt


def deliver(bundle: bytes, inbox: Inbox) -> Receipt:
    """Hand one bundle over; returns when it is safe on disk."""
    return inbox.receive(bundle)
