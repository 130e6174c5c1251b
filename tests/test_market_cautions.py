"""What fits and may be wrong all the same: models without a common start, pixels that nobody told, configs beside a file."""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from osfl.ingredients.model_upload import start_student
from osfl.market import examine, fuse
from osfl.models.kinship import kinship
from osfl.models.naming import ModelError, named
from osfl.models.offers import read_offer
from osfl.plan import resolve_settings
from osfl.protocol import Context, Payload, Plan, Task, Upload
from osfl.registry import load
from osfl.seeds import torch_generator

from .models.test_starting import in_transformers_words
from .test_market import CLASSES, NAME, Tensors, market, offered, tensors

RGB = {"imagenet": ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]), "symmetric": ([0.5] * 3, [0.5] * 3)}


def fine_tuned(seed: int) -> Tensors:
    """Models a little off one start."""
    rng = torch_generator(seed, "tuned")
    return {name: value + 0.002 * torch.randn(value.shape, generator=rng) for name, value in tensors(0).items()}


def beside(path: Path, name: str, said: dict[str, Any]) -> Path:
    path.with_name(name).write_text(json.dumps(said), encoding="utf-8")
    return path


def test_kinship_is_of_matrices_and_between_one_and_nothing() -> None:
    start = tensors(0)
    assert kinship([start]) == [1.0] and kinship([start, start]) == pytest.approx([1.0, 1.0])
    assert max(kinship([tensors(seed) for seed in (1, 2, 3)])) < 0.2
    near = kinship([fine_tuned(1), fine_tuned(2), tensors(7)])
    assert min(near[:2]) > 0.6 and near[2] < 0.2  # the stranger is told from the others
    opposite = {name: -value for name, value in start.items()}
    assert kinship([start, opposite]) == pytest.approx([-1.0, -1.0])
    assert kinship([{"scale": torch.ones(3)}, {"scale": torch.zeros(3)}]) == [1.0, 1.0]  # nothing to compare


def test_models_without_a_common_start_are_told_before_they_are_averaged(tmp_path: Path) -> None:
    related = [offered(tmp_path / f"{seed}.safetensors", fine_tuned(seed)) for seed in (1, 2)]
    strangers = [offered(tmp_path / f"{seed}.safetensors", tensors(seed)) for seed in (8, 9)]
    assert not examine(market(related, method="fedmitr")).cautions
    for method, words in (("fedmitr", "--set init=client"), ("fedavg", "--method ensemble")):
        [caution] = examine(market(strangers, method=method)).cautions
        assert words in caution and all(str(path) in caution for path in strangers)
    assert not examine(market(strangers)).cautions  # an ensemble averages answers, not weights
    assert not examine(market(strangers, method="fedmitr", changes={"init": "client"})).cautions
    said = fuse(market(strangers, method="fedmitr"), tmp_path / "out")
    card, page = ((tmp_path / "out" / name).read_text(encoding="utf-8") for name in ("model_card.md", "report/index.html"))
    assert "**Caution.**" in card and "knows next to nothing" in page and max(one["kinship"] for one in said["accepted"]) < 0.5


def test_a_server_may_begin_at_the_client_with_most_images() -> None:
    task, method = Task("t", CLASSES, (3, 16, 16)), load("fedmitr")
    settings = resolve_settings(method, "smoke", {"architecture": NAME, "init": "client"})
    plan = Plan(task, "fedmitr", settings, ("a", "b", "c"))
    uploads = [Upload(client, plan.digest, Payload({f"model/{name}": value for name, value in tensors(seed).items()},
                                                   {"architecture": NAME, "samples": samples}))
               for client, seed, samples in (("a", 1, 5), ("b", 2, 9), ("c", 3, 9))]  # fmt: skip
    for order in (uploads, uploads[::-1]):
        model, _ = start_student(order, method(task, settings), Context(plan, torch.device("cpu")))
        began = named(model, "model")
        assert all(torch.equal(began[name], value) for name, value in uploads[1].payload.tensors.items())


@pytest.mark.parametrize(
    ("said", "field", "got"),
    [
        ({"hidden_act": "relu"}, "hidden_act", "expected hidden_act gelu, got relu"),
        ({"num_attention_heads": 4}, "num_attention_heads", "expected num_attention_heads 2, got 4"),
        ({"id2label": {"0": "dog", "1": "cat", "2": "owl"}}, "id2label", "'cat' in row 0, got 'dog'"),
        ({"label_names": ["cat", "owl", "dog"]}, "label_names", "'dog' in row 1, got 'owl'"),
    ],
)
def test_a_config_beside_a_file_speaks_for_it(said: dict[str, Any], field: str, got: str, tmp_path: Path) -> None:
    good = offered(tmp_path / "good.safetensors", tensors(1))
    bad = beside(offered(tmp_path / "bad" / "model.safetensors", in_transformers_words(tensors(2))), "config.json", said)
    found = examine(market([good, bad]))
    assert [one.file for one in found.refused] == [str(bad)] and found.refused[0].tensor == field
    assert got in found.refused[0].reason and "config.json" in found.refused[0].reason


