"""The pretend accelerator catches what a GPU would refuse, counts what a GPU waits for, and computes what the CPU does."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import nn

from osfl.core.types import Task
from osfl.models.build import build_model
from osfl.models.inputs import to_input
from tests.device.pretend import DEVICE, NAME, DeviceTensor, MixedDevices, pretend


def here(*shape: int) -> torch.Tensor:
    return torch.ones(shape)


def there(*shape: int) -> torch.Tensor:
    return torch.ones(shape, device=DEVICE)


def by_numpy(x: torch.Tensor) -> object:
    return np.asarray(x)


REFUSED: dict[str, Callable[[], object]] = {
    "a sum": lambda: there(3) + here(3),
    "a sum, the other way round": lambda: here(3) + there(3),
    "a product of matrices": lambda: there(3, 3) @ here(3, 3),
    "a layer": lambda: nn.Linear(3, 2)(there(1, 3)),
    "a layer there": lambda: nn.Linear(3, 2).to(DEVICE)(here(1, 3)),
    "a loss": lambda: nn.functional.cross_entropy(there(2, 3), torch.tensor([0, 1])),
    "one tensor of several": lambda: torch.cat([there(2), here(2)]),
    "an index from there": lambda: here(3)[torch.zeros(1, dtype=torch.int64, device=DEVICE)],
    "gather": lambda: there(3, 3).gather(1, torch.zeros(3, 1, dtype=torch.int64)),
    "writing": lambda: here(3).add_(there(3)),
    "writing one number": lambda: torch.zeros(()).add_(torch.zeros((), device=DEVICE)),
    "assignment": lambda: there(3).index_put_((torch.tensor([0]),), here(1)),
    "a generator": lambda: torch.randn(3, device=DEVICE, generator=torch.Generator()),
    "a generator in place": lambda: there(3).uniform_(generator=torch.Generator()),
    "a generator of draws": lambda: torch.multinomial(there(3), 1, generator=torch.Generator()),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_mixes_devices_is_refused(case: str) -> None:
    with pretend(), pytest.raises(MixedDevices, match=r"cpu"):
        REFUSED[case]()


def test_two_devices_are_two() -> None:
    one, other = (torch.ones(3, 3, device=f"{NAME}:{number}") for number in (1, 2))
    mixed: tuple[Callable[[], object], ...] = (
        lambda: one + other,
        lambda: one @ other,
        lambda: other.add_(one),
        lambda: one[torch.zeros(2, device=other.device).long()],
    )
    for mix in mixed:
        with pretend(), pytest.raises(MixedDevices, match="pretend:1 and pretend:2"):
            mix()
    with pretend() as log:
        layer = nn.Linear(3, 2).to(other.device)
        layer(one.to(other.device)).sum().backward()
        assert layer.weight.grad is not None and layer.weight.grad.device == other.device == torch.device(NAME, 2)
        assert copy.deepcopy(layer).bias.device == other.device and torch.zeros_like(one).device == one.device
    assert {place for _, place, _ in log.flops} == {f"{NAME}:2"}
    assert [what for _, what, _ in log.transfers.elements()] == ["to device", "to device", "to another device"]


@pytest.mark.parametrize("convert", [lambda x: x.numpy(), by_numpy])
def test_numpy_is_refused(convert: Callable[[torch.Tensor], object]) -> None:
    with pretend(), pytest.raises(TypeError, match=r"Use Tensor.cpu\(\)"):
        convert(there(3))


def test_what_a_gpu_allows_is_allowed() -> None:
    with pretend():
        assert (there(3) * torch.tensor(2.0)).sum().item() == 6  # one number of the CPU
        assert there(3)[torch.tensor([0, 2])].shape == (2,)
        assert torch.where(there(2) > 0, there(2), torch.tensor(0.0)).tolist() == [1, 1]
        assert torch.randn(3, device=DEVICE, generator=torch.Generator(DEVICE)).shape == (3,)
        assert isinstance(torch.Generator(DEVICE), torch.Generator) and there(2).cpu().numpy().sum() == 2


def test_a_training_step_has_the_bits_of_the_cpu() -> None:
    """Convolutions, batch norm, momentum, clipping and copies of a network."""

    def trained(device: torch.device | str) -> dict[str, torch.Tensor]:
        rng = torch.Generator().manual_seed(0)
        model = copy.deepcopy(build_model("cnn-w4", Task("toy", ("a", "b", "c"), (1, 8, 8)), rng).to(device)).train()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        images = torch.randint(0, 256, (6, 1, 8, 8), generator=rng, dtype=torch.uint8)
        for _ in range(3):
            loss = nn.functional.cross_entropy(model(to_input(images, device)), torch.arange(6, device=device) % 3)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        return {name: value.cpu() for name, value in model.state_dict().items()}

    expected = trained("cpu")
    with pretend() as log:
        found = trained(DEVICE)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert {place for _, place, _ in log.flops} == {"pretend"}


def test_flops_are_counted_where_they_are_done() -> None:
    """A product of (2, 3) and (3, 5) takes 60 operations; a convolution's backward pass twice those of the forward pass."""
    with pretend() as log:
        with log.during("one"):
            there(2, 3) @ there(3, 5)
        with log.during("two"):
            here(2, 3) @ here(3, 5)
        with torch.inference_mode():
            nn.Linear(3, 5)(here(2, 3))  # an operation of several, not taken apart yet
        assert {(phase, place): n for (phase, place, _), n in log.flops.items()} == {
            ("one", "pretend"): 60,
            ("two", "cpu"): 60,
            ("", "cpu"): 60,
        }
    with pretend() as log:
        conv = nn.Conv2d(2, 4, 3, groups=2, bias=False).to(DEVICE)
        out = conv(there(1, 2, 5, 5).requires_grad_())
        forward = sum(log.flops.values())
        assert forward == 2 * 4 * 9 * 9  # each of 4 x 3 x 3 numbers is a sum of 9 products
        out.sum().backward()
        assert sum(log.flops.values()) == 3 * forward


