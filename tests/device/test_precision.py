"""Networks in 16 bits and in little memory: what is computed, what is kept, and what is refused."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from osfl.core.errors import DeviceError, RoundError, TrainingError, UsageError
from osfl.core.types import Dataset, Task
from osfl.ingredients.training import local
from osfl.ingredients.training.local import Training, fit
from osfl.ingredients.training.one_upload import working_on
from osfl.methods.federated_factory import diffusion
from osfl.methods.federated_factory.diffusion import Diffusion, DiffusionSettings
from osfl.models.build import build_model
from osfl.models.memory import training_memory
from osfl.runtime.devices import on_device
from osfl.runtime.machine import Machine, parse_memory
from osfl.runtime.memory import available, budget, micro_batch, too_little
from osfl.runtime.meter import Meter, measure, remark
from osfl.runtime.precision import check_precision, computing_in, descend, gradients, half, with_fallback
from osfl.simulate.estimate import estimate
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation
from tests.device.pretend import DEVICE, NAME, pretend

TASK, CPU = Task("squares", ("a", "b", "c"), (1, 8, 8)), torch.device("cpu")
TINY = DiffusionSettings(unet="w8-m1.2-b1", edm_images=320, edm_batch=32, edm_rampup=64, edm_lr_batches=5, dropout=0.0)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(count: int = 40) -> torch.Tensor:
    return torch.randint(0, 256, (count, 1, 8, 8), generator=rng(), dtype=torch.uint8)


# --- 16 bits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["cnn-w8", "resnet18-w8", "vit-p4-w16-d2-h2", "efficientnet_lite0"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_networks_compute_in_16_bits_and_answer_in_32(architecture: str, precision: Any) -> None:
    task = replace(TASK, image=(3, 32, 32))
    model = build_model(architecture, task, rng()).eval()
    x = torch.rand(2, 3, 32, 32, generator=rng())
    widths: set[torch.dtype] = set()
    layer = next(m for m in model.modules() if isinstance(m, nn.Linear))
    layer.register_forward_hook(lambda _, given, made: widths.add(made.dtype))
    exact = model(x)
    with computing_in(precision):
        found = model(x)
    assert widths == {torch.float32, half_of(precision)}
    assert found.dtype == torch.float32 and not torch.equal(found, exact)
    assert torch.allclose(found, exact, rtol=0.1, atol=0.05)


def half_of(precision: str) -> torch.dtype:
    return {"bf16": torch.bfloat16, "fp16": torch.float16}[precision]


def test_a_round_in_16_bits_on_the_device_says_so(tmp_path: Path) -> None:
    simulation = Simulation("fedavg", "digits", 2, "iid", "smoke", samples=50, image_size=8, test_samples=20)
    exact = run(simulation, tmp_path / "cpu", machine=Machine(workers=1))
    with pretend():
        result = run(simulation, tmp_path / "device", machine=Machine(workers=1, device=NAME, precision="bf16"))
    assert result["release_digest"] != exact["release_digest"]
    assert result["environment"]["precision"] == "bf16" and "notes" not in result["environment"]
    assert "--precision bf16" in result["command"]


def test_small_gradients_survive_fp16() -> None:
    """A weight's gradient of 1e-9 is zero in fp16, unless the loss is scaled."""
    layer = nn.Linear(4, 1, bias=False)
    x = torch.full((1, 4), 1e-3)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", torch.float16):
            answer: torch.Tensor = 1e-6 * layer(x).float().sum()
        return answer

    with computing_in("fp16"):
        (found,) = gradients(loss(), layer.weight)
        assert torch.allclose(found, torch.full_like(found, 1e-9), rtol=0.2)
        before, optimizer = layer.weight.detach().clone(), torch.optim.SGD(layer.parameters(), 1e6)
        descend(optimizer, loss())
    assert torch.allclose(before - layer.weight, torch.full_like(before, 1e-3), rtol=0.2)


def test_gradients_that_overflow_make_no_step() -> None:
    layer = nn.Linear(2, 1, bias=False)
    before = layer.weight.detach().clone()
    with computing_in("fp16"):
        descend(torch.optim.SGD(layer.parameters(), 1.0), layer(torch.ones(1, 2)).sum() * torch.tensor(float("inf")))
    assert torch.equal(layer.weight, before)


