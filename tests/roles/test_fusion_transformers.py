"""Files that the installed transformers writes: what fits gives the same answers, what does not is told what would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.core.errors import RoundError
from osfl.core.seeds import torch_generator
from osfl.models.build import build_model
from osfl.roles.fusion import FusionRequest, examine_checkpoints

transformers = pytest.importorskip("transformers")

SHAPE = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 3,
}
NEAR = 1e-5  # their layer norms have another epsilon
NAME, CLASSES = "vit-p4-w16-d2-h2", ("cat", "dog", "owl")


def saved(kind: str, folder: Path, **more: int) -> Any:
    """A small model of theirs with weights that matter, all of them, and its file."""
    model = getattr(transformers, f"{kind}ForImageClassification")(getattr(transformers, f"{kind}Config")(**SHAPE, **more))
    rng = torch_generator(0, kind)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(0.3 * torch.randn(value.shape, generator=rng))
    model.save_pretrained(folder)
    return model.eval()


def refusal(folder: Path, architecture: str = NAME) -> str:
    with pytest.raises(RoundError) as caught:
        examine_checkpoints(FusionRequest([folder / "model.safetensors"], architecture, CLASSES))
    return str(caught.value)


def test_a_vit_of_transformers_answers_as_there(tmp_path: Path) -> None:
    theirs = saved("ViT", tmp_path, intermediate_size=64)
    found = examine_checkpoints(FusionRequest([tmp_path / "model.safetensors"], NAME, CLASSES))
    [one] = found.accepted
    assert one.checkpoint.naming == "transformers" and found.task.image == (3, 16, 16)
    ours = build_model(NAME, found.task)
    ours.load_state_dict({name.removeprefix("model/"): value for name, value in one.payload.tensors.items()})
    x = torch.rand((5, 3, 16, 16), generator=torch_generator(0, "x")) * 2 - 1
    with torch.no_grad():
        expected = theirs(pixel_values=x).logits
        torch.testing.assert_close(ours.eval()(x), expected, rtol=0, atol=NEAR)
    assert expected.std(0).min() > 100 * NEAR  # between images they differ by far more


def test_a_deit_of_transformers_is_reported_which_class_fits(tmp_path: Path) -> None:
    saved("DeiT", tmp_path, intermediate_size=64)
    output = refusal(tmp_path)
    assert "'deit.embeddings.position_embeddings'" in output and "got F32 [1, 18, 16]" in output
    assert "distilled DeiT" in output and "in transformers a ViTForImageClassification" in output


def test_a_dinov2_of_transformers_is_reported_what_its_head_reads(tmp_path: Path) -> None:
    saved("Dinov2", tmp_path, mlp_ratio=4)
    output = refusal(tmp_path, "vit_small_dinov2-p4-w16-d2-h2")
    assert "'classifier.weight'" in output and "expected F32 [3, 16], got F32 [3, 32]" in output
    assert "the mean of all patches beside it, as in transformers' Dinov2ForImageClassification" in output
