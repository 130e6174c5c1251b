"""When a server's student learns: after each epoch of images, as published, or only when all images are there.

A student that learns along the way meets the smallest pool with its largest rates. Where images do not depend on it, nothing is
lost by making all of them first, and it may then learn for longer than images are made.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from osfl.core.types import ADDED


@dataclass(frozen=True)
class StudyOrder:
    """Mixed into the Settings of methods whose server makes images in `server_epochs`."""

    # images_first: only when all images are there, and then `student_epochs` times over all of them
    order: Literal["interleaved", "images_first"] = field(default="interleaved", metadata=ADDED)  # when the student learns
    student_epochs: int = field(default=0, metadata=ADDED)  # after all images, with images_first; 0 = server_epochs


def studies(settings: Any) -> int:
    """How many epochs the student learns."""
    return int(settings.order == "images_first" and settings.student_epochs) or int(settings.server_epochs)


def turns(settings: Any) -> list[tuple[int | None, int | None]]:
    """What a server does, turn by turn: the epoch of images that it makes, and that in which its student learns."""
    if settings.order == "interleaved":
        return [(epoch, epoch) for epoch in range(settings.server_epochs)]
    return [*((epoch, None) for epoch in range(settings.server_epochs)), *((None, epoch) for epoch in range(studies(settings)))]


def progress_report(settings: Any, images: int | None, lesson: int | None, what: str) -> tuple[str, int, int]:
    """What a turn adds to the progress."""
    if images is not None:
        return what, images + 1, int(settings.server_epochs)
    return "student epochs", (lesson or 0) + 1, studies(settings)


def order_problems(settings: StudyOrder) -> list[str]:
    if settings.student_epochs < 0:
        return [f"setting 'student_epochs': expected zero or more, got {settings.student_epochs}"]
    if settings.student_epochs and settings.order == "interleaved":
        return ["setting 'student_epochs': they follow all images; set order=images_first, or passes for each epoch"]
    return []