def overflowing(fails: int) -> tuple[Callable[[], float], list[bool]]:
    calls: list[bool] = []

    def work() -> float:
        calls.append(half(CPU) is not None)
        if len(calls) <= fails:
            raise TrainingError("the training loss is not finite")
        return 1.0

    return work, calls


def test_what_overflows_is_computed_in_32_bits_with_a_note() -> None:
    work, calls = overflowing(1)
    with computing_in("fp16"), measure() as meter:
        assert with_fallback(work, lambda _: "", remark) == 1.0
    assert calls == [True, False]
    sentence = "fp16 overflowed (the training loss is not finite), so this phase was computed in fp32"
    assert meter.as_json()["remarks"] == [sentence] and "remarks" not in Meter().as_json()


def test_in_32_bits_nothing_is_tried_again() -> None:
    work, calls = overflowing(1)
    with pytest.raises(TrainingError):
        with_fallback(work, lambda _: "", remark)
    assert calls == [False]


def test_results_tell_what_overflowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client's loss overflows in bf16: the round ends as in fp32, and says so."""
    sound = functional.cross_entropy

    def cross_entropy(*args: Any, **options: Any) -> torch.Tensor:
        loss: torch.Tensor = sound(*args, **options)
        return loss * (float("inf") if half(CPU) is not None else 1.0)

    simulation = Simulation("fedavg", "digits", 2, "iid", "smoke", samples=50, image_size=8, test_samples=20)
    expected = run(simulation, tmp_path / "fp32", machine=Machine(workers=1))
    monkeypatch.setattr(functional, "cross_entropy", cross_entropy)
    found = run(simulation, tmp_path / "bf16", machine=Machine(workers=1, precision="bf16"))
    assert found["release_digest"] == expected["release_digest"]
    assert [note.partition(":")[0] for note in found["environment"]["notes"]] == ["client-01", "client-02"]
    assert "bf16 overflowed (the training loss is not finite)" in (tmp_path / "bf16" / "report" / "index.html").read_text()


@pytest.mark.parametrize(("precision", "says"), [("fp8", "no precision 'fp8'"), ("tf32", "cpu has none")])
def test_a_precision_that_is_not_there_is_refused(precision: str, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        check_precision(precision, CPU)


def test_fp32_means_no_tf32() -> None:
    """Torch lets convolutions of a GPU round to tf32 unless it is told not to."""
    before = torch.backends.cudnn.allow_tf32
    with computing_in("fp32"):
        assert not torch.backends.cudnn.allow_tf32
    with computing_in("tf32"):
        assert torch.backends.cudnn.allow_tf32 and torch.backends.cuda.matmul.allow_tf32
    assert torch.backends.cudnn.allow_tf32 == before


# --- memory --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"), [("20GB", 20 * 10**9), ("1.5 gib", 3 * 2**29), ("4096", 4096), ("512MB", 512 * 10**6)]
)
def test_amounts_of_memory(text: str, expected: int) -> None:
    assert parse_memory(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-1GB", "0", "3 parsecs"])
def test_what_is_no_amount_of_memory_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="no amount of memory"):
        parse_memory(text)


def test_parts_of_a_batch_are_equal_and_fit() -> None:
    assert micro_batch(100, 10, 1, 0) == 100
    assert micro_batch(100, 10, 1, 110) == 100
    assert micro_batch(100, 10, 1, 109) == 50
    assert micro_batch(100, 10, 1, 44) == 34
    assert micro_batch(100, 10, 1, 10) == 0


