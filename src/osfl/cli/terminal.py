"""Output of the command line: results to stdout, everything else to stderr; `--format json` prints one JSON value."""

from __future__ import annotations

import contextlib
import json
import sys
import unicodedata
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

INTERRUPTED = "Interrupted: run the same command again to continue."


def output() -> Console:
    """Plain text where stdout is not a terminal; no guessing at what deserves a color."""
    from rich.console import Console

    return Console(highlight=False)


def errors() -> Console:
    from rich.console import Console

    return Console(stderr=True, highlight=False)


def note(text: str) -> None:
    """Something that went wrong beside the work itself, which goes on."""
    errors().print(f"Note: {text}", markup=False, soft_wrap=True)


def echo(text: str = "") -> None:
    """One line that is never broken, so that paths and commands can be copied."""
    output().print(text, soft_wrap=True)


def put_json(value: object) -> None:
    utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    text = json.dumps(value, indent=2, ensure_ascii=not utf8, allow_nan=False)
    sys.stdout.write(text.encode("utf-8", "replace").decode() + "\n")  # a file may be named in bytes that are no text
    sys.stdout.flush()


def wants_json(args: list[str]) -> bool:
    """Whether failures belong on stdout as JSON; asked before the arguments are parsed, and also if that fails."""
    return "--format=json" in args or ("--format", "json") in pairwise(args)


def complain(text: str, facts: dict[str, object], as_json: bool) -> None:
    """A user's mistake: one clear message on stderr, or its facts on stdout for scripts. Never a traceback."""
    if as_json:
        with contextlib.suppress(OSError):  # stdout itself is full: then only stderr is left
            put_json(facts)
            return
    head, _, rest = text.replace(": \n", ":\n").partition(":")
    errors().print(f"[bold red]{escape(head)}:[/]{escape(rest)}", soft_wrap=True)


def on_one_line(text: str) -> str:
    """A name from a file or folder, without line breaks and without anything that could steer a terminal."""
    return "".join(_harmless(char) for char in text)


def _harmless(char: str) -> str:
    """Blanks that keep a number and its unit together are blanks; what could steer a terminal is a question mark."""
    return char if char.isprintable() else " " if unicodedata.category(char) == "Zs" else "?"


def escape(text: str) -> str:
    """Text that holds square brackets, shown as it is; what could steer a terminal (an untrusted file name) is not."""
    from rich.markup import escape as escaped

    return escaped("".join(char if char in "\n\t" else _harmless(char) for char in text))
