"""Why an image file cannot be used."""

from __future__ import annotations


class Unusable(Exception):
    """Why an image cannot be used, in the same words for the same cause, and what differs from file to file."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason, self.detail = reason, detail
