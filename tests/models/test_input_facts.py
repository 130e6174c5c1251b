"""What networks see of the images: the table's pixels, the encoder's resolution, and that both are named everywhere."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from osfl.cli.main import answer
from osfl.core.plan import plan_from
from osfl.core.registry import load
from osfl.core.settings import resolve_settings
from osfl.core.types import Plan, Task, settings_as_json
from osfl.data.site import open_site
from osfl.ingredients.training.local import Training, first_model
from osfl.models.build import build_model
from osfl.models.input_facts import describe_inputs
from osfl.models.pretrained import fit_problems, start_from
from osfl.simulate.simulation import Simulation, prepare

DEIT, VIT = "deit_tiny-p4-w16-d2-h2", "vit_tiny-p4-w16-d2-h2"
TASK = Task("t", ("a", "b"), (3, 8, 8))
MEAN, DEVIATION = (torch.tensor(row).view(3, 1, 1) for row in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def published(folder: Path) -> tuple[str, str, torch.nn.Module]:
    """A DeiT as its authors publish it: it takes pixels less ImageNet's mean, over its deviation."""
    model = build_model(DEIT, TASK, torch.Generator().manual_seed(3)).eval()
    save_file({name: value.contiguous() for name, value in model.state_dict().items()}, folder / "deit.safetensors")
    path = folder / "deit.safetensors"
    return str(path), hashlib.sha256(path.read_bytes()).hexdigest(), model


def settings_with(path: str, pin: str, architecture: str = DEIT, **more: str) -> Any:
    changes = {"pretrained": path, "pretrained_sha256": pin, "architecture": architecture, **more}
    return resolve_settings(load("local_only"), "smoke", changes)


def features(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model.eval().features(x)  # type: ignore[operator,no-any-return]


# --- pixels -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hub", [False, True])
def test_a_deit_gets_imagenet_pixels_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hub: bool
) -> None:
    path, pin, theirs = published(tmp_path)
    if hub:
        monkeypatch.setattr("osfl.models.pretrained.from_hub", lambda address, field, beside=(): Path(path))
    where = "hub:facebook/deit-tiny-patch16-224" if hub else path
    shares = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))  # RGB in [0, 1]
    expected = features(theirs, (shares - MEAN) / DEVIATION)
    ours = {}
    for name in ("unset", "imagenet", "symmetric"):
        more = {} if name == "unset" else {"pretrained_pixels": name}
        model = first_model(settings_with(where, pin, **more), DEIT, TASK, torch.Generator().manual_seed(0))
        ours[name] = features(model, 2 * shares - 1)
    assert torch.allclose(ours["unset"], expected, atol=1e-5) and torch.equal(ours["unset"], ours["imagenet"])
    assert not torch.allclose(ours["symmetric"], expected, atol=1e-2)
    assert torch.allclose(ours["symmetric"], features(theirs, 2 * shares - 1), atol=1e-6)
    bare = Training(architecture=DEIT, pretrained=where, pretrained_sha256=pin)  # settings that nobody resolved
    model = first_model(bare, DEIT, TASK, torch.Generator().manual_seed(0))
    assert torch.equal(features(model, 2 * shares - 1), ours["unset"])


def test_the_plan_says_the_pixels_where_they_are_not_the_usual_ones(tmp_path: Path) -> None:
    path, pin, _ = published(tmp_path)
    assert settings_as_json(settings_with(path, pin))["pretrained_pixels"] == "imagenet"
    assert settings_as_json(settings_with(path, pin, pretrained_pixels="symmetric"))["pretrained_pixels"] == "symmetric"
    for other in (settings_with(path, pin, VIT), resolve_settings(load("local_only"), "smoke", {"architecture": DEIT})):
        assert "pretrained_pixels" not in settings_as_json(other)  # plans that never named them keep their digests
    plan = Plan(TASK, "local_only", settings_with(path, pin), ("north", "south"))
    assert plan_from(plan.as_json(), "plan.json").digest == plan.digest


