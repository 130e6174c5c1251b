"""Mean and spread over seeds, and which runs may be averaged at all."""

from __future__ import annotations

from typing import Any

import pytest

from osfl.evaluation.comparison import METRICS, summarize


def run(method: str = "fedavg", seed: int = 0, accuracy: float = 0.5, auroc: float | None = 0.8, **changed: Any) -> Any:
    spread = {"mean": accuracy, "std": 0.1, "worst": accuracy - 0.1, "worst_client": "a", "values": {"a": accuracy}}
    metrics = {"accuracy": accuracy, "balanced_accuracy": accuracy, "auroc": auroc, "f1": accuracy, "ece": 0.1, "nll": 1.0}
    result = {
        "schema": 1,
        "method": method,
        "preset": "cpu",
        "seed": seed,
        "settings": {"epochs": 2},
        "data": {"dataset": "digits", "partition": "iid", "digest": "d"},
        "clients": [{"client": "a"}],
        "scores": {"global": metrics, "clients": {"own": spread, "everyone": spread}, "majority": 0.1},
        "costs": {
            "upload_bytes": 10,
            "download_bytes": 20,
            "messages_per_client": 1,
            "client_seconds": 1.0,
            "server_seconds": 2.0,
            "wall_seconds": 3.0,
        },
    }
    return {**result, **changed}


def test_mean_and_sample_deviation_over_seeds() -> None:
    summary = summarize([run(seed=0, accuracy=0.4), run(seed=1, accuracy=0.6)], command="osfl compare")
    entry = summary["methods"]["fedavg"]["scores.global.accuracy"]
    assert entry["mean"] == pytest.approx(0.5) and entry["std"] == pytest.approx(0.02**0.5)
    assert entry["n"] == 2 and entry["values"] == [0.4, 0.6]
    assert summary["schema"] == 1 and summary["command"] == "osfl compare" and summary["data"]["clients"] == 1
    assert summary["runs"][1] == {"method": "fedavg", "seed": 1, "path": "fedavg/seed1"}


def test_one_seed_has_no_spread_and_missing_values_are_not_counted() -> None:
    methods = summarize([run(auroc=None), run(seed=1, auroc=0.9)])["methods"]["fedavg"]
    assert methods["scores.global.auroc"] == {"mean": 0.9, "std": 0.0, "n": 1, "values": [0.9]}
    alone = summarize([run(auroc=None)])["methods"]["fedavg"]
    assert alone["scores.global.auroc"] == {"mean": None, "std": None, "n": 0, "values": []}
    assert alone["scores.global.accuracy"]["std"] == 0.0
    assert set(alone) == set(METRICS)


def test_methods_keep_their_order_and_labels_name_groups() -> None:
    results = [run("b"), run("a"), run("b", seed=1)]
    assert list(summarize(results)["methods"]) == ["b", "a"]
    labeled = summarize(results, labels=["x", "y", "x"], paths=["p", "q", "r"])
    assert list(labeled["methods"]) == ["x", "y"] and labeled["runs"][2]["path"] == "r"


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"settings": {"epochs": 9}}, ["fedavg (epochs=2)", "fedavg (epochs=9)"]),
        ({"preset": "paper"}, ["fedavg (preset=cpu)", "fedavg (preset=paper)"]),
        ({"data": {"dataset": "blood", "partition": "iid"}}, ["fedavg (digits)", "fedavg (blood)"]),
        ({"clients": [{}, {}]}, ["fedavg (1 client)", "fedavg (2 clients)"]),
    ],
)
def test_runs_that_differ_in_more_than_the_seed_are_never_averaged(changed: dict[str, Any], names: list[str]) -> None:
    summary = summarize([run(), run(seed=1, **changed)])
    assert list(summary["methods"]) == names


def test_shared_data_is_kept_and_differing_data_left_out() -> None:
    other = run(seed=1, data={"dataset": "digits", "partition": "silos", "digest": "e"})
    assert summarize([run(), other])["data"] == {"dataset": "digits", "clients": 1}
    assert summarize([])["methods"] == {}


def test_work_and_bytes_are_those_of_making_the_models() -> None:
    phase = {"seconds": 1.0, "peak_bytes": 1}
    flops = {"client": 3.0, "server": 4.0, "personalize": 5.0, "evaluate": 1000.0}
    result = run()
    result["costs"]["phases"] = {name: {**phase, "flops": value} for name, value in flops.items()}
    metrics = summarize([result])["methods"]["fedavg"]
    assert metrics["costs.flops"]["mean"] == 12 and metrics["costs.bytes"]["mean"] == 30
    assert summarize([run()])["methods"]["fedavg"]["costs.flops"]["mean"] is None


def test_gaps_are_taken_seed_by_seed_and_for_generators_only() -> None:
    made: dict[str, Any] = {"generators": {"bound": {"value": 0.4, "error": 0.08}}}
    results = [
        run("centralized", 0, 0.9),
        run("centralized", 1, 0.8),
        run("a", 0, 0.7, **made),
        run("a", 1, 0.7, **made),
        run("a", 2, 0.1, **made),
        run("b", 0, 0.5),
    ]
    summary = summarize(results)
    assert list(summary["gaps"]) == ["a"] and summary["gaps"]["a"]["values"] == pytest.approx([0.2, 0.1])
    assert summary["methods"]["a"]["generators.bound.value"]["mean"] == pytest.approx(0.4)
    assert summary["methods"]["b"]["generators.bound.value"]["mean"] is None
