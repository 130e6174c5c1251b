"""Findings: what is wrong or unusual about the data, grouped by reason, with counts and the first examples."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from osfl.core.result import Finding
from osfl.core.types import ClientId
from osfl.data.source import Problem

EXAMPLES = 3


def grouped(problems: Iterable[Problem], examples: int | None = EXAMPLES) -> list[Finding]:
    """One finding for each reason, in the order of the first file of each; `examples=None` names every file."""
    kinds: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        kinds.setdefault((problem.what, problem.done), []).append(_named(problem))
    return [
        {"what": _printable(what), "done": _printable(done), "count": len(names), "examples": names[:examples]}
        for (what, done), names in kinds.items()
    ]


def _named(problem: Problem) -> str:
    return _printable(f"{problem.path} ({problem.detail})" if problem.detail else problem.path)


def _printable(text: str) -> str:
    """On one line, and without characters that could steer a terminal: names of files and classes are not ours."""
    return "".join(char if char.isprintable() else "?" for char in text)


def class_problems(
    classes: Sequence[str], counts: Mapping[ClientId, Sequence[int]], test: Sequence[int] | None = None
) -> list[Problem]:
    """Classes with too few images, from the images of each client by class and those of the test part, if there is one."""
    totals = [sum(column) for column in zip(*counts.values(), strict=True)]
    problems = []
    for name, total in zip(classes, totals, strict=True):
        if total == 0:
            problems.append(Problem(name, "no training image of a class", "kept as a class; nothing can be learned about it"))
        if total == 1:
            problems.append(Problem(name, "one training image of a class", "used; nothing of the class can be held out"))
    common = [total > 1 for total in totals]
    for client, row in counts.items():
        problems += [p for p, several in zip(_few(classes, client, row), common, strict=True) if p and several]
    absent = [name for name, n in zip(classes, test, strict=True) if not n] if test is not None else []
    return problems + [Problem(name, "no test image of a class", "kept as a class; no score says anything") for name in absent]


def site_class_problems(classes: Sequence[str], client: ClientId, counts: Sequence[int]) -> list[Problem]:
    """The same at one site of a real round, which does not know what the others have."""
    return [problem for problem in _few(classes, client, counts) if problem]


def _few(classes: Sequence[str], client: ClientId, counts: Sequence[int]) -> list[Problem | None]:
    """One entry a class: too few images at this client, or None."""
    what = {
        0: ("a client without images of a class", "left as it is: the other clients may have some"),
        1: ("a client with one image of a class", "used to train, not held out for validation"),
    }
    return [Problem(f"{client}/{name}", *what[n]) if n in what else None for name, n in zip(classes, counts, strict=True)]