def test_pixels_are_described() -> None:
    def pixels(method: str, **changes: str) -> str:
        return describe_inputs(resolve_settings(load(method), "smoke", changes), 64, 0)["pixels"]

    pin = {"pretrained_sha256": "a" * 64, "pretrained": "hub:some/file"}
    assert pixels("fedmitr", architecture="deit_small", **pin) == "imagenet"
    assert pixels("fedmitr", architecture="deit_small", pretrained_pixels="symmetric", **pin) == "symmetric"
    assert pixels("fedmitr", architecture="vit", **pin) == "symmetric"
    assert pixels("fedmitr", architecture="vit", pretrained="vit_signs") == "symmetric"
    assert pixels("fedavg") == "" and pixels("falcon", encoder="random") == "symmetric"
    assert pixels("falcon", encoder="efficientnet_lite0") == "symmetric"
    assert pixels("falcon", encoder="vit_small_saliency") == "imagenet"
    own = {"encoder": "dinov2_small", "encoder_weights": "hub:a/b", "encoder_sha256": "a" * 64}
    assert pixels("falcon", **own) == "imagenet" and pixels("falcon", encoder_pixels="symmetric", **own) == "symmetric"


def test_pixels_against_the_table_are_a_caution_or_refused() -> None:
    def cautions(method: str, **changes: str) -> list[str]:
        return describe_inputs(resolve_settings(load(method), "smoke", changes), 64, 0)["cautions"]

    deit = {"pretrained_sha256": "a" * 64, "pretrained": "hub:some/deit", "architecture": "deit_tiny"}
    (caution,) = cautions("fedmitr", pretrained_pixels="symmetric", **deit)
    assert "pretrained_pixels=symmetric contradicts the table" in caution and "Leave it out" in caution
    assert cautions("fedmitr", **deit) == cautions("fedmitr", pretrained_pixels="imagenet", **deit) == []
    dino = {"encoder": "dinov2_small", "encoder_weights": "hub:a/b", "encoder_sha256": "a" * 64}
    (caution,) = cautions("falcon", encoder_pixels="symmetric", **dino)
    assert "encoder_pixels=symmetric contradicts the table" in caution and cautions("falcon", **dino) == []
    saliency, own = "vit_small_patch14_dinov2_saliency", ["vit_small_dinov2"]
    (refused,) = fit_problems(saliency, "symmetric", own)
    assert "pretrained_pixels" in refused and "takes imagenet pixels, got symmetric" in refused
    assert fit_problems(saliency, "table", own) == fit_problems(saliency, "imagenet", own) == []


def test_where_the_table_is_silent_the_pixels_are_called_an_assumption() -> None:
    pin = {"pretrained_sha256": "a" * 64, "pretrained": "some.safetensors"}

    def line(architecture: str, **more: str) -> str:
        settings = resolve_settings(load("fedmitr"), "smoke", {"architecture": architecture, **{**pin, **more}})
        return describe_inputs(settings, 64, 64)["lines"][0]

    assert "an assumption" in line("vit_small") and "pretrained_pixels" in line("vit_small")
    assert "assumption" not in line("vit_small", pretrained_pixels="symmetric")
    assert "from the table of architectures" in line("deit_tiny")
    assert "from the table of weights" in line("vit", pretrained="vit_signs", pretrained_sha256="")


# --- resolution -------------------------------------------------------------------------------------------------------


TOKENS = {"encoder": "random", "resolution": "96", "window": "48", "stride": "48"}
OPTIONS = [word for key, value in TOKENS.items() for word in ("--set", f"{key}={value}")]


@pytest.fixture
def xrays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two classes of 120 px that differ in stripes too fine for 16 px."""
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for label in range(2):
        for i in range(12):
            rng = np.random.default_rng(100 * label + i)
            pixels = rng.integers(0, 60, (120, 130)) + 90 * (np.arange(130) // (2 + 2 * label) % 2)
            path = tmp_path / "xrays" / "ab"[label] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels.astype(np.uint8)).save(path)
    return tmp_path / "xrays"


def test_an_encoder_gets_the_detail_that_the_files_have(xrays: Path) -> None:
    """Opened at its resolution; never above the files' own; and at what the user names, whatever it is."""

    def opened(method: str, changes: dict[str, str], size: int | None = None) -> tuple[int, int]:
        found = prepare(Simulation(method, str(xrays), 2, "iid", "smoke", changes=changes, image_size=size))
        return found.plan.task.image[1], found.source.native

    assert opened("falcon", TOKENS) == (96, 120)
    assert opened("fedcgs", {**TOKENS, "resolution": "448", "window": "224", "stride": "224"}) == (120, 120)
    assert opened("falcon", TOKENS, 16) == (16, 120)
    assert opened("falcon", {**TOKENS, "resolution": "32", "window": "16", "stride": "16"}) == (64, 120)
    assert opened("falcon", {**TOKENS, "resolution": "32", "window": "104", "stride": "104"}) == (104, 120)  # the whole image
    assert opened("local_only", {}) == (64, 120)


