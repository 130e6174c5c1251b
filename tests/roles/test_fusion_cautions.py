"""What fits and may be wrong all the same: models without a common start, unknown pixel ranges, configs beside a file."""

from __future__ import annotations

import json
import pickle
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from osfl.core.errors import RoundError
from osfl.core.method import Context
from osfl.core.registry import load, names
from osfl.core.seeds import torch_generator
from osfl.core.settings import resolve_settings
from osfl.core.types import Payload, Plan, Task, Upload
from osfl.ingredients.training.model_method import start_student
from osfl.methods.fedmitr import FedMitr
from osfl.models.build import build_model
from osfl.models.common_start import cosines, groups_of_one_start
from osfl.models.naming import ModelError, named
from osfl.models.plain_checkpoints import read_checkpoint, scale_name
from osfl.roles.fusion import examine_checkpoints, fuse
from osfl.rounds.forgetting import forget
from tests.models.test_starting import in_transformers_naming
from tests.roles.test_fusion import CLASSES, NAME, Tensors, plain_models, request, tensors


def fine_tuned(seed: int) -> Tensors:
    """Models a little off one start."""
    rng = torch_generator(seed, "tuned")
    return {name: value + 0.002 * torch.randn(value.shape, generator=rng) for name, value in tensors(0).items()}


def beside(path: Path, name: str, output: dict[str, Any]) -> Path:
    path.with_name(name).write_text(json.dumps(output), encoding="utf-8")
    return path


def test_families_are_of_matrices_with_a_start_in_common() -> None:
    start = tensors(0)
    near = cosines([start, start, {name: -value for name, value in start.items()}])
    torch.testing.assert_close(near, torch.tensor([[1, 1, -1], [1, 1, -1], [-1, -1, 1]], dtype=torch.float64))
    assert groups_of_one_start(cosines([tensors(seed) for seed in (1, 2, 3)])) == [1, 2, 3]
    both = [fine_tuned(1), tensors(7), fine_tuned(2), fine_tuned(3), tensors(7), tensors(7)]
    assert groups_of_one_start(cosines(both)) == [1, 2, 1, 1, 2, 2]  # three and three: each is near the mean of all the others
    chain = torch.tensor([[1, 0.6, 0.0], [0.6, 1, 0.6], [0.0, 0.6, 1]])
    assert groups_of_one_start(chain) == [1, 1, 1] and groups_of_one_start(cosines([])) == []
    assert cosines([{"scale": torch.ones(3)}]).shape == (1, 1)  # nothing to compare


def test_models_without_a_common_start_are_reported_before_they_are_averaged(tmp_path: Path) -> None:
    related = [plain_models(tmp_path / f"{seed}.safetensors", fine_tuned(seed)) for seed in (1, 2)]
    unknown_senders = [plain_models(tmp_path / f"{seed}.safetensors", tensors(seed)) for seed in (8, 9)]
    assert not examine_checkpoints(request(related, method="fedmitr")).cautions
    for method, options in (("fedmitr", "--set init=client"), ("fedavg", "fedavg is a mean of weights")):
        [caution] = examine_checkpoints(request(unknown_senders, method=method)).cautions
        assert options in caution and all(str(path) in caution for path in unknown_senders)
    assert not examine_checkpoints(request(unknown_senders)).cautions  # an ensemble averages answers, not weights
    assert not examine_checkpoints(request(unknown_senders, method="fedmitr", changes={"init": "client"})).cautions
    output = fuse(request(unknown_senders, method="fedmitr"), tmp_path / "out")
    card, page = ((tmp_path / "out" / name).read_text(encoding="utf-8") for name in ("model_card.md", "report/index.html"))
    assert (
        "**Caution.**" in card and "knows next to nothing" in page and [one["family"] for one in output["accepted"]] == [1, 2]
    )


def test_what_was_forgotten_is_not_cautioned_against(tmp_path: Path) -> None:
    related = [plain_models(tmp_path / f"{seed}.safetensors", fine_tuned(seed)) for seed in (1, 2)]
    all_three = request([*related, plain_models(tmp_path / "stranger.safetensors", tensors(9))], method="fedavg")
    output = fuse(all_three, tmp_path / "out")
    assert "stranger.safetensors" in output["cautions"][0]
    unknown_sender = next(one["client"] for one in output["accepted"] if "stranger" in one["file"])
    forget(tmp_path / "out", clients=[unknown_sender])
    again = fuse(all_three, tmp_path / "out")
    assert not again["cautions"] and [one["family"] for one in again["accepted"]] == [1, 1]


