"""FedAvg's exact properties."""

import pytest
import torch
from torch.nn import functional

from osfl.core.errors import UsageError
from osfl.core.plan import check_plan
from osfl.core.types import Dataset, Payload, Plan, Task, Upload
from osfl.ingredients.statistics.averaging import average
from osfl.ingredients.training.local import Training, fit
from osfl.methods.fedavg import FedAvg, Settings
from osfl.models.build import build_model
from osfl.models.inputs import to_input
from osfl.models.naming import named
from tests.methods.conftest import TASK, context, shard

SMALL = Settings(architecture="cnn-w4", epochs=1, batch_size=8, lr=0.05, schedule="constant")


def release_of(uploads: list[Upload], settings: Settings = SMALL) -> dict[str, torch.Tensor]:
    clients = [upload.client for upload in uploads]
    return dict(FedAvg(TASK, settings).server_phase(uploads, context(settings, clients)).shared.tensors)


def test_one_client_returns_that_client() -> None:
    payload = FedAvg(TASK, SMALL).client_phase(shard("a"), context(SMALL, ["a"]))
    merged = release_of([Upload("a", "", payload)])
    assert all(torch.equal(merged[name], tensor) for name, tensor in payload.tensors.items())


def test_identical_clients_return_the_common_model() -> None:
    payload = FedAvg(TASK, SMALL).client_phase(shard("a"), context(SMALL, ["a"]))
    merged = release_of([Upload("a", "", payload), Upload("b", "", payload), Upload("c", "", payload)])
    for name, tensor in payload.tensors.items():
        assert torch.allclose(merged[name].double(), tensor.double(), rtol=0, atol=1e-7)


def test_weights_are_shares_of_samples() -> None:
    def upload(client: str, value: float, samples: int) -> Upload:
        return Upload(client, "", Payload({"model/w": torch.full((2,), value)}, {"samples": samples}))

    uploads = [upload("a", 1.0, 12), upload("b", 5.0, 10), upload("c", 3.0, 10)]
    assert torch.equal(release_of(uploads)["model/w"], torch.full((2,), 2.875))
    lying = [upload("a", 1.0, 10**6), *uploads[1:]]  # no more than the plan's share
    torch.testing.assert_close(release_of(lying)["model/w"], torch.full((2,), 0.4 * 1 + 0.3 * 5 + 0.3 * 3))
    uniform = Settings(weighting="uniform")
    assert torch.equal(release_of(uploads, uniform)["model/w"], torch.full((2,), 3.0))


def test_integer_buffers_are_untouched() -> None:
    members = [{"w": torch.tensor([1.0]), "steps": torch.tensor(7)}, {"w": torch.tensor([3.0]), "steps": torch.tensor(9)}]
    mean = average(members, [1, 1])
    assert mean["steps"].dtype == torch.int64 and int(mean["steps"]) == 7 and float(mean["w"]) == 2.0


def test_average_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="positive total weight"):
        average([], [])


class Linear(torch.nn.Module):
    """A network without BatchNorm, where averaging one full-batch step is exactly one centralized step."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(64, 3)
        with torch.no_grad():
            self.layer.weight.copy_(torch.linspace(-0.1, 0.1, 192).view(3, 64))
            self.layer.bias.zero_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x.flatten(1))
        return out


def test_one_full_batch_step_equals_one_centralized_step() -> None:
    """Equal client data sizes, full batch, one step, no BN: the mean of the steps is the step on the union."""
    parts = [shard("a", seed=1).train, shard("b", seed=2).train]
    union = Dataset(torch.cat([p.images for p in parts]), torch.cat([p.labels for p in parts]))
    step = Training(epochs=1, batch_size=1000, lr=0.5, momentum=0.0, weight_decay=0.0, schedule="constant")
    locals_, central = [Linear(), Linear()], Linear()
    for model, part in zip(locals_, parts, strict=True):
        fit(model, part, step, torch.Generator().manual_seed(0))
    fit(central, union, step, torch.Generator().manual_seed(0))
    mean = average([named(model, "m") for model in locals_], [24, 24])
    for name, tensor in named(central, "m").items():
        assert torch.allclose(mean[name], tensor, rtol=0, atol=1e-6)


def test_all_clients_start_from_one_initialization() -> None:
    first = build_model("cnn-w4", TASK, context(SMALL, ["a"]).generator("init", "cnn-w4"))
    second = build_model("cnn-w4", TASK, context(SMALL, ["b"]).generator("init", "cnn-w4"))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_training_learns() -> None:
    """Not an accuracy benchmark: the loop must lower the loss on its own images."""
    data = shard("a", 48).train
    model = build_model("cnn-w4", TASK, torch.Generator().manual_seed(0))

    def loss() -> float:
        with torch.no_grad():
            return float(functional.cross_entropy(model.eval()(to_input(data.images)), data.labels))

    before = loss()
    fit(model, data, Training(epochs=8, batch_size=16, lr=0.05, schedule="cosine"), torch.Generator().manual_seed(0))
    assert loss() < 0.5 * before


def test_mixed_architectures_are_refused_before_the_round() -> None:
    plan = Plan(Task("t", ("a", "b"), (1, 8, 8)), "fedavg", Settings(architecture="a:cnn,*:resnet18"), ("a", "b"))
    with pytest.raises(UsageError, match="one architecture for all clients"):
        check_plan(plan)