def printed(capfd: pytest.CaptureFixture[str], *command: str) -> str:
    capfd.readouterr()
    assert answer([*command]) == 0
    captured = capfd.readouterr()
    return " ".join((captured.out + captured.err).split())


def test_a_change_of_resolution_is_named_by_check_run_and_report(xrays: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = ["--method", "falcon", "--dataset", str(xrays), "--clients", "2", "--partition", "iid", "--smoke", *OPTIONS]
    good = printed(capfd, "check", *data)
    assert "Images of 120 px are opened at 96 px (reduced)." in good and "For the encoder random they have 96 px" in good
    assert "--image-size" not in good
    small = printed(capfd, "check", *data, "--image-size", "16")
    assert "opened at 16 px, but the encoder random works at 96 px" in small and "--image-size 96" in small
    assert "No problem found" not in small
    ran = printed(capfd, "run", *data, "--image-size", "16", "--out", "r")
    assert "opened at 16 px, but the encoder random works at 96 px" in ran and "they are resized from 16 px to 96 px" in ran
    inputs = json.loads(Path("r/results.json").read_text())["inputs"]
    assert (inputs["native"], inputs["opened"], inputs["network"], inputs["pixels"]) == (120, 16, 96, "symmetric")
    assert len(inputs["cautions"]) == 1
    for page in ("r/report/index.html", "r/model_card.md"):
        assert "works at 96 px" in Path(page).read_text().replace("\\", "")
    found = json.loads(printed(capfd, "check", *data, "--image-size", "16", "--format", "json"))
    assert found["inputs"]["cautions"] == inputs["cautions"] and found["findings"][0]["what"] == inputs["cautions"][0]


def test_sites_are_warned_and_templates_have_the_encoders_size(xrays: Path, capfd: pytest.CaptureFixture[str]) -> None:
    new = ["new", "--method", "falcon", "--classes", "a,b", "--clients", "north", "--channels", "1", "--smoke", *OPTIONS]
    printed(capfd, *new, "--out", "plan.toml")
    assert "image = [1, 96, 96]" in Path("plan.toml").read_text()
    printed(capfd, *new, "--image-size", "16", "--out", "small.toml")
    printed(capfd, "keys", "north", "--out", "keys")
    site = ("--client", "north", "--data", str(xrays))
    assert "the encoder random works at 96 px" in printed(capfd, "check", "small.toml", *site)
    assert "the encoder random works at 96 px" in printed(capfd, "client", "small.toml", *site, "--key", "keys/north.key")
    assert "works at" not in printed(capfd, "check", "plan.toml", *site)


def test_the_size_of_a_sites_arrays_is_known_too(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", train_images=np.zeros((4, 40, 40), np.uint8), train_labels=np.arange(4) % 2)
    assert open_site(tmp_path / "a.npz", Task("t", ("a", "b"), (1, 16, 16))).native == 40


def test_a_published_deit_at_few_pixels_is_cautioned_against() -> None:
    pin = {"pretrained_sha256": "a" * 64, "pretrained": "hub:some/deit", "architecture": "deit_tiny"}
    settings = resolve_settings(load("fedmitr"), "smoke", pin)
    (caution,) = describe_inputs(settings, 64, 448)["cautions"]
    assert "deit_tiny from hub:some/deit works at 224 px" in caution and "--image-size 224" in caution
    assert describe_inputs(settings, 224, 448)["cautions"] == describe_inputs(settings, 28, 28)["cautions"] == []


def test_methods_of_one_comparison_may_open_files_at_other_sizes(xrays: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = ["--dataset", str(xrays), "--clients", "2", "--partition", "iid", "--smoke", *OPTIONS]
    printed(capfd, "compare", "--methods", "local_only,falcon", *data, "--out", "c")
    sizes = {}
    for name in ("local_only", "falcon"):
        result = json.loads(Path(f"c/{name}/seed0/results.json").read_text())
        sizes[name] = (result["inputs"]["opened"], [row["class_counts"] for row in result["clients"]])
    assert sizes["local_only"][0] == 64 and sizes["falcon"][0] == 96 and sizes["local_only"][1] == sizes["falcon"][1]


def test_known_weights_take_their_own_pixels() -> None:
    model = build_model("vit", Task("t", ("a", "b"), (1, 16, 16)), torch.Generator().manual_seed(0))
    start_from(model, "vit_signs")
    settings = resolve_settings(load("fedmitr"), "smoke", {"pretrained": "vit_signs", "architecture": "vit"})
    assert settings.pretrained_pixels == "table" and "pretrained_pixels" not in settings_as_json(settings)
