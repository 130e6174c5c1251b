"""FedProx, SCAFFOLD and FedDyn against FedAvg."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from osfl.ingredients.training.multi_round import MultiRound, part
from osfl.methods.fedavg_rounds import FedAvgRounds
from osfl.methods.feddyn import FedDyn
from osfl.methods.fedprox import FedProx
from osfl.methods.scaffold import Scaffold
from tests.methods.conftest import TASK, context, shard

CPU = torch.device("cpu")
SHARDS = [shard("a", 24, 1), shard("b", 16, 2), shard("c", 32, 3)]
COMMON: dict[str, Any] = {
    "architecture": "cnn-w4",
    "epochs": 1,
    "batch_size": 8,
    "lr": 0.05,
    "schedule": "constant",
    "momentum": 0.0,
}


def states(method: type[MultiRound], rounds: int, **settings: Any) -> dict[str, torch.Tensor]:
    """The whole server-side state after so many rounds."""
    kept: list[dict[str, torch.Tensor]] = []

    class Spy(method):  # type: ignore[misc, valid-type]
        def merge(self, *args: Any) -> dict[str, torch.Tensor]:
            kept.append(super().merge(*args))
            return kept[-1]

    chosen = method.Settings(**{**COMMON, "rounds": rounds, **settings})
    Spy(TASK, chosen).simulate(SHARDS, context(chosen, ["a", "b", "c"]))
    return kept[-1]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return part(a, "model").keys() == part(b, "model").keys() and all(
        torch.equal(a[name], b[name]) for name in part(a, "model")
    )


def test_fedprox_without_pull_is_fedavg_bit_for_bit() -> None:
    assert same(states(FedProx, 3, mu=0.0), states(FedAvgRounds, 3))


def test_fedprox_without_pull_reads_no_server_model() -> None:
    unreadable: dict[str, Any] = {"model/w": None}
    assert FedProx(TASK, FedProx.Settings(mu=0.0)).adjust(unreadable, "a", CPU) is None


def test_fedprox_pull_matters_and_an_infinite_one_keeps_the_server_model() -> None:
    assert not same(states(FedProx, 1, mu=0.5), states(FedAvgRounds, 1))
    start = states(FedProx, 1, lr=1e-12, weight_decay=0.0)
    held = states(FedProx, 1, mu=1e6, lr=1e-7, clip=0.0, weight_decay=0.0)
    for name in (n for n in part(start, "model") if n.endswith("weight")):
        assert torch.allclose(held[name], start[name], atol=1e-4)


def test_scaffold_starts_as_fedavg() -> None:
    """With all control variates at zero, the first round is uniform FedAvg."""
    assert same(states(Scaffold, 1), states(FedAvgRounds, 1, weighting="uniform"))
    assert not same(states(Scaffold, 2), states(FedAvgRounds, 2, weighting="uniform"))


def test_scaffold_controls_sum_to_the_servers() -> None:
    """Σ (c - c_i) = 0 at full participation, after any round."""
    state = states(Scaffold, 3)
    for name in part(state, "control"):
        drift = torch.stack([state[name].double() - state[f"{client}/{name}"].double() for client in "abc"]).sum(0)
        assert float(drift.abs().max()) < 1e-5


def test_scaffold_control_is_the_mean_gradient_that_was_followed() -> None:
    """Option II after the first round: c_i = (w_server - w_i) / (K lr)."""
    settings = Scaffold.Settings(**{**COMMON, "rounds": 1, "clip": 0.0})
    method = Scaffold(TASK, settings)
    before, trained = {"model/w": torch.tensor([1.0])}, {"model/w": torch.tensor([0.4])}
    state = {**before, "control/model/w": torch.zeros(1), "a/control/model/w": torch.zeros(1)}
    after = method.after(state, "a", trained, steps=3, lr=0.1)
    assert torch.allclose(after["a/control/model/w"], torch.tensor([2.0]))


def test_feddyn_first_local_problem_is_fedprox() -> None:
    """h starts at zero, so the first correction is a pull of strength alpha: the same bits as FedProx with mu = alpha."""
    dyn = FedDyn(TASK, FedDyn.Settings(**COMMON, alpha=0.3))
    prox = FedProx(TASK, FedProx.Settings(**COMMON, mu=0.3))
    model = nn.Linear(2, 2)
    server = {f"model/{n}": p.detach() + 1.0 for n, p in model.named_parameters()}
    state = {**server, **{f"a/h/{name}": torch.zeros_like(tensor) for name, tensor in server.items()}}
    gradients = []
    for correct in (dyn.adjust(state, "a", CPU), prox.adjust(state, "a", CPU)):
        assert correct is not None
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        correct(model)
        gradients.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_feddyn_keeps_the_mean_of_the_clients_h() -> None:
    """Server and clients update h by the same rule, so h stays the mean of h_k at full participation."""
    state = states(FedDyn, 3, alpha=0.1)
    for name in part(state, "h"):
        mean = torch.stack([state[f"{client}/{name}"].double() for client in "abc"]).mean(0)
        assert torch.allclose(state[name].double(), mean, atol=1e-5)


def test_a_round_is_counted_in_bytes_both_ways() -> None:
    chosen = FedAvgRounds.Settings(**COMMON, rounds=4)
    simulated = FedAvgRounds(TASK, chosen).simulate(SHARDS, context(chosen, ["a", "b", "c"]))
    assert all(exchange[0].times == 4 for exchange in (*simulated.up.values(), *simulated.down.values()))
    scaffold = replace(Scaffold.Settings(**COMMON), rounds=1)
    twice = Scaffold(TASK, scaffold).simulate(SHARDS, context(scaffold, ["a", "b", "c"])).up["a"][0].payload.tensors
    single = simulated.up["a"][0].payload.tensors
    parameters = [name for name in single if not name.endswith(("running_mean", "running_var", "num_batches_tracked"))]
    assert len(twice) == len(single) + len(parameters)


def test_the_clients_time_and_operations_are_those_of_all_clients_in_all_rounds() -> None:
    chosen = FedAvgRounds.Settings(**COMMON, rounds=1)
    one, three = (
        FedAvgRounds(TASK, s).simulate(SHARDS, context(s, ["a", "b", "c"])) for s in (chosen, replace(chosen, rounds=3))
    )
    assert one.client_seconds > 0 and three.client_seconds > 0 and three.client_flops == 3 * one.client_flops > 0