@pytest.mark.parametrize("name", [name for name in names() if "init" in load(name).Settings.__dataclass_fields__])
def test_where_the_caution_can_appear_its_advice_is_taken(name: str) -> None:
    method = load(name)
    if method.Settings.__dataclass_fields__["init"].default == "average" or any(
        preset.get("init") == "average" for preset in method.PRESETS.values()
    ):
        for preset in method.PRESETS:
            assert resolve_settings(method, preset, {"init": "client"}).init == "client"


def test_a_server_may_begin_at_the_client_with_most_images() -> None:
    task = Task("t", CLASSES, (3, 16, 16))
    settings = resolve_settings(FedMitr, "smoke", {"architecture": NAME, "init": "client"})
    plan = Plan(task, "fedmitr", settings, ("a", "b", "c"))
    uploads = [
        Upload(
            client,
            plan.digest,
            Payload(
                {f"model/{name}": value for name, value in tensors(seed).items()}, {"architecture": NAME, "samples": samples}
            ),
        )
        for client, seed, samples in (("a", 1, 5), ("b", 2, 9), ("c", 3, 9))
    ]
    for order in (uploads, uploads[::-1]):
        model, _ = start_student(order, FedMitr(task, settings), Context(plan, torch.device("cpu")))
        began = named(model, "model")
        assert all(torch.equal(began[name], value) for name, value in uploads[1].payload.tensors.items())


@pytest.mark.parametrize(
    ("output", "field", "got"),
    [
        ({"hidden_act": "relu"}, "hidden_act", "expected hidden_act gelu, got relu"),
        ({"num_attention_heads": 4}, "num_attention_heads", "expected num_attention_heads 2, got 4"),
        ({"id2label": {"0": "dog", "1": "cat", "2": "owl"}}, "id2label", "'cat' in row 0, got 'dog'"),
        ({"label_names": ["cat", "owl", "dog"]}, "label_names", "'dog' in row 1, got 'owl'"),
        ({"id2label": {}, "labels": {"2": "owl", "0": "dog", "1": "cat"}}, "labels", "'cat' in row 0, got 'dog'"),
    ],
)
def test_a_config_beside_a_file_is_read(output: dict[str, Any], field: str, got: str, tmp_path: Path) -> None:
    good = plain_models(tmp_path / "good.safetensors", tensors(1))
    bad = beside(
        plain_models(tmp_path / "bad" / "model.safetensors", in_transformers_naming(tensors(2))), "config.json", output
    )
    found = examine_checkpoints(request([good, bad]))
    assert [one.file for one in found.refused] == [str(bad)] and found.refused[0].tensor == field
    assert got in found.refused[0].reason and "config.json" in found.refused[0].reason


