"""What `osfl estimate` says before a run, against what the run then needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.core.errors import DeviceError
from osfl.core.registry import load, names
from osfl.core.types import Dataset
from osfl.runtime.machine import Machine
from osfl.runtime.memory import available, budget, sharing
from osfl.runtime.meter import counting, measure
from osfl.runtime.tensor_bytes import TensorBytes
from osfl.simulate import estimate, rehearsal
from osfl.simulate.checks import small_federation
from osfl.simulate.estimate import estimate_of
from osfl.simulate.rehearsal import PHASES, by_operations, expected, few_of, nonnegative_fit, run_unevaluated
from osfl.simulate.simulation import Federation

ONE = Machine(workers=1)
IMAGE = 2 * 9 * (8 * 64 + 8 * 16 * 16 + 16 * 32 * 4)  # forward through the convolutions of cnn-w8: 1 to 8 to 16 to 32 channels
FIRST = 2 * 9 * 8 * 64  # its first convolution: nobody needs the gradient to the pixels
HEAD = 2 * 32 * 10


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rehearsals with as few images as there can be: operations follow exactly, seconds do not matter here."""
    monkeypatch.setattr(rehearsal, "FIRST", 4)
    monkeypatch.setattr(rehearsal, "MOST", 4)
    monkeypatch.setattr(rehearsal, "ENOUGH", 0)


def changed(federation: Federation, **changes: Any) -> Federation:
    return replace(federation, plan=replace(federation.plan, settings=replace(federation.plan.settings, **changes)))


def flops(federation: Federation) -> dict[str, float]:
    found = expected(federation, ONE, tensors=False)
    return {phase: found.total("flops", phase) for phase in PHASES}