def test_activations_are_counted_by_hand() -> None:
    """A linear layer keeps its input, ReLU its output; weights are 4 bytes each."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False), nn.ReLU(), nn.Linear(10, 3, bias=False))
    found = training_memory(model, (1, 8, 8))
    assert found.weights == 4 * (640 + 30) and found.each == pytest.approx(1.1 * 4 * (64 + 10)) and found.once == 0


def test_the_papers_batches_are_as_large_as_was_measured() -> None:
    """355 GB at batch 4096 of 32 px and 507 GB at batch 1024 of 128 px."""
    paper = (32, "w128-m1.2.2.2-b3-a16.8", 4096, 355, "4GB"), (128, "w64-m1.2.2.2-b3-a16.8", 1024, 507, "8GB")
    for side, unet, batch, gigabytes, little in paper:
        factory = Diffusion(DiffusionSettings(unet=unet), (3, side, side), "flip", CPU)
        assert factory.memory().each * batch / 1e9 == pytest.approx(gigabytes, rel=0.1)
        part, recompute = factory.parts(batch, parse_memory("20GB"))
        assert 32 <= part < batch and not recompute
        part, recompute = factory.parts(batch, parse_memory(little))
        assert part >= 32 and recompute


@pytest.mark.parametrize("recompute", [False, True])
def test_a_generator_learns_the_same_in_parts(monkeypatch: pytest.MonkeyPatch, recompute: bool) -> None:
    whole = Diffusion(TINY, TASK.image, "flip", CPU).fit(images(), rng(), lambda *_: None)
    monkeypatch.setattr(Diffusion, "parts", lambda *_: (11, recompute))
    parts = Diffusion(TINY, TASK.image, "flip", CPU).fit(images(), rng(), lambda *_: None)
    for name, value in whole.items():
        assert torch.allclose(value, parts[name], rtol=1e-3, atol=1e-4), name


def test_blocks_that_are_computed_again_drop_the_same_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dropout draws from its own generator, which is put back for the second time."""
    settings, made = replace(TINY, dropout=0.5), []
    for recompute in (False, True):
        monkeypatch.setattr(Diffusion, "parts", lambda *_, again=recompute: (32, again))
        made.append(Diffusion(settings, TASK.image, "flip", CPU).fit(images(), rng(), lambda *_: None))
    assert all(torch.allclose(value, made[1][name], rtol=1e-3, atol=1e-4) for name, value in made[0].items())


def test_a_killed_generator_goes_on_to_the_same_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(diffusion, "KEEP_EVERY", 96)
    settings, kept = replace(TINY, dropout=0.3), tmp_path / "state.safetensors"
    expected = Diffusion(settings, TASK.image, "flip", CPU).fit(images(), rng(), lambda *_: None)
    step, done = diffusion.diffusion_step, []

    def killed(*args: Any) -> torch.Tensor:
        done.append(1)
        if len(done) == 8:
            raise KeyboardInterrupt
        return step(*args)

    monkeypatch.setattr(diffusion, "diffusion_step", killed)
    with pytest.raises(KeyboardInterrupt):
        Diffusion(settings, TASK.image, "flip", CPU).fit(images(), rng(), lambda *_: None, kept)
    assert kept.exists()
    found = Diffusion(settings, TASK.image, "flip", CPU).fit(images(), rng(), lambda *_: None, kept)
    assert len(done) == 8 + 4  # steps 7 to 10: six were kept
    assert all(torch.equal(value, found[name]) for name, value in expected.items()) and not kept.exists()


def test_a_transformer_learns_the_same_in_parts() -> None:
    model, data = build_model("vit-p4-w16-d2-h2", TASK, rng()), Dataset(images(), torch.arange(40) % 3)
    settings = Training("vit-p4-w16-d2-h2", epochs=2, batch_size=16, lr=0.05, schedule="constant")
    needs = training_memory(model, TASK.image)
    found = []
    for memory in (0, round(needs.fixed(3) + 40 * 64 + 5 * needs.each)):
        learned = build_model("vit-p4-w16-d2-h2", TASK, rng())
        with budget(memory):
            fit(learned, data, settings, rng())
        found.append(torch.cat([p.detach().flatten() for p in learned.parameters()]))
    assert torch.allclose(found[0], found[1], rtol=1e-3, atol=1e-5) and not torch.equal(found[0], found[1])


def test_batch_norm_needs_its_batch_as_a_whole() -> None:
    data = Dataset(images(), torch.arange(40) % 3)
    with budget(100_000), pytest.raises(DeviceError, match=r"training cnn-w8 .* needs more memory") as refused:
        fit(build_model("cnn-w8", TASK, rng()), data, Training("cnn-w8", batch_size=32), rng())
    assert "batch_size" in str(refused.value) and "0.1" not in str(refused.value.got)


def test_what_cannot_fit_is_refused_before_anything_starts(tmp_path: Path) -> None:
    simulation = Simulation("fedavg", "digits", 2, "iid", "smoke", samples=50, image_size=8)
    with pytest.raises(DeviceError, match="needs more memory than it may use"):
        run(simulation, tmp_path / "run", machine=Machine(memory=100_000))
    assert not (tmp_path / "run").exists()
    with pytest.raises(DeviceError, match="needs more memory than it may use"):
        estimate(simulation, Machine(memory=100_000))
    fits = estimate(simulation, Machine(memory=10**9)).device_bytes
    assert fits is not None and 10**5 < fits < 10**8


