"""Fusion: files of others in, one model out; every refusal says which file and which tensor."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from osfl.core.errors import RoundError, UsageError
from osfl.core.seeds import torch_generator
from osfl.core.types import Limits, Task
from osfl.models.build import build_model
from osfl.models.inputs import to_input
from osfl.roles.fusion import FusionRequest, check_request, examine_checkpoints, fuse
from osfl.rounds.finished import load_model
from osfl.runtime.machine import Machine
from tests.models.test_starting import in_transformers_naming

NAME = "vit-p4-w16-d1-h2"
CLASSES = ("cat", "dog", "owl")
Tensors = dict[str, torch.Tensor]


def tensors(seed: int, name: str = NAME, classes: int = 3, side: int = 16) -> Tensors:
    task = Task("t", tuple(map(str, range(classes))), (3, side, side))
    return dict(build_model(name, task, torch_generator(seed, "offered")).state_dict())


def plain_models(path: Path, given: Tensors) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: value.contiguous() for name, value in given.items()}, path)
    return path


def three_models(tmp_path: Path) -> list[Path]:
    """With timm's names, with transformers' names, and in half precision."""
    half = {name: value.half() for name, value in tensors(2).items()}
    return [
        plain_models(tmp_path / "north" / "model.safetensors", tensors(0)),
        plain_models(tmp_path / "south" / "model.safetensors", in_transformers_naming(tensors(1))),
        plain_models(tmp_path / "half.safetensors", half),
    ]


@pytest.fixture
def stall(tmp_path: Path) -> list[Path]:
    return three_models(tmp_path)


def request(models: list[Path], **arguments: Any) -> FusionRequest:
    return FusionRequest(models, NAME, CLASSES, **{"method": "ensemble", "preset": "smoke", **arguments})


def test_every_naming_is_accepted_as_it_is(stall: list[Path]) -> None:
    found = examine_checkpoints(request(stall))
    task, accepted, refused = found.task, found.accepted, found.refused
    assert task.image == (3, 16, 16) and not refused  # told by patches and positions
    assert sorted(one.checkpoint.naming for one in accepted) == ["timm", "timm", "transformers"]
    assert len({one.client for one in accepted}) == 3  # two files are called model.safetensors
    by_file = {one.checkpoint.file: one for one in accepted}
    for path, seed in zip(stall[:2], (0, 1), strict=True):
        taken = by_file[str(path)].payload.tensors
        assert all(torch.equal(taken[f"model/{name}"], value) for name, value in tensors(seed).items())


def without(given: Tensors, name: str) -> Tensors:
    return {key: value for key, value in given.items() if key != name}


def with_nan(given: Tensors) -> Tensors:
    given["blocks.0.attn.proj.bias"][0] = float("nan")
    return given


@pytest.mark.parametrize(
    ("bad", "tensor", "output"),
    [
        (tensors(9, "vit-p8-w16-d1-h2"), "patch_embed.proj.weight", "expected F32 [16, 3, 4, 4], got F32 [16, 3, 8, 8]"),
        (in_transformers_naming(tensors(9, side=32)), "vit.embeddings.position_embeddings", "got F32 [1, 65, 16]"),
        (without(tensors(9), "pos_embed"), "pos_embed", "is missing"),
        (tensors(9, classes=5), "head.weight", "expected F32 [3, 16], got F32 [5, 16]"),
        (in_transformers_naming(tensors(9, classes=5)), "classifier.weight", "got F32 [5, 16]"),
        (with_nan(tensors(9)), "blocks.0.attn.proj.bias", "not finite"),
        (without(tensors(9), "blocks.0.norm1.bias"), "blocks.0.norm1.bias", "lacks"),
        (tensors(9) | {"dist_token": torch.zeros(1, 1, 16)}, "dist_token", "which the model does not"),
        (tensors(9) | {"model.head.weight": torch.zeros(3, 16)}, "model.head.weight", "'head.weight' and 'model.head.weight'"),
        (
            tensors(9) | {"encoder.layer.0.attention.attention.query.weight": torch.zeros(16, 16)},
            "encoder.layer.0.attention.attention.query.weight",
            "expected one 'blocks.0.attn.qkv.weight', got two",
        ),
    ],
)
def test_a_file_that_does_not_fit_is_named_with_its_tensor(
    bad: Tensors, tensor: str, output: str, stall: list[Path], tmp_path: Path
) -> None:
    path = plain_models(tmp_path / "bad.safetensors", bad)
    found = examine_checkpoints(request([*stall, path]))
    accepted, refused = found.accepted, found.refused
    assert len(accepted) == 3 and [one.file for one in refused] == [str(path)]
    assert refused[0].tensor == tensor and output in refused[0].reason and "bad.safetensors" in refused[0].reason


def test_a_key_of_another_shape_is_refused_and_the_others_are_fused(stall: list[Path], tmp_path: Path) -> None:
    spoilt = in_transformers_naming(tensors(9)) | {"vit.encoder.layer.0.attention.attention.key.bias": torch.zeros(16, 2)}
    found = examine_checkpoints(request([*stall, plain_models(tmp_path / "bad.safetensors", spoilt)]))
    accepted, refused = found.accepted, found.refused
    assert len(accepted) == 3 and refused[0].tensor == "vit.encoder.layer.0.attention.attention.key.bias"
    assert "(expected F32 [16], got F32 [16, 2])" in refused[0].reason


def test_what_is_refused_changes_nothing(stall: list[Path], tmp_path: Path) -> None:
    """Neither a namesake that does not fit, nor a twin that comes first, nor another name of a file."""
    arguments = {"method": "deepinversion", "changes": {"rounds": 1, "adi": 0.0, "server_epochs": 1}}
    first = fuse(request(stall, **arguments), tmp_path / "out")
    namesake = plain_models(tmp_path / "west" / "model.safetensors", tensors(9, classes=5))
    twin = plain_models(tmp_path / "a-twin.safetensors", in_transformers_naming(tensors(0)))  # its place is before the first
    again = fuse(request([*stall, namesake, twin], **arguments), tmp_path / "out")  # not another round
    assert again["release_digest"] == first["release_digest"] and len(again["refused"]) == 2
    moved = [plain_models(tmp_path / "moved" / f"{seed}.safetensors", tensors(seed)) for seed in (0, 1)]
    third = fuse(request([*moved, stall[2]], **arguments), tmp_path / "third")
    assert third["release_digest"] == first["release_digest"]


def test_files_that_do_not_fit_have_no_vote_on_the_image_size(stall: list[Path], tmp_path: Path) -> None:
    large = [plain_models(tmp_path / f"large-{seed}.safetensors", tensors(seed, classes=5, side=32)) for seed in range(4)]
    alone = plain_models(tmp_path / "alone.safetensors", tensors(9) | {"pos_embed": torch.zeros(1, 1, 16)})  # no patch at all
    found = examine_checkpoints(request([*large, alone, *stall]))
    assert found.task.image == (3, 16, 16) and len(found.accepted) == 3 and len(found.refused) == 5
    with pytest.raises(RoundError, match="none of 1 files can be used") as caught:
        examine_checkpoints(request([alone]))
    assert "alone.safetensors" in str(caught.value)


@pytest.mark.parametrize("bias", [None, torch.zeros(5), torch.zeros(16, dtype=torch.int32)])
def test_pixels_are_not_folded_into_a_layer_that_does_not_fit(
    bias: torch.Tensor | None, stall: list[Path], tmp_path: Path
) -> None:
    bad = without(tensors(9), "patch_embed.proj.bias") | ({} if bias is None else {"patch_embed.proj.bias": bias})
    found = examine_checkpoints(request([*stall, plain_models(tmp_path / "bad.safetensors", bad)], pixels="imagenet"))
    assert len(found.accepted) == 3 and [one.tensor for one in found.refused] == ["patch_embed.proj.bias"]
    assert "expected F32 [16]" in found.refused[0].reason


def test_a_model_that_explodes_is_refused_before_it_spoils_the_others(stall: list[Path], tmp_path: Path) -> None:
    loud = tensors(9) | {"head.weight": tensors(9)["head.weight"] * 1e20}
    found = examine_checkpoints(request([*stall, plain_models(tmp_path / "loud.safetensors", loud)]))
    assert len(found.accepted) == 3 and "answers noise with numbers beyond all bounds" in found.refused[0].reason


def test_a_file_that_nobody_may_read_is_refused(stall: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(self: Path, *arguments: Any, **more: Any) -> Any:
        if self.name == "half.safetensors":
            raise PermissionError(13, "Permission denied")
        return plain(self, *arguments, **more)

    plain = Path.open
    monkeypatch.setattr(Path, "open", denied)  # root may read everything
    found = examine_checkpoints(request(stall))
    assert len(found.accepted) == 2 and "cannot be read: Permission denied" in found.refused[0].reason


def test_nothing_is_stated_of_a_training_that_nobody_here_did(stall: list[Path], tmp_path: Path) -> None:
    output = fuse(request(stall, method="fedmitr"), tmp_path / "out")
    assert {"epochs", "lr", "optimizer", "pretrained"}.isdisjoint(output["settings"]) and "server_epochs" in output["settings"]
    assert "the models came trained" in output["deviations"][0]
    assert not any(sentence.startswith(("epochs = ", "batch_size = ", "lr = ")) for sentence in output["deviations"])
    assert any(sentence.startswith("server_epochs = ") for sentence in output["deviations"])


def test_the_architecture_is_stated_once(stall: list[Path]) -> None:
    with pytest.raises(UsageError, match="Say --architecture vit instead of --set"):
        fuse(request(stall, changes={"architecture": "vit"}), stall[0].parent / "out")


def test_pickles_twins_and_nothing(stall: list[Path], tmp_path: Path) -> None:
    (tmp_path / "old.pt").write_bytes(pickle.dumps({"head.weight": [1.0]}))
    twin = plain_models(tmp_path / "twin.safetensors", in_transformers_naming(tensors(0)))  # other bytes, the same weights
    found = examine_checkpoints(request([*stall, tmp_path / "old.pt", twin, tmp_path / "none.safetensors"]))
    accepted, refused = found.accepted, found.refused
    why = {Path(one.file).name: one.reason for one in refused}
    assert len(accepted) == 3 and "is a pickle" in why["old.pt"] and "there is no file" in why["none.safetensors"]
    assert "the same weights as" in why["twin.safetensors"]
    with pytest.raises(RoundError, match=r"is a pickle.*safetensors\.torch\.save_file") as caught:
        examine_checkpoints(request([tmp_path / "old.pt", tmp_path / "north"], image_size=16))
    assert "got a folder). Name the file in it." in str(caught.value)  # each with what to do


def test_a_file_that_is_too_large_is_not_even_read(stall: list[Path], tmp_path: Path) -> None:
    with (tmp_path / "vast.safetensors").open("wb") as file:
        file.truncate(Limits().upload_bytes + 1)  # a hole: it takes no room
    found = examine_checkpoints(request([*stall, tmp_path / "vast.safetensors"]))
    accepted, refused = found.accepted, found.refused
    assert len(accepted) == 3 and "is too large and was not read (expected at most 2,147,483,648 bytes" in refused[0].reason


def test_imagenet_pixels_are_folded_in(tmp_path: Path) -> None:
    path = plain_models(tmp_path / "a.safetensors", tensors(0))
    plain, folded = (
        examine_checkpoints(request([path], pixels=how)).accepted[0].payload.tensors for how in ("symmetric", "imagenet")
    )
    name = "model/patch_embed.proj.weight"
    torch.testing.assert_close(folded[name][:, 0], plain[name][:, 0] / (2 * 0.229))


def test_a_model_comes_out_and_answers(stall: list[Path], tmp_path: Path) -> None:
    output = fuse(request(stall), tmp_path / "out", command="osfl server ...")
    model, task = load_model(tmp_path / "out")
    x = to_input(torch.randint(0, 256, (4, 3, 16, 16), generator=torch_generator(0, "x"), dtype=torch.uint8))
    members = []
    for one in examine_checkpoints(request(stall)).accepted:
        member = build_model(NAME, task)
        member.load_state_dict({name.removeprefix("model/"): value for name, value in one.payload.tensors.items()})
        members.append(member.eval()(x))
    torch.testing.assert_close(model(x).softmax(1), torch.stack(members).mean(0).softmax(1), rtol=1e-4, atol=1e-5)
    assert task.classes == CLASSES and len(output["accepted"]) == 3
    for name in ("fusion.json", "model_card.md", "report/index.html", "release.safetensors"):
        assert (tmp_path / "out" / name).stat().st_size > 0
    assert "transformers" in (tmp_path / "out" / "report" / "index.html").read_text()


def test_order_and_workers_do_not_matter_and_the_end_is_the_end(stall: list[Path], tmp_path: Path) -> None:
    first = fuse(request(stall, method="fedavg"), tmp_path / "a")
    second = fuse(request(stall[::-1], method="fedavg"), tmp_path / "b", machine=Machine(workers=2))
    assert first["release_digest"] == second["release_digest"]
    stamp = (tmp_path / "a" / "fusion.json").stat().st_mtime_ns
    assert fuse(request(stall, method="fedavg"), tmp_path / "a")["release_digest"] == first["release_digest"]
    assert (tmp_path / "a" / "fusion.json").stat().st_mtime_ns == stamp


class Interrupted(Exception):
    pass


def test_killed_anywhere_the_same_options_continue(stall: list[Path], tmp_path: Path) -> None:
    arguments = request(stall, method="deepinversion", changes={"rounds": 1, "adi": 0.0, "server_epochs": 1})
    whole = fuse(arguments, tmp_path / "whole")
    seen: list[tuple[str, int, int]] = []

    def stop_once(what: str, done: int, total: int) -> None:
        if (what, done, total) not in seen:
            seen.append((what, done, total))
            raise Interrupted

    for _ in range(100):
        try:
            output = fuse(arguments, tmp_path / "parts", progress=stop_once, machine=Machine(workers=1))
            break
        except Interrupted:
            continue
    assert len(seen) > 3 and output["release_digest"] == whole["release_digest"]
    shutil.rmtree(tmp_path / "parts" / "report")
    assert fuse(arguments, tmp_path / "parts")["release_digest"] == whole["release_digest"]
    assert (tmp_path / "parts" / "report" / "index.html").exists()


def test_another_file_is_another_round(stall: list[Path], tmp_path: Path) -> None:
    fuse(request(stall[:2]), tmp_path / "out")
    with pytest.raises(RoundError, match="holds another round"):
        fuse(request(stall), tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ({"method": "fedcgs"}, "do not upload a model"),
        ({"method": "federated_factory"}, "not a model"),
        ({"method": "centralized"}, "simulation only"),
        ({"classes": ("cat", "cat", "owl")}, "named twice"),
        ({"changes": {"ensemble": "best"}}, "ensemble"),
    ],
)
def test_options_that_cannot_be_meant(arguments: dict[str, Any], output: str, stall: list[Path], tmp_path: Path) -> None:
    given = {"classes": CLASSES, "method": "ensemble", "preset": "smoke", **arguments}
    with pytest.raises(UsageError, match=output):
        fuse(FusionRequest(stall, NAME, **given), tmp_path / "out")


@pytest.mark.parametrize(
    ("arguments", "output"),
    [
        ({"method": "fedmitr", "changes": {"stops": "often"}}, "stops"),
        ({"method": "fedmitr", "changes": {"images": 0}}, "images"),
        ({"method": "fedmitr", "image_size": 17}, "patch 4 does not divide images of 17x17"),
        ({"method": "fedbicross", "changes": {"clusters": 4}}, "expected 0 to 3, the number of clients"),
        ({"method": "centralized"}, "simulation only"),
        ({"method": "fol"}, "fuses nothing"),
        ({"preset": "nosuch"}, "no preset 'nosuch'"),
        ({"classes": ("cat",)}, "at least 2 classes"),
    ],
)
def test_what_no_file_could_make_right_is_reported_before_any_is_read(
    arguments: dict[str, Any], output: str, tmp_path: Path
) -> None:
    given = {"classes": CLASSES, "method": "ensemble", "preset": "smoke", **arguments}
    with pytest.raises(UsageError, match=output):  # that there are no files would be another error
        fuse(FusionRequest([tmp_path / name for name in "abc"], NAME, **given), tmp_path / "out")


def test_what_depends_on_the_size_of_images_waits_for_the_files(tmp_path: Path) -> None:
    """Patches of 5 divide neither of the sizes that are tried before, but the one that the files tell."""
    files = [plain_models(tmp_path / f"{seed}.safetensors", tensors(seed, side=20)) for seed in (0, 1)]
    arguments: dict[str, Any] = {"method": "dense", "preset": "smoke"}
    check_request(FusionRequest(files, NAME, CLASSES, changes={"student": "vit-p5-w16-d1-h2"}, **arguments))
    with pytest.raises(UsageError, match="unknown architecture 'vitt'"):
        check_request(FusionRequest(files, NAME, CLASSES, changes={"student": "vitt"}, **arguments))
    with pytest.raises(UsageError, match="patch 3 does not divide images of 20x20"):
        fuse(FusionRequest(files, NAME, CLASSES, changes={"student": "vit-p3-w16-d1-h2"}, **arguments), tmp_path / "out")


def test_networks_that_do_not_tell_their_image_are_asked_for_it(tmp_path: Path) -> None:
    files = [plain_models(tmp_path / f"{seed}.safetensors", tensors(seed, "cnn-w4")) for seed in (0, 1)]
    with pytest.raises(UsageError, match="which images cnn-w4 was trained for"):
        examine_checkpoints(FusionRequest(files, "cnn-w4", CLASSES))
    assert len(examine_checkpoints(FusionRequest(files, "cnn-w4", CLASSES, image_size=16)).accepted) == 2


def test_every_refusal_is_reported_where_no_file_tells_an_image(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(1)}, tmp_path / "pickle.pt")
    files = [
        tmp_path / "pickle.pt",
        tmp_path / "gone.safetensors",
        tmp_path,
        plain_models(tmp_path / "wide-patches.safetensors", tensors(1, "vit-p8-w16-d1-h2")),
        plain_models(tmp_path / "nowhere.safetensors", without(tensors(2), "pos_embed")),
    ]
    with pytest.raises(RoundError) as caught:
        examine_checkpoints(request(files))
    output = str(caught.value)
    assert "none of 5 files" in output and "pickle" in output and "gone.safetensors: there is no file" in output
    assert "'patch_embed.proj.weight' of" in output and "'pos_embed' of" in output and "is missing" in output


@pytest.mark.parametrize(
    ("bad", "fix"),
    [
        (tensors(1, "vit-p4-w32-d1-h2"), "another width"),
        (tensors(1, "vit-p8-w16-d1-h2"), "patches have another side"),
        (tensors(1, side=32), "another image size"),
        (tensors(1, classes=4), "another number of classes"),
        (without(tensors(1), "pos_embed"), "no learned positions"),
        (without(tensors(1), "head.weight"), "It has no head"),
        (without(tensors(1), "patch_embed.proj.weight"), "no vision transformer"),
        ({f"net.{name}": value for name, value in tensors(1).items()}, "Its tensors begin with 'net.'"),
        (tensors(1) | {"pos_embed": torch.zeros(1, 18, 16), "dist_token": torch.zeros(1, 1, 16)}, "distilled DeiT"),
        (tensors(1) | {"head.weight": torch.zeros(3, 16, dtype=torch.int8)}, "no floats"),
        (tensors(1) | {"head.weight": torch.zeros(3, 32)}, "another number of features"),
        (tensors(1) | {"fc_norm.weight": torch.ones(16)}, "reads the class token"),
        (without(tensors(1), "norm.bias"), "or not all of it"),
    ],
)
def test_the_advice_names_what_differs(bad: Tensors, fix: str, stall: list[Path], tmp_path: Path) -> None:
    refused = examine_checkpoints(request([*stall, plain_models(tmp_path / "bad.safetensors", bad)])).refused
    assert [Path(one.file).name for one in refused] == ["bad.safetensors"] and fix in refused[0].fix


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model.safetensors.index.json"])
def test_a_part_of_a_checkpoint_is_no_checkpoint(name: str, stall: list[Path], tmp_path: Path) -> None:
    refused = examine_checkpoints(request([*stall, plain_models(tmp_path / name, tensors(9))])).refused
    assert "belongs to a checkpoint in several files" in refused[0].reason and "save it in one" in refused[0].fix


def test_names_in_a_file_do_not_break_lines(stall: list[Path], tmp_path: Path) -> None:
    refused = examine_checkpoints(
        request([*stall, plain_models(tmp_path / "odd.safetensors", tensors(9) | {"a\nb": torch.zeros(1)})])
    ).refused
    assert "\n" not in refused[0].reason and "a?b" in refused[0].reason


def test_what_nothing_uses_is_left_out_and_named(stall: list[Path], tmp_path: Path) -> None:
    extra = {**tensors(7), "head_dist.weight": torch.zeros(3, 16), "mask_token": torch.zeros(1)}
    fuse(request([*stall, plain_models(tmp_path / "extra.safetensors", extra)]), tmp_path / "out")
    accepted = json.loads((tmp_path / "out" / "fusion.json").read_text())["accepted"]
    assert {Path(one["file"]).name: one["unused"] for one in accepted if one["unused"]} == {
        "extra.safetensors": ["head_dist.weight", "mask_token"]
    }
    assert "nothing here uses head_dist.weight, mask_token" in (tmp_path / "out" / "report" / "index.html").read_text()


def test_a_method_whose_server_fuses_nothing_is_refused(stall: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="server of fol passes models on and fuses nothing"):
        fuse(request(stall, method="fol"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("method", ["dense", "coboosting", "deepinversion", "fedbicross"])
def test_any_method_whose_upload_is_a_model(method: str, stall: list[Path], tmp_path: Path) -> None:
    fuse(request(stall, method=method), tmp_path / "out")
    found = json.loads((tmp_path / "out" / "fusion.json").read_text())
    personal = {one["client"]: f"models/{one['client']}.safetensors" for one in found["accepted"]}
    assert found["models"] == (personal if method == "fedbicross" else {"": "model.safetensors"})
    for client, path in found["models"].items():
        assert (tmp_path / "out" / path).exists() and len(load_model(tmp_path / "out", client or None)[1].classes) == 3
    page = (tmp_path / "out" / "report" / "index.html").read_text()
    assert ("3 came out, one for each" in page) == (method == "fedbicross")


def test_a_file_that_is_named_twice_is_offered_once(stall: list[Path]) -> None:
    found = examine_checkpoints(request([*stall, stall[0]]))
    accepted, refused = found.accepted, found.refused
    assert len(accepted) == 3 and not refused


def test_a_description_of_another_release_is_written_anew(stall: list[Path], tmp_path: Path) -> None:
    digest, path = fuse(request(stall), tmp_path / "out")["release_digest"], tmp_path / "out" / "fusion.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "release_digest": "another"}))
    assert fuse(request(stall), tmp_path / "out")["release_digest"] == digest
    assert json.loads(path.read_text())["release_digest"] == digest
