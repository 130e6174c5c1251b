"""What cannot work with uploaded ViTs is said before anything is trained."""

from typing import Any

from osfl.ingredients.training.uploaded_vits import UploadedVits, counts_needed, vit_student_problems


def test_networks_without_patches_and_unlike_patches_are_refused() -> None:
    settings = UploadedVits(init="random")
    assert "'cnn-w4' has no patches" in vit_student_problems(settings, ["cnn-w4"])[0]
    assert "one patch size" in vit_student_problems(settings, ["vit-p2", "vit-p4"])[0]
    assert vit_student_problems(settings, ["vit-p4", "vit-p4-w32"]) == []


def test_the_students_patches_are_the_clients() -> None:
    settings = UploadedVits(init="random", student="vit-p2")
    assert "one patch size; vit-p4 has 4, vit-p2 has 2" in vit_student_problems(settings, ["vit-p4"])[0]


def test_every_number_out_of_range_is_named() -> None:
    wrong: dict[str, Any] = {
        "server_epochs": 0,
        "passes": 0,
        "student_lr": 0.0,
        "temperature": 0.0,
        "balance": -1.0,
        "votes": -1.0,
        "pool_epochs": -1,
        "student_momentum": -1.0,
        "student_decay": -1.0,
        "student_clip": -1.0,
        "student_batch": 1,
    }
    found = vit_student_problems(UploadedVits(**wrong), ["vit-p4"])
    assert [problem.split("'")[1] for problem in found] == list(wrong)


def test_counts_are_asked_for_only_where_they_are_used() -> None:
    assert not counts_needed(UploadedVits())
    needing: list[dict[str, Any]] = [
        {"balance": 0.5},
        {"labels": "seen"},
        {"labels": "counts"},
        {"ensemble": "odds"},
        {"ensemble": "class_count"},
    ]
    assert all(counts_needed(UploadedVits(**change)) for change in needing)
