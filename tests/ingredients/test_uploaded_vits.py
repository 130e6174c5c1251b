"""What cannot work with uploaded ViTs is said before anything is trained."""

from osfl.ingredients.uploaded_vits import UploadedVits, vit_student_problems


def test_networks_without_patches_and_unlike_patches_are_refused() -> None:
    settings = UploadedVits(init="random")
    assert "'cnn-w4' has no patches" in vit_student_problems(settings, ["cnn-w4"])[0]
    assert "one patch size" in vit_student_problems(settings, ["vit-p2", "vit-p4"])[0]
    assert vit_student_problems(settings, ["vit-p4", "vit-p4-w32"]) == []
