"""Every error a user can cause, in a few families; each names who, which field, what was expected, what came, what to do."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from math import isfinite

# What code raises that works with contents nobody expected; never a user's own exception, nor a disk's.
UNUSABLE = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


class OsflError(Exception):
    """A user's mistake or a refused input: shown without a traceback, exit code 1."""

    exit_code = 1
    title = "Failed"

    def __init__(
        self,
        reason: str,
        *,
        client: str | None = None,
        field: str | None = None,
        expected: object = None,
        got: object = None,
        fix: str | None = None,
    ) -> None:
        self.reason, self.client, self.field = reason, client, field
        self.expected, self.got, self.fix = expected, got, fix
        super().__init__(reason)

    def __str__(self) -> str:
        who = f" '{self.client}'" if self.client else ""
        text = f"{self.title}{who}: {self.reason}"
        if self.expected is not None:
            text += f" (expected {self.expected}, got {self.got})" if self.got is not None else f" (expected {self.expected})"
        sentence = text if text.endswith(("?", "!", ".")) else f"{text}."
        return f"{sentence}\n{self.fix}" if self.fix else sentence

    def as_json(self) -> dict[str, object]:
        """The same facts for scripts (`--format json`)."""
        keys = ("client", "field", "expected", "got", "fix")
        facts = {key: getattr(self, key) for key in keys if getattr(self, key) is not None}
        safe = {key: value if isinstance(value, (str, int)) or _finite(value) else str(value) for key, value in facts.items()}
        return {"error": type(self).__name__, "reason": self.reason, **safe}


def _finite(value: object) -> bool:
    """JSON has numbers for these only."""
    return isinstance(value, float) and isfinite(value)


class UsageError(OsflError):
    """Wrong usage: mistakes on the command line or in a plan, all at once. Exit code 2."""

    exit_code = 2
    title = "Cannot start"

    def __init__(self, problems: str | Sequence[str], *, field: str | None = None, fix: str | None = None) -> None:
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        reason = self.problems[0] if len(self.problems) == 1 else "".join(f"\n  - {p}" for p in self.problems)
        super().__init__(reason, field=field, fix=fix)

    def as_json(self) -> dict[str, object]:
        return {**super().as_json(), "reason": "; ".join(self.problems), "problems": self.problems}


class Rejected(OsflError):
    """A bundle was rejected by the gate or the inbox; nothing of it was used."""

    title = "Upload rejected from"

    def __str__(self) -> str:
        if self.client is None:
            self.client = "unknown sender"
        return super().__str__()


class UploadBlocked(OsflError):
    """A client refuses to send this; nothing left the building."""

    title = "Nothing was sent by"


class DataError(OsflError):
    """A dataset, image file or label that cannot be used."""

    title = "Data"


class RoundError(OsflError):
    """A round folder that holds something else, or lacks something."""

    title = "Round"


class TrainingError(OsflError):
    """Learning went wrong in a way that the user can act on (a loss that is not finite, an empty class)."""

    title = "Training"


class DeviceError(OsflError):
    """The device that networks compute on has too little memory, or is gone. What was finished is kept."""

    title = "Device"


class FilesError(OsflError):
    """The file system refused: no permission, of the wrong kind, or full."""

    title = "Files"


def go_on_without(client: str) -> str:
    """What a coordinator does about an upload that cannot be used."""
    return f"Go on without it: `osfl server ROUND --exclude {client}`."


def nearest(wanted: str, known: tuple[str, ...] | list[str]) -> str:
    """' Did you mean a or b?' or nothing."""
    close = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5)
    return f" Did you mean {' or '.join(repr(name) for name in close)}?" if close else ""