@pytest.mark.parametrize(
    "said",
    [{"hidden_act": "gelu", "num_attention_heads": 2, "id2label": {"0": "cat", "1": "dog", "2": "owl"}},
     {"id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}}, {"hidden_act": None, "id2label": {"a": 1}}, {}],
)  # fmt: skip
def test_a_config_that_agrees_or_does_not_tell_is_no_hindrance(said: dict[str, Any], tmp_path: Path) -> None:
    assert not examine(market([beside(offered(tmp_path / "m.safetensors", tensors(1)), "config.json", said)])).refused


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    good = offered(tmp_path / "good.safetensors", tensors(1))
    bad = offered(tmp_path / "bad" / "model.safetensors", tensors(2))
    for text in ("[", "[1]", "[" * 100_000):
        bad.with_name("config.json").write_text(text, encoding="utf-8")
        found = examine(market([good, bad]))
        assert "the config.json beside" in found.refused[0].reason and found.refused[0].tensor == "config.json"


@pytest.mark.parametrize("timm", [True, False])
def test_pixels_are_as_the_files_beside_tell(timm: bool, tmp_path: Path) -> None:
    mean, deviation = RGB["imagenet"]
    name = "config.json" if timm else "preprocessor_config.json"
    said = {"pretrained_cfg": {"mean": mean, "std": deviation}} if timm else {"image_mean": mean, "image_std": deviation}
    told = beside(offered(tmp_path / "told" / "model.safetensors", tensors(1)), name, said)
    plain = offered(tmp_path / "plain.safetensors", tensors(2))
    by_file = {one.offer.file: one for one in examine(market([told, plain])).accepted}
    assert (by_file[str(told)].pixels_by, by_file[str(plain)].pixels_by) == ("told beside the file", "assumed")
    folded = by_file[str(told)].payload.tensors["model/patch_embed.proj.weight"]
    torch.testing.assert_close(folded[:, 0], tensors(1)["patch_embed.proj.weight"][:, 0] / (2 * 0.229))
    refused = examine(market([told, plain], pixels="symmetric")).refused
    assert [one.file for one in refused] == [str(told)] and "--pixels symmetric contradicts" in refused[0].reason
    assert not examine(market([told, plain], pixels="imagenet")).refused


def test_pixels_of_deit_are_not_assumed_in_silence(tmp_path: Path) -> None:
    def told(**words: Any) -> list[str]:
        path = offered(tmp_path / "deit.safetensors", tensors(1, "deit_tiny-w16-d1-h2", side=32))
        return list(examine(replaced(market([path], **words))).cautions)

    def replaced(one: Any) -> Any:
        return type(one)(**{**one.__dict__, "architecture": "deit_tiny-w16-d1-h2"})

    assert "--pixels imagenet" in told()[0] and not told(pixels="imagenet") and not told(pixels="symmetric")


def test_a_file_of_a_hub_may_be_offered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def gives(repository: str, file: str, revision: str | None) -> str:
        asked.append((repository, file, revision))
        return str(offered(tmp_path / "cache" / "model.safetensors", tensors(3)))

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=gives))
    [one] = examine(market([Path("hub:owner/name@v1")])).accepted
    assert one.offer.file == "hub:owner/name@v1" and asked == [("owner/name", "model.safetensors", "v1")]


def test_a_market_that_begins_at_a_file_says_which(tmp_path: Path) -> None:
    from hashlib import sha256

    start = offered(tmp_path / "start.safetensors", tensors(5))
    pinned = sha256(start.read_bytes()).hexdigest()
    changes = {"init": "pretrained", "pretrained": str(start), "pretrained_sha256": pinned}
    related = [offered(tmp_path / f"{seed}.safetensors", fine_tuned(seed)) for seed in (1, 2)]
    said = fuse(market(related, method="fedmitr", changes=changes), tmp_path / "out")
    assert said["settings"]["pretrained_sha256"] == pinned and "epochs" not in said["settings"]


def test_a_pickle_of_any_age_is_not_called_a_broken_download_alone(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"head.weight": [1.0]}, protocol=0))
    with pytest.raises(ModelError) as caught:
        read_offer(tmp_path / "old.pt")
    assert "if it is a pickle, its owner can convert it" in str(caught.value.fix)