def longer(method: str) -> Federation:
    """The smoke preset, with settings that count steps half as long again as in the longer rehearsal."""
    federation = small_federation(method, "iid", 2, samples=300 if method == "federated_factory" else 40)
    settings = federation.plan.settings
    pairs: Any = load(method)(federation.plan.task, settings).shortened().items()
    return changed(federation, **{name: high + high // 2 for name, (low, high) in pairs if low != high})


@pytest.mark.parametrize("method", names())
def test_operations_of_every_method_are_known_before_it_runs(
    method: str, few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Client, server and personalization. What stops by itself, or depends on what was learned, is known roughly."""
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))  # an estimate is that of a run that finds nothing there
    federation = longer(method)
    found, costs = flops(federation), run_unevaluated(federation, tmp_path / "run", ONE)
    for phase in PHASES:
        spent = sum(row["flops"] for (its, _), row in costs.rows.items() if its == phase)
        assert found[phase] == pytest.approx(spent, rel=ROUGHLY.get(method, 1e-6)), phase
    assert sum(found.values()) > 0


ROUGHLY = {"fedpft": 0.35}  # EM ends when it has converged


def test_what_an_earlier_run_has_kept_changes_no_estimate(few: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))
    federation = longer("centralized_tokens")
    before = expected(federation, ONE, tensors=False)
    run_unevaluated(federation, tmp_path / "run", ONE)
    after = expected(federation, ONE, tensors=False)
    assert set(after.figures["flops"]) == set(before.figures["flops"])
    for phase, parts in before.figures["flops"].items():
        assert after.figures["flops"][phase] == pytest.approx(parts, rel=1e-9)  # solved for, so not to the last bit
    assert (before.kept, after.kept) == (0, 1)


def test_short_settings_are_made_longer_until_they_can_be_measured(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    federation, seen = changed(small_federation("fedavg", "iid", 2, samples=40), epochs=40), []
    plain = rehearsal.Stage.rehearse

    def watched(self: rehearsal.Stage, settings: Any, images: int, cache: str) -> rehearsal.Costs:
        costs = plain(self, settings, images, cache)
        seen.append(settings.epochs)
        return replace(costs, rows={("client", "client-01"): {"processor_seconds": 0.02 * settings.epochs}})

    monkeypatch.setattr(rehearsal.Stage, "rehearse", watched)
    monkeypatch.setattr(rehearsal, "ENOUGH", 0.5)
    expected(federation, ONE, tensors=False)
    assert seen == [1, 1, 2, 16, 32]  # 32 epochs add 0.62 s to the shortest rehearsal


def test_what_a_client_does_once_is_not_taken_for_work_on_each_image() -> None:
    """The second client has more images, and does more once; an image costs each of them 0.1 s."""
    clients = [
        rehearsal._Seen(*(torch.tensor(part, dtype=torch.float64) for part in ([(1, n), (1, 2 * n)], seconds, [n, 2 * n])))
        for n, seconds in ((10, [2.0, 3.0]), (20, [7.0, 9.0]))
    ]
    weights = rehearsal._weights(clients, seconds=True)
    assert weights == pytest.approx([0.0, 0.1]) and [one.left(weights) for one in clients] == pytest.approx([1.0, 5.0])


def test_operations_of_fedavg_by_hand(few: None) -> None:
    """Backward costs a forward pass for the weights, and another for the inputs where somebody needs it."""
    federation = changed(small_federation("fedavg", "iid", 2, samples=40), epochs=5)
    images = sum(len(shard.train) for shard in federation.shards)
    found = flops(federation)
    assert found["client"] == pytest.approx(5 * images * (3 * (IMAGE + HEAD) - FIRST)) and images == 38
    assert found["server"] == found["personalize"] == 0


def test_operations_of_an_inversion_by_hand(few: None) -> None:
    """DeepInversion of each of two clients: to the pixels and back, once asked, and a student of what was made."""
    changes = {"rounds": 1, "adi": 0.0, "batches": 1, "steps": 20, "images": 16, "server_epochs": 5, "invert": "clients"}
    federation = changed(small_federation("deepinversion", "iid", 2, samples=40), **changes)
    made, forward = 2 * 16, IMAGE + HEAD
    dreamed = made * 20 * 2 * forward  # weights are frozen: forward, and backward to the pixels
    asked = made * 2 * forward  # both clients about every image
    learned = 5 * made * (3 * forward - FIRST)
    assert flops(federation)["server"] == pytest.approx(dreamed + asked + learned)


def test_an_estimate_grows_with_epochs_and_with_clients(few: None) -> None:
    def client(count: int, epochs: int) -> float:
        return flops(changed(small_federation("fedavg", "iid", count, samples=40 * count), epochs=epochs))["client"]

    once = client(2, 3)
    assert client(2, 6) == pytest.approx(2 * once) and client(4, 3) == pytest.approx(2 * once, rel=0.02)  # images, rounded
    epochs = (6, 12, 24)
    server = [flops(changed(small_federation("dense", "iid", 2, samples=40), server_epochs=n))["server"] for n in epochs]
    pools = [n * (n + 1) / 2 * 2 * 16 * (3 * (IMAGE + HEAD) - FIRST) for n in epochs]  # the student passes over what is there
    made = [(all_of_it - pool) / n for n, all_of_it, pool in zip(epochs, server, pools, strict=True)]
    assert made == pytest.approx([made[0]] * 3) and server[2] > 2 * server[1] > 4 * server[0] > 0


def test_some_of_many_clients_rehearse(few: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ten clients are continued from two and four as they are: FedAvg's server, which reads uploads one after the other, and
    DAFL's, which asks all of them."""
    monkeypatch.setattr(rehearsal, "CROWD", 6)
    taken = {}
    for method in ("fedavg", "dafl"):
        federation = small_federation(method, "iid", 10, samples=120)
        found = expected(federation, ONE)
        with TensorBytes() as counter, counting(counter):
            costs = run_unevaluated(federation, tmp_path / method, ONE)
        assert found.rehearsed[-1] == "clients 2 and 4 → 10"
        assert sum(found.up.values()) == pytest.approx(sum(costs.up.values()), abs=100)
        for phase in PHASES:
            spent = sum(row["flops"] for (its, _), row in costs.rows.items() if its == phase)
            assert found.total("flops", phase) == pytest.approx(spent, rel=0.02)
        taken[method] = found.most("tensor_bytes", "server")
        assert taken[method] == pytest.approx(costs.figure("server", "", "tensor_bytes"), rel=0.05)
    with_four = expected(small_federation("fedavg", "iid", 4, samples=48), ONE).most("tensor_bytes", "server")
    assert taken["fedavg"] == pytest.approx(with_four, rel=0.05) and taken["dafl"] > 2 * taken["fedavg"]


# --- memory ----------------------------------------------------------------------------------------------------------------


def test_bytes_of_tensors_by_hand() -> None:
    """Two square matrices of 4 MB and their product; then one is gone before another comes."""
    a = torch.zeros(1000, 1000)
    with TensorBytes() as counter, counting(counter):
        with measure() as meter:
            b = a + 1
            c = a @ b
            del b, c
            d = a[:10] * 2
        with measure() as after:
            d += 1
    assert meter.tensor_bytes == 12_000_000
    assert after.tensor_bytes == 40_000  # what is not used any more does not count


def test_bytes_of_tensors_of_a_phase_are_those_of_its_longest_part(few: None) -> None:
    """The pool of DENSE grows with the server's epochs by a batch of images and answers, and nothing else does."""
    small, large = (
        estimate_of(changed(small_federation("dense", "iid", 2, samples=40), server_epochs=n), ONE).phases["server"]
        for n in (2, 402)
    )
    made = 400 * 2 * 16  # generators times images
    each = 64 + 8 + 2 * 10 * 4  # pixels, a label, two clients' answers
    assert large.tensor_bytes - small.tensor_bytes == made * each


def test_what_cannot_fit_is_refused_with_the_setting_to_change(few: None, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = small_federation("dense", "iid", 2, samples=40)
    monkeypatch.setattr(estimate, "available_memory", lambda: 10_000)
    with pytest.raises(DeviceError, match="client phase of dense needs more memory than this computer") as refused:
        estimate_of(federation, ONE)
    assert "--set batch_size=" in str(refused.value) and "--workers" in str(refused.value)
    monkeypatch.setattr(estimate, "available_memory", lambda: 10**12)
    large = changed(federation, synthesis_batch=200)
    with pytest.raises(DeviceError, match="server phase of dense needs more memory than its device") as refused:
        estimate_of(large, Machine(workers=1, memory=5_000_000))
    assert "--set synthesis_batch=" in str(refused.value)


def test_workers_share_what_is_free_on_their_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two devices, five workers: three at one of them. 8 GB are free, 1 GB is this process's already."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8_000_000_000, 24_000_000_000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 1_000_000_000)
    gpu = torch.device("cuda", 0)
    assert available(gpu) == 8_100_000_000
    with sharing(5, 2):
        assert available(gpu) == 2_700_000_000
        with budget(5_000):
            assert available(gpu) == 5_000  # as the user said: of one training


# --- the parts -------------------------------------------------------------------------------------------------------------


def test_a_rehearsal_has_what_each_class_needs() -> None:
    """Class 0 has 6 images, class 1 has 2: of both as many as count with the method, and then the first ones."""
    data = Dataset(torch.arange(8, dtype=torch.uint8).view(8, 1, 1, 1), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1]))
    assert few_of(data, 2, 0).images.flatten().tolist() == [0, 1]
    assert few_of(data, 2, 4).images.flatten().tolist() == [0, 1, 2, 3, 6, 7]
    labels = torch.tensor([[1, 0], [1, 1], [0, 1]])
    assert few_of(Dataset(data.images[:3], labels), 1, 1).images.flatten().tolist() == [0, 1]


def test_weights_are_found_and_none_is_below_zero() -> None:
    rows = [(1.0, 2.0, 0.0), (1.0, 4.0, 0.0), (1.0, 2.0, 0.0)]
    assert nonnegative_fit(rows, [7.0, 13.0, 7.0]) == pytest.approx([1.0, 3.0, 0.0])
    assert nonnegative_fit(rows, [3.0, 2.0, 3.0]) == pytest.approx([8 / 3, 0.0, 0.0])  # more never costs less
    assert nonnegative_fit(rows, [0.0, 0.0, 0.0]) == [0.0, 0.0, 0.0]


def test_seconds_that_noise_hides_follow_from_operations() -> None:
    """An epoch of 1 in 100 seconds is lost in the noise of a rehearsal, but not in its operations."""
    rows, flops = [(1.0, 1.0), (1.0, 2.0), (1.0, 3.0)], [1e9, 2e9, 3e9]
    noisy = [100.9, 99.8, 101.1]
    assert by_operations(rows, [3.0, 5.0, 7.0], flops) == pytest.approx([0.0, 2.0])
    alone, guided = nonnegative_fit(rows, noisy)[1], nonnegative_fit(rows, noisy, [0.0, 1.0])[1]
    assert alone < 0.2 and guided == pytest.approx(1.0, abs=0.1)
    uncounted = nonnegative_fit([(1.0, 1.0), (1.0, 9.0)], [2.0, 10.0], [0.0, 1e-20])
    assert uncounted == pytest.approx([1.0, 1.0], rel=1e-3)  # work without operations: only the seconds know of it
    clear = nonnegative_fit(rows, [101.0, 201.0, 301.0], [0.0, 50.0])
    assert clear[1] == pytest.approx(100.0, rel=0.1)  # what the seconds say clearly is believed
