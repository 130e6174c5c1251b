"""What a server does turn by turn, and what its progress says."""

from dataclasses import dataclass

import pytest

from osfl.ingredients.distillation.order import StudyOrder, order_problems, progress_report, studies, turns


@dataclass(frozen=True)
class Settings(StudyOrder):
    server_epochs: int = 2


def test_interleaved_each_epoch_of_images_has_a_lesson() -> None:
    assert turns(Settings()) == [(0, 0), (1, 1)] and studies(Settings()) == 2
    assert [progress_report(Settings(), *turn, "epochs") for turn in turns(Settings())] == [("epochs", 1, 2), ("epochs", 2, 2)]


@pytest.mark.parametrize(("asked", "lessons"), [(0, 2), (3, 3)])
def test_images_first_then_as_many_lessons_as_asked_for(asked: int, lessons: int) -> None:
    s = Settings("images_first", asked)
    assert turns(s) == [(0, None), (1, None), *((None, lesson) for lesson in range(lessons))] and studies(s) == lessons
    shown = [progress_report(s, *turn, "images") for turn in turns(s)]
    assert shown[:2] == [("images", 1, 2), ("images", 2, 2)]
    assert shown[2:] == [("student epochs", lesson + 1, lessons) for lesson in range(lessons)]


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (Settings("images_first", -1), "expected zero or more, got -1"),
        (Settings("interleaved", 3), "set order=images_first"),
        (Settings("images_first", 3), ""),
        (Settings("images_first", 0), ""),
        (Settings("interleaved", 0), ""),
    ],
)
def test_lessons_after_all_images_need_that_order(settings: Settings, problem: str) -> None:
    found = order_problems(settings)
    assert problem in found[0] if problem else not found