def test_a_device_that_is_too_small_says_what_to_change_and_the_same_command_goes_on(tmp_path: Path) -> None:
    simulation = Simulation("fedavg", "digits", 2, "iid", "smoke", samples=50, image_size=8, test_samples=20)
    machine = Machine(workers=1, device=NAME)
    with pretend(memory=2000), pytest.raises(DeviceError, match="ran out of memory") as refused:
        run(simulation, tmp_path, machine=machine)
    assert "--memory" in str(refused.value) and "same command" in str(refused.value)
    with pretend():
        assert run(simulation, tmp_path, machine=machine)["method"] == "fedavg"


def test_a_device_that_is_lost_loses_nothing_that_was_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation("fedavg", "digits", 3, "iid", "smoke", samples=60, image_size=8, test_samples=20)
    expected = run(simulation, tmp_path / "whole", machine=Machine(workers=1))
    sound, trained = local.fit, []

    def lost(*args: Any, **options: Any) -> int:
        trained.append(1)
        if len(trained) == 2:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return sound(*args, **options)

    monkeypatch.setattr(local, "fit", lost)
    with pytest.raises(DeviceError, match="stopped answering") as refused:
        run(simulation, tmp_path / "lost", machine=Machine(workers=1))
    assert "run the same command again" in str(refused.value)
    found = run(simulation, tmp_path / "lost", machine=Machine(workers=1))
    assert len(trained) == 4 and found["release_digest"] == expected["release_digest"]


@pytest.mark.parametrize(
    ("method", "work", "fails_at", "in_all"),
    [
        # an epoch inverts three models: the first is kept, the second is made again from its first model on
        ("fedmitr", "osfl.ingredients.distillation.token_relabel.invert_sparsely", 5, 8),
        ("fol", "osfl.methods.fol.Fol._taught", 2, 4),  # one client has finished its personalization
    ],
)
def test_a_device_that_is_lost_later_loses_nothing_either(
    method: str, work: str, fails_at: int, in_all: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"server_epochs": 2} if method == "fedmitr" else {}
    simulation = Simulation(method, "digits", 3, "iid", "smoke", samples=60, image_size=8, test_samples=10, changes=changes)
    expected = run(simulation, tmp_path / "whole", machine=Machine(workers=1))
    place, _, name = work.rpartition(".")
    owner = pkgutil.resolve_name(place)
    sound, calls = getattr(owner, name), []

    def lost(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == fails_at:
            raise torch.AcceleratorError("CUDA error: unspecified launch failure")
        return sound(*args, **options)

    monkeypatch.setattr(owner, name, lost)
    with pytest.raises(DeviceError, match="stopped answering"):
        run(simulation, tmp_path / "lost", machine=Machine(workers=1))
    found = run(simulation, tmp_path / "lost", machine=Machine(workers=1))
    assert len(calls) == in_all and found["models_digest"] == expected["models_digest"]


def test_after_too_little_memory_the_same_command_with_more_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at the start, or in the middle of the clients: what was finished with one limit counts with another."""
    simulation = Simulation("fedavg", "digits", 3, "iid", "smoke", samples=60, image_size=8, test_samples=10)
    with pytest.raises(DeviceError, match="needs more memory than it may use"):
        run(simulation, tmp_path, machine=Machine(workers=1, memory=100_000))
    sound, trained = local.fit, []

    def tight(*args: Any, **options: Any) -> int:
        trained.append(1)
        if len(trained) == 2:
            raise too_little("training cnn-w8", 3e8, 10**8, "Raise --memory.")
        return sound(*args, **options)

    monkeypatch.setattr(local, "fit", tight)
    with pytest.raises(DeviceError, match="The same command then goes on"):
        run(simulation, tmp_path, machine=Machine(workers=1, memory=10**8))
    result = run(simulation, tmp_path, machine=Machine(workers=1, memory=10**9))
    assert len(trained) == 4 and result["environment"]["memory"] == 10**9 and "--memory 1000000000" in result["command"]


def test_a_failing_device_is_no_fault_of_an_upload() -> None:
    with pytest.raises(DeviceError), on_device(DEVICE), working_on("client-1"):
        raise torch.OutOfMemoryError("pretend out of memory")
    with pytest.raises(RoundError, match="cannot be used"), on_device(DEVICE), working_on("client-1"):
        raise RuntimeError("shapes do not fit")


def test_nobody_limits_the_cpu() -> None:
    assert available(CPU) == 0