@pytest.mark.parametrize(
    "output",
    [
        {"hidden_act": "gelu", "num_attention_heads": 2, "id2label": {"0": "cat", "1": "dog", "2": "owl"}},
        {"id2label": {"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}},
        {"hidden_act": None, "id2label": {"a": 1}},
        {},
        {"id2label": {"1" * 5000: "cat"}, "num_attention_heads": True},
        {"hidden_act": "gelu_python"},
    ],
)
def test_a_config_that_agrees_or_does_not_tell_is_no_hindrance(output: dict[str, Any], tmp_path: Path) -> None:
    assert not examine_checkpoints(
        request([beside(plain_models(tmp_path / "m.safetensors", tensors(1)), "config.json", output)])
    ).refused


def test_a_config_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    good = plain_models(tmp_path / "good.safetensors", tensors(1))
    bad = plain_models(tmp_path / "bad" / "model.safetensors", tensors(2))
    for text in ("[", "[1]", "[" * 100_000):
        bad.with_name("config.json").write_text(text, encoding="utf-8")
        found = examine_checkpoints(request([good, bad]))
        assert "the config.json beside" in found.refused[0].reason and found.refused[0].tensor == "config.json"


def reported(tmp_path: Path, name: str, output: dict[str, Any], **options: Any) -> Any:
    """The one model with such a file beside it, accepted or refused."""
    found = examine_checkpoints(
        request(
            [
                beside(plain_models(tmp_path / "without_config" / "model.safetensors", tensors(1)), name, output),
                plain_models(tmp_path / "plain.safetensors", tensors(2)),
            ],
            **options,
        )
    )
    accepted: list[tuple[str, Any]] = [(one.checkpoint.file, one) for one in found.accepted]
    return next(one for file, one in [*accepted, *((one.file, one) for one in found.refused)] if "without_config" in str(file))


MEAN, DEVIATION = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
PIXELS: list[tuple[str, dict[str, Any], str]] = [
    ("config.json", {"pretrained_cfg": {"mean": MEAN, "std": DEVIATION}}, "imagenet"),
    ("config.json", {"architecture": "deit", "mean": MEAN, "std": DEVIATION}, "imagenet"),  # as timm wrote it once
    ("preprocessor_config.json", {"image_mean": MEAN, "image_std": DEVIATION}, "imagenet"),
    ("preprocessor_config.json", {"image_mean": [0.48500001430511475, 0.456, 0.406], "image_std": DEVIATION}, "imagenet"),
    ("preprocessor_config.json", {"image_mean": 0.5, "image_std": [0.5]}, "symmetric"),
    (
        "preprocessor_config.json",
        {"do_normalize": False, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
        "mean 0 0 0, deviation 1 1 1",
    ),
    (
        "preprocessor_config.json",
        {"do_rescale": False, "image_mean": [123.675, 116.28, 103.53], "image_std": [58.395, 57.12, 57.375]},
        "imagenet",
    ),
    ("preprocessor_config.json", {"rescale_factor": 1 / 127.5, "image_mean": 1, "image_std": 1}, "symmetric"),
]


@pytest.mark.parametrize(("name", "output", "scale"), PIXELS)
def test_pixels_are_as_the_files_beside_tell(name: str, output: dict[str, Any], scale: str, tmp_path: Path) -> None:
    one = reported(tmp_path, name, output)
    assert (scale_name(one.pixels), one.pixels_by) == (scale, "from files beside it")
    red = one.payload.tensors["model/patch_embed.proj.weight"][:, 0]
    torch.testing.assert_close(red, tensors(1)["patch_embed.proj.weight"][:, 0] / (2 * one.pixels[1][0]))


def test_a_user_who_says_pixels_counts_more_than_what_lies_beside(tmp_path: Path) -> None:
    output = {"image_mean": MEAN, "image_std": DEVIATION}
    against = reported(tmp_path, "preprocessor_config.json", output, pixels="symmetric")
    plain = tensors(1)["patch_embed.proj.weight"]
    assert torch.equal(against.payload.tensors["model/patch_embed.proj.weight"], plain)
    assert reported(tmp_path, "preprocessor_config.json", output, pixels="imagenet").pixels_by == "set by --pixels"
    [caution] = examine_checkpoints(request([tmp_path / "without_config" / "model.safetensors"], pixels="symmetric")).cautions
    assert "gives other pixels than --pixels symmetric" in caution


@pytest.mark.parametrize(
    "text",
    [
        '{"image_mean": [0.5, 0.5], "image_std": 1}',
        '{"image_mean": [NaN, 0, 0], "image_std": 1}',
        '{"image_mean": 0.5, "image_std": [0.2, NaN, 0.2]}',
        '{"image_mean": 0.5, "image_std": Infinity}',
        '{"image_mean": 0.5, "image_std": 1e-300}',
        '{"image_mean": [true, true, true], "image_std": 1}',
        '{"image_mean": "half", "image_std": 1}',
        '{"image_mean": 0, "image_std": 1, "rescale_factor": 0}',
        '{"image_mean": [%s, 0, 0], "image_std": 1}' % ("1" * 400),
        '{"image_mean": 0.5, "image_std": 0}',
    ],
)
def test_pixels_that_cannot_be_meant_are_refused(text: str, tmp_path: Path) -> None:
    bad = plain_models(tmp_path / "bad" / "model.safetensors", tensors(1))
    bad.with_name("preprocessor_config.json").write_text(text, encoding="utf-8")
    found = examine_checkpoints(request([bad, plain_models(tmp_path / "plain.safetensors", tensors(2))]))
    assert [one.file for one in found.refused] == [str(bad)] and "cannot be understood" in found.refused[0].reason
    assert len(found.refused[0].reason) < 400 and "folder without it" in found.refused[0].fix


def test_pixels_that_a_first_layer_cannot_take_are_refused_unless_the_user_knows_better(tmp_path: Path) -> None:
    task = Task("t", CLASSES, (1, 16, 16))
    gray = dict(build_model(NAME, task, torch_generator(0, "gray")).state_dict())
    path = beside(plain_models(tmp_path / "gray.safetensors", gray), "config.json", {"mean": MEAN, "std": DEVIATION})
    with pytest.raises(RoundError, match="vision transformers for RGB"):
        examine_checkpoints(request([path]))
    assert examine_checkpoints(request([path], pixels="symmetric")).accepted


@pytest.mark.parametrize("name", ["deit_tiny-w16-d1-h2", "vit_small_dinov2-w16-d1-h2"])
def test_pixels_of_what_is_published_for_others_are_not_assumed_in_silence(name: str, tmp_path: Path) -> None:
    path = plain_models(tmp_path / "published.safetensors", tensors(1, name, side=28 if "dino" in name else 32))

    def cautions(**options: Any) -> list[str]:
        return list(examine_checkpoints(replace(request([path], **options), architecture=name)).cautions)

    assert "--pixels imagenet" in cautions()[0] and not cautions(pixels="imagenet") and not cautions(pixels="symmetric")


def test_a_file_counts_once_whatever_lies_beside_it(tmp_path: Path) -> None:
    one = beside(
        plain_models(tmp_path / "a" / "model.safetensors", tensors(1)), "config.json", {"mean": MEAN, "std": DEVIATION}
    )
    found = examine_checkpoints(request([one, plain_models(tmp_path / "b" / "model.safetensors", tensors(1))]))
    assert len(found.accepted) == 1 and "the same weights as" in found.refused[0].reason


class EntryNotFoundError(Exception):
    """As huggingface_hub calls it."""


class LocalEntryNotFoundError(EntryNotFoundError):
    """No network, and nothing in the cache: nobody was asked."""


def test_a_file_of_a_hub_is_offered_with_what_lies_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    missing: list[Exception] = [EntryNotFoundError("404")]

    def gives(repository: str, file: str, revision: str | None) -> str:
        asked.append((repository, file, revision))
        if file.endswith("preprocessor_config.json"):
            raise missing[-1]
        path = tmp_path / "cache" / Path(file).name
        if file.endswith("config.json"):
            return str(
                beside(plain_models(path.with_name("model.safetensors"), tensors(3)), path.name, {"mean": 0.5, "std": 0.25})
            )
        return str(path)

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(hf_hub_download=gives))
    [one] = examine_checkpoints(request([Path("hub:owner/name@v1:deep/model.safetensors")])).accepted
    assert one.checkpoint.file == "hub:owner/name@v1:deep/model.safetensors" and one.pixels == ((0.5,) * 3, (0.25,) * 3)
    assert [name for _, name, _ in asked] == [
        f"deep/{name}" for name in ("config.json", "preprocessor_config.json", "model.safetensors")
    ]
    missing.append(LocalEntryNotFoundError("offline"))
    with pytest.raises(RoundError, match="the hub did not give"):
        examine_checkpoints(request([Path("hub:owner/name")]))


def test_a_fusion_that_begins_at_a_file_says_which(tmp_path: Path) -> None:
    start = plain_models(tmp_path / "start.safetensors", tensors(5))
    pinned = sha256(start.read_bytes()).hexdigest()
    changes = {"init": "pretrained", "pretrained": str(start), "pretrained_sha256": pinned}
    related = [plain_models(tmp_path / f"{seed}.safetensors", fine_tuned(seed)) for seed in (1, 2)]
    output = fuse(request(related, method="fedmitr", changes=changes), tmp_path / "out")
    assert output["settings"]["pretrained_sha256"] == pinned and "epochs" not in output["settings"]


def test_a_pickle_of_any_age_is_not_called_a_broken_download_alone(tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"head.weight": [1.0]}, protocol=0))
    with pytest.raises(ModelError) as caught:
        read_checkpoint(tmp_path / "old.pt")
    assert "if it is a pickle, its owner can convert it" in str(caught.value.fix)
