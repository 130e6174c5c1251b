"""FedLMG: corrections go downhill, the steps are those of DDIM, and a tiny random pipeline is really loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.core.method import Context
from osfl.core.seeds import torch_generator
from osfl.core.settings import resolve_settings
from osfl.core.types import Payload, Task, Upload
from osfl.ingredients.inversion.pixels import Watched
from osfl.methods.fedlmg import FedLMG
from osfl.methods.fedlmg.guided_diffusion import Guidance, _corrected, guided_images, schedule
from osfl.models.build import build_model
from osfl.models.latent_prior import Toy, load_prior, pipeline_digest, prior_problems
from osfl.models.naming import ModelError
from osfl.runtime.meter import measure
from osfl.simulate.checks import small_federation

TASK = Task("toy", ("cat", "dog", "owl"), (1, 16, 16))
CPU = torch.device("cpu")


def member() -> Watched:
    model = build_model("cnn-w8", TASK, torch_generator(0, "member"))
    with torch.no_grad():
        model.train()(torch.randn(64, *TASK.image, generator=torch_generator(0, "seen")))
    return Watched(model.eval())


def test_defaults_are_those_that_the_card_states() -> None:
    s = Guidance()
    assert (s.diffusion_steps, s.prompt_guidance, s.first_corrections, s.bn, s.step_size) == (50, 3.0, 10, 0.1, 1.0)


def test_steps_go_from_noise_to_images() -> None:
    assert schedule(100, 4) == [99, 74, 50, 25] and schedule(1000, 1) == [999]


def test_without_corrections_a_gaussian_latent_comes_out_as_ddim_says() -> None:
    """With E[noise | z] = sqrt(1 - a) z a step multiplies z by sqrt(a' a) + sqrt((1 - a') (1 - a))."""
    prior, s = Toy(1), Guidance("toy", diffusion_steps=3, first_corrections=0, step_size=0.0)
    z = torch.randn((2, *prior.latent), generator=torch_generator(0, "z"))
    times = schedule(len(prior.kept), 3)
    for now, then in zip(times, [*times[1:], -1], strict=True):
        a, b = prior.kept[now], prior.kept[then] if then >= 0 else torch.ones(())
        z = z * ((a * b).sqrt() + ((1 - a) * (1 - b)).sqrt())
    expected = torch.nn.functional.interpolate(prior.decode(z), (16, 16), mode="bilinear", antialias=True)
    found = guided_images(prior, member(), torch.tensor([0, 1]), TASK.image, s, torch_generator(0, "z"), CPU)
    assert torch.allclose(found.float() / 127.5 - 1, expected, atol=1 / 127)


def test_a_correction_lowers_the_loss() -> None:
    prior, watched, labels = Toy(1), member(), torch.tensor([0, 1, 2, 0])
    s = Guidance("toy", step_size=0.05)
    z = torch.randn((4, *prior.latent), generator=torch_generator(0, "z"))

    def loss(z: torch.Tensor) -> float:
        clean = prior.kept[50].sqrt() * z
        image = torch.nn.functional.interpolate(prior.decode(clean), (16, 16), mode="bilinear", antialias=True)
        logits, term = watched(image)
        return float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum") + s.bn * term)

    assert loss(_corrected(z, 50, prior, watched, labels, TASK.image, s, classify=True)) < loss(z)


def transformer() -> Watched:
    return Watched(build_model("vit-p8-w8-d1-h2", TASK, torch_generator(0, "member")).eval())


def test_clients_without_batch_norm_guide_by_what_they_recognize() -> None:
    prior, labels, s = Toy(1), torch.tensor([0, 1]), Guidance("toy", diffusion_steps=2, first_corrections=2)
    z = torch.randn((2, *prior.latent), generator=torch_generator(0, "z"))
    assert torch.equal(_corrected(z, 50, prior, transformer(), labels, TASK.image, s, classify=False), z)
    images = guided_images(prior, transformer(), labels, TASK.image, s, torch_generator(0, "z"), CPU)
    plain = guided_images(prior, transformer(), labels, TASK.image, replace(s, step_size=0.0), torch_generator(0, "z"), CPU)
    assert images.shape == (2, *TASK.image) and not torch.equal(images, plain)


def test_an_image_moves_as_far_in_company_as_alone() -> None:
    prior, watched, labels, s = Toy(1), transformer(), torch.tensor([0, 1, 2]), Guidance("toy")
    z = torch.randn((3, *prior.latent), generator=torch_generator(0, "z"))
    together = _corrected(z, 50, prior, watched, labels, TASK.image, s, classify=True)
    alone = _corrected(z[:1], 50, prior, watched, labels[:1], TASK.image, s, classify=True)
    assert torch.allclose(together[:1], alone, atol=1e-6) and not torch.allclose(alone, z[:1], atol=1e-4)


def test_every_pass_is_booked() -> None:
    class Dear(Toy):
        def flops(self) -> tuple[float, float]:
            return 1e12, 1e15

    s = Guidance("toy", diffusion_steps=2, first_corrections=3)
    with measure() as meter:
        guided_images(Dear(1), member(), torch.tensor([0, 1]), TASK.image, s, torch_generator(0, "z"), CPU)
    # asked at each of 3 + 2 corrections and again at 2 steps; decoded there and back, and once in the end
    assert meter.flops // 1e12 == 2 * (7 + (2 * 5 + 1) * 1000) and meter.made == 2


def test_images_of_a_class_come_from_clients_that_have_it() -> None:
    federation = small_federation("fedlmg")
    method = FedLMG(federation.plan.task, resolve_settings(FedLMG, "smoke", {}))
    ctx = Context(federation.plan, CPU)
    uploads = [Upload(s.client, "", method.client_phase(s, ctx)) for s in federation.shards]
    pool = method.pool(uploads, ctx)
    holders = torch.stack([torch.bincount(s.train.labels, minlength=10) > 0 for s in federation.shards]).sum(0)
    assert torch.bincount(pool.labels, minlength=10).tolist() == (2 * holders).tolist()


def test_what_another_device_made_is_not_taken_up() -> None:
    federation = small_federation("fedlmg")
    method, keys = FedLMG(federation.plan.task, resolve_settings(FedLMG, "smoke", {})), []
    uploads = [Upload(s.client, "", method.client_phase(s, Context(federation.plan, CPU))) for s in federation.shards[:1]]

    def get_or_compute(key: Any, make: Any) -> Payload:
        keys.append(key)
        return Payload({"images": torch.zeros(2, *federation.plan.task.image, dtype=torch.uint8)})

    for device in ("cpu", "cuda"):
        method.pool(uploads, Context(federation.plan, torch.device(device), get_or_compute=get_or_compute))
    half = len(keys) // 2
    assert half and [{**key, "device": "cuda"} for key in keys[:half]] == keys[half:] and "device" not in keys[0]


@pytest.mark.parametrize("prompt", ["a photo", "a {} {x}", "{{}}", "a {} {", "{0}"])
def test_a_prompt_names_the_class_and_nothing_else(prompt: str) -> None:
    assert "prompt" in FedLMG(TASK, resolve_settings(FedLMG, "smoke", {"prompt": prompt})).problems(3)[0]


def test_settings_are_checked() -> None:
    assert prior_problems("toy", "") == [] and "pipeline'" in prior_problems("", "")[0]
    assert "64 lower-case hex digits" in prior_problems("folder", "abc")[0]
    wrong = FedLMG(TASK, resolve_settings(FedLMG, "smoke", {"per_class": 0, "prompt": "a photo"})).problems(3)
    assert any("per_class" in text for text in wrong) and any("prompt" in text for text in wrong)


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no pipeline"):
        load_prior(str(tmp_path), "0" * 64, 3, ["a"], 3.0, CPU)


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    """Stable Diffusion's parts with a few random weights, saved as its files are."""
    diffusers = pytest.importorskip("diffusers", reason="needs the extra: pip install 'osfl[diffusion]'")
    transformers = pytest.importorskip("transformers", reason="needs the extra: pip install 'osfl[diffusion]'")
    torch.manual_seed(0)
    unet = diffusers.UNet2DConditionModel(
        sample_size=8,
        in_channels=4,
        out_channels=4,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=16,
        attention_head_dim=4,
    )
    vae = diffusers.AutoencoderKL(
        in_channels=3,
        out_channels=3,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
    )
    command = ["<|startoftext|>", "<|endoftext|>", "a</w>", "c", "a", "t</w>"]
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(command)}))
    (tmp_path / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    text = transformers.CLIPTextModel(
        transformers.CLIPTextConfig(
            vocab_size=len(command),
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            max_position_embeddings=12,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
    )
    for name, part in (("unet", unet), ("vae", vae), ("text_encoder", text), ("scheduler", diffusers.DDIMScheduler())):
        part.save_pretrained(tmp_path / name)
    return tmp_path


def test_a_tiny_pipeline_is_loaded_pinned_and_guided(tiny: Path) -> None:
    digest = pipeline_digest(tiny)
    prior = load_prior(str(tiny), digest, 3, ["a cat", "a dog"], 3.0, CPU)
    assert prior.latent == (4, 8, 8) and len(prior.kept) == 1000 and min(prior.flops()) > 0
    z, labels = torch.randn((2, *prior.latent), generator=torch_generator(0, "z")), torch.tensor([0, 1])
    alone = load_prior(str(tiny), digest, 3, ["a cat", "a dog"], 0.0, CPU).noise(z, 500, labels)
    reported = load_prior(str(tiny), digest, 3, ["a cat", "a dog"], 1.0, CPU).noise(z, 500, labels)
    assert torch.allclose(prior.noise(z, 500, labels), alone + 3 * (reported - alone), atol=1e-4)
    images = guided_images(
        prior, member(), labels, TASK.image, Guidance(diffusion_steps=2, first_corrections=1), torch_generator(0, "z"), CPU
    )
    assert images.shape == (2, *TASK.image) and images.dtype == torch.uint8
    with pytest.raises(ModelError, match="not the one that was pinned"):
        load_prior(str(tiny), "0" * 64, 3, ["a cat"], 3.0, CPU)


def test_a_missing_extra_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "unet").mkdir()
    monkeypatch.setitem(__import__("sys").modules, "diffusers", None)
    with pytest.raises(ModelError, match="diffusers") as caught:
        load_prior(str(tmp_path), pipeline_digest(tmp_path), 3, ["a"], 3.0, CPU)
    assert "osfl[diffusion]" in str(caught.value)
