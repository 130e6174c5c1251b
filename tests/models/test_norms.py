"""Statistics of batch norm: taken afresh they are those of the images, and a client of few steps needs that."""

from dataclasses import replace

import pytest
import torch

from osfl.core.seeds import torch_generator
from osfl.core.types import Dataset, Task
from osfl.ingredients.training.local import Training, first_model, fit
from osfl.models.build import build_model
from osfl.models.inputs import to_input
from osfl.models.norms import recalibrate_bn, recalibrated_bn

TASK = Task("toy", ("dark", "light"), (1, 8, 8))
SETTINGS = Training("cnn-w8", epochs=5, batch_size=32, lr=0.05)


def images(count: int) -> torch.Tensor:
    return torch.randint(0, 256, (count, *TASK.image), dtype=torch.uint8, generator=torch_generator(4, "images"))


def test_recalibrated_statistics_are_those_of_the_images() -> None:
    network, some = build_model("cnn-w8", TASK, torch_generator(0, "model")), images(64)
    network.stages[0].bn.momentum = 0.3  # type: ignore[index, union-attr]
    before = [value.clone() for value in network.buffers()]
    norm = recalibrated_bn(network, some, batch=64).stages[0].bn  # type: ignore[index, union-attr]
    seen = network.stages[0].conv(to_input(some))  # type: ignore[index, union-attr]
    assert torch.allclose(norm.running_mean, seen.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(norm.running_var, seen.var((0, 2, 3)), rtol=1e-4)
    assert norm.momentum == 0.3 and all(torch.equal(*pair) for pair in zip(before, network.buffers(), strict=True))
    assert recalibrated_bn(network, some[:1]).training is False  # a single image works too


def test_a_network_without_batch_norm_is_left_alone() -> None:
    network = build_model("vit", Task("toy", ("a", "b"), (1, 8, 8)), torch_generator(0, "model")).train()
    before = [value.clone() for value in network.state_dict().values()]
    recalibrate_bn(network, images(4))
    assert not network.training
    assert all(torch.equal(*pair) for pair in zip(before, network.state_dict().values(), strict=True))


@pytest.mark.parametrize("recalibrates", [False, True])
def test_a_client_of_few_steps_is_only_right_about_its_images_with_recalibrated_statistics(recalibrates: bool) -> None:
    """Twelve images, one step an epoch: while it learns the network tells them apart, with running statistics it does not."""
    shades = torch.tensor([60] * 9 + [75] * 3, dtype=torch.uint8)
    data = Dataset(shades[:, None, None, None] + images(12) // 16, (shades > 70).long())
    model = first_model(SETTINGS, "cnn-w8", TASK, torch_generator(1, "start"))
    fit(model, data, replace(SETTINGS, recalibrate_bn=recalibrates), torch_generator(2, "order"))
    assert not model.training
    right = (model(to_input(data.images)).argmax(1) == data.labels).double().mean().item()
    assert (right == 1.0) is recalibrates
