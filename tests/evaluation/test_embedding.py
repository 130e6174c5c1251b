"""Spaces: the name says which network, and only Inception's distances are called FID and KID."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from osfl.core.errors import OsflError
from osfl.evaluation.embedding import INCEPTION, available_space, random_space
from osfl.models.inception import FEATURES, Inception


def _map(work, items):  # type: ignore[no-untyped-def]
    return [work(item) for item in items]


def test_other_distances_have_other_names() -> None:
    assert (random_space().frechet, random_space().kernel) == ("FD", "KD")


def test_a_users_inception_file_makes_fid(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "inception.safetensors"
    state = {name: value.half() if value.is_floating_point() else value for name, value in Inception().state_dict().items()}
    save_file({**state, "fc.weight": torch.zeros(1008, FEATURES)}, file)
    monkeypatch.setenv(INCEPTION, str(file))
    space = available_space()
    assert (space.frechet, space.kernel, space.side) == ("FID", "KID", 299) and "sha256" in space.name
    features = space.embed(torch.zeros(1, 1, 28, 28, dtype=torch.uint8), torch.device("cpu"), _map)
    assert features.shape == (1, FEATURES) and features.dtype == torch.float64

    del state["Mixed_7c.branch_pool.conv.weight"]
    save_file(state, file)
    with pytest.raises(OsflError, match=r"Mixed_7c\.branch_pool\.conv\.weight"):
        available_space()


def test_a_wrong_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(INCEPTION, str(tmp_path / "none.safetensors"))
    with pytest.raises(OsflError, match=r"(?s)OSFL_INCEPTION names .*none\.safetensors"):
        available_space()