def test_transfers_are_counted_with_the_line_that_asks_for_them() -> None:
    counted: dict[str, tuple[Callable[[], object], str]] = {
        "to": (lambda: here(3).to(DEVICE), "to device"),
        "tensor": (lambda: torch.tensor([1.0], device=DEVICE), "to device"),
        "cpu": (lambda: there(3).cpu(), "to host"),
        "item": (lambda: there(1).item(), "to host"),
        "float": (lambda: float(there(1)), "to host"),
        "if": (lambda: bool(there(1) > 0), "to host"),
        "tolist": (lambda: there(3).tolist(), "to host"),
        "nonzero": (lambda: there(3).nonzero(), "to host"),
        "mask": (lambda: there(3)[there(3) > 0], "to host"),
        "index": (lambda: there(3)[torch.tensor([0])], "to device"),
        "list": (lambda: there(3)[[0, 2]], "to device"),
        "copy_": (lambda: there(3).copy_(here(3)), "to device"),
        "copy_ back": (lambda: here(3).copy_(there(3)), "to host"),
    }
    for name, (ask, what) in counted.items():
        with pretend() as log:
            ask()
        assert [found for _, found, _ in log.transfers.elements()] == [what], name
    with pretend() as log:
        assert (there(3) + 1 - there(3)).square().mean().shape == ()
        assert there(3)[1:].to(DEVICE).shape == (2,) and not log.transfers  # nothing moves
        to_input(torch.zeros(1, 1, 2, 2, dtype=torch.uint8), DEVICE)
        ((_, what, line),) = log.transfers
        assert what == "to device" and line.startswith("models/inputs.py:")


def test_a_device_without_float64_and_one_that_is_full() -> None:
    with pretend(float64=False), pytest.raises(TypeError, match="float64"):
        there(3).double()
    with pretend(memory=1000):
        assert there(250).shape == (250,)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 1004 bytes"):
            there(251)


def test_outside_of_the_block_torch_is_as_it_was() -> None:
    generator, swap = torch.Generator, torch.__future__.get_swap_module_params_on_conversion()
    with pretend():
        assert torch.Generator is not generator
    assert torch.Generator is generator and torch.__future__.get_swap_module_params_on_conversion() == swap
    assert not isinstance(torch.ones(1), DeviceTensor)
