"""Trackers get the finished result, change none, leave no image and no path anywhere, and lose no run when they fail."""

from __future__ import annotations

import base64
import json
import socket
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import osfl
from osfl.cli.main import answer
from osfl.core.errors import UsageError
from osfl.core.result import read_result
from osfl.reports.page import run_page
from osfl.reports.saved import as_png, figure_names
from osfl.simulate.tracking import tracker as trackers
from osfl.simulate.tracking.logged import curves, facts, scalars
from osfl.simulate.tracking.tracker import open_logs

SMALL: dict[str, Any] = {"clients": 2, "partition": "iid", "preset": "smoke", "samples": 60, "image_size": 8}


class Kept:
    """A tracker of one's own."""

    def __init__(self) -> None:
        self.runs: dict[str, dict[str, Any]] = {}
        self.open = ""

    def start(self, run: str, facts: Mapping[str, str]) -> None:
        assert not self.open
        self.open = run
        self.runs[run] = {"facts": dict(facts), "scalars": {}, "figures": {}}

    def scalar(self, name: str, value: float, step: int) -> None:
        self.runs[self.open]["scalars"][name, step] = value

    def figure(self, name: str, png: bytes) -> None:
        assert png.startswith(b"\x89PNG")
        self.runs[self.open]["figures"][name] = png

    def finish(self) -> None:
        self.open = ""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a curve over rounds, and its figures."""
    out = tmp_path_factory.mktemp("secret-place") / "rounds"
    osfl.run("fedavg_rounds", out, **SMALL)
    return out


def test_a_run_is_logged_and_not_changed(tmp_path: Path) -> None:
    tracker = Kept()
    result = osfl.run("fedavg", tmp_path / "a", log=tracker, **SMALL)
    alone = osfl.run("fedavg", tmp_path / "b", **SMALL)
    assert all(result[key] == alone[key] for key in ("release_digest", "models_digest", "scores", "figures", "plan_digest"))
    ((name, logged),) = tracker.runs.items()
    assert name.startswith("a-") and not tracker.open
    assert logged["scalars"]["scores/accuracy", 0] == result.accuracy
    low, high = (logged["scalars"][f"scores/accuracy_{end}", 0] for end in ("low", "high"))
    assert low < result.accuracy < high
    assert logged["scalars"]["clients/own/worst", 0] == result["scores"]["clients"]["own"]["worst"]
    assert logged["scalars"]["costs/upload_bytes", 0] == result.upload_bytes
    assert logged["scalars"]["phases/client/seconds", 0] == result["costs"]["phases"]["client"]["seconds"]
    assert logged["facts"]["models_digest"] == result["models_digest"]
    assert logged["facts"]["settings.epochs"] == str(result["settings"]["epochs"])
    assert set(logged["figures"]) == {"accuracy", "labels-over-clients", "confusion-matrix"}


def test_pictures_are_not_logged(finished: Path) -> None:
    """A gallery of synthetic images beside the nearest training images shows images of owners."""
    result, tracker = read_result(finished), Kept()
    picture = base64.b64encode(as_png(next(iter(figure_names(lambda: run_page(result)).values())))).decode()
    result["figures"] = {"Pairs": {"kind": "gallery", "images": [{"png": picture, "caption": "0"}]}}
    assert "pairs" in figure_names(lambda: run_page(result))
    (log,) = open_logs(tracker)
    log.run(result, finished)
    (logged,) = tracker.runs.values()
    assert "confusion-matrix" in logged["figures"] and "pairs" not in logged["figures"]


def test_neither_paths_nor_commands_nor_names_of_clients_are_logged(finished: Path) -> None:
    result = read_result(finished)
    result["data"]["dataset"] = "/srv/patients/ward-7"
    result["settings"]["weights"] = "/home/somebody/weights.safetensors"
    said = json.dumps([facts(result), scalars(result), list(curves(result))])
    assert "ward-7" in said and "weights.safetensors" in said
    assert "/srv" not in said and "somebody" not in said and "secret-place" not in said and "client-01" not in said


def test_curves_keep_their_steps(finished: Path) -> None:
    result = read_result(finished)
    result["figures"] = {
        "Loss": {"kind": "lines", "x": [0, 5, 10], "series": {"a": [2.0, None, 1.0]}},
        "Spectrum": {"kind": "lines", "x": [0.3, 0.7], "series": {"b": [1, 2]}},
        "broken": "no figure",
    }
    found = list(curves(result))
    course = result["course"]
    assert [(step, value) for name, value, step in found if "accuracy_by_round" in name] == list(
        zip(course["at"], course["accuracy"], strict=True)
    )
    assert [one for one in found if "Loss" in one[0]] == [("curves/Loss/a", 2.0, 0), ("curves/Loss/a", 1.0, 10)]
    assert not any("Spectrum" in name for name, *_ in found)


def test_a_comparison_logs_every_run_and_the_means(tmp_path: Path) -> None:
    tracker = Kept()
    found = osfl.compare(["fedavg", "local_only"], tmp_path / "both", log=tracker, **SMALL)
    assert [name.rsplit("-", 1)[0] for name in tracker.runs] == ["fedavg-seed0", "local_only-seed0", "both-comparison"]
    *_, means = tracker.runs.values()
    assert means["scalars"]["fedavg/scores/global/accuracy", 0] == found["methods"]["fedavg"]["scores.global.accuracy"]["mean"]
    assert "accuracy-by-method" in means["figures"] and means["facts"]["methods"] == "fedavg, local_only"


class Failing(Kept):
    def __init__(self, at: str) -> None:
        super().__init__()
        self.at, self.calls = at, 0

    def __getattribute__(self, name: str) -> Any:
        if name in ("start", "scalar", "figure", "finish") and name == object.__getattribute__(self, "at"):
            self.calls += 1
            raise SystemExit("the disk is full\nand more") if name == "scalar" else OSError("the disk is full\nand more")
        return object.__getattribute__(self, name)


@pytest.mark.parametrize("at", ["start", "scalar"])
def test_a_tracker_that_fails_is_named_once_and_no_run_is_lost(finished: Path, at: str) -> None:
    tracker, said = Kept(), list[str]()
    broken = Failing(at)
    logs = [
        trackers.Log("broken", lambda: broken, None, said.append),
        trackers.Log("good", lambda: tracker, None, said.append),
    ]
    for _ in range(2):
        for log in logs:
            log.run(read_result(finished), finished)
    kind = "SystemExit" if at == "scalar" else "OSError"
    where = f"{kind}: the disk is full. Its results are in {finished}."
    assert said == [f"Logging to broken failed and is left out from here on: {where}"]
    assert broken.calls <= 2 and len(tracker.runs) == 1 and next(iter(tracker.runs.values()))["figures"]


def test_a_result_that_cannot_be_logged_loses_no_run_where_warnings_are_errors(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "curves", lambda result: [float("a word")])
    (log,) = open_logs(Kept())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.run(read_result(finished), finished)
    assert log.failed


def test_a_run_whose_tracker_fails_ends_with_its_results(tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="Logging to Failing failed") as caught:
        result = osfl.run("local_only", tmp_path / "run", log=Failing("start"), **SMALL)
    assert len([one for one in caught if "Logging" in str(one.message)]) == 1
    assert result == read_result(tmp_path / "run")


@pytest.mark.parametrize("name", list(trackers.TRACKERS))
def test_a_missing_extra_is_named_before_anything_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(trackers, "find_spec", lambda module: None)
    for verb in ("run --method fedavg", "compare --methods fedavg"):
        assert answer([*verb.split(), "--smoke", "--log", name, "--out", "runs/a"]) == 2
        said = capsys.readouterr().err
        assert f"--log {name} needs {name}" in said and f"pip install 'osfl[{name}]'" in said
    assert not Path("runs").exists()


@pytest.mark.parametrize("text", ["tensorbord", "mlflow:", ""])
def test_an_unknown_tracker_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="expected tensorboard or mlflow or wandb"):
        open_logs(text)


# --- the real libraries -----------------------------------------------------------------------------------------------


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Who tried to reach the network: everything that is not this machine would go through this proxy."""
    seen: list[Any] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        for variable in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(variable, f"http://127.0.0.1:{server.getsockname()[1]}")

        def listen() -> None:
            while True:
                try:
                    connection, address = server.accept()
                except OSError:
                    return
                seen.append(address)
                connection.close()

        threading.Thread(target=listen, daemon=True).start()
        yield seen
        server.shutdown(socket.SHUT_RDWR)


def log_twice(name: str, finished: Path, folder: Path) -> None:
    """The second time nothing is added."""
    said: list[str] = []
    for _ in range(2):
        (log,) = open_logs(f"{name}:{folder}", said.append)
        log.run(read_result(finished), finished)
    assert said == []


def missing(name: str) -> bool:
    return any(find_spec(module) is None for module in trackers.TRACKERS[name][0])


@pytest.mark.skipif(missing("tensorboard"), reason="the extra tensorboard is not installed")
def test_tensorboard_reads_what_was_logged(finished: Path, tmp_path: Path, connections: list[Any]) -> None:
    log_twice("tensorboard", finished, tmp_path)
    from tensorboard.backend.event_processing.event_accumulator import (  # type: ignore[import-untyped, unused-ignore]
        EventAccumulator,
    )

    (folder,) = (path for path in tmp_path.iterdir() if path.name != ".logged")
    read = EventAccumulator(str(folder))
    read.Reload()
    result = read_result(finished)
    assert read.Scalars("scores/accuracy")[0].value == pytest.approx(result["scores"]["global"]["accuracy"])
    curve = [(event.step, event.value) for event in read.Scalars("curves/accuracy_by_round")]
    assert curve == [
        (at, pytest.approx(value)) for at, value in zip(*(result["course"][k] for k in ("at", "accuracy")), strict=True)
    ]
    assert "figures/accuracy-over-rounds" in read.Tags()["images"] and not connections


@pytest.mark.skipif(missing("mlflow"), reason="the extra mlflow is not installed")
def test_mlflow_reads_what_was_logged(finished: Path, tmp_path: Path, connections: list[Any]) -> None:
    log_twice("mlflow", finished, tmp_path)
    from mlflow.tracking import MlflowClient  # type: ignore[import-not-found, unused-ignore]

    client: Any = MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    (run,) = client.search_runs([client.get_experiment_by_name("osfl").experiment_id])
    result = read_result(finished)
    assert run.info.status == "FINISHED" and run.data.params["release_digest"] == result["release_digest"]
    assert run.data.metrics["scores/accuracy"] == pytest.approx(result["scores"]["global"]["accuracy"])
    assert [one.step for one in client.get_metric_history(run.info.run_id, "curves/accuracy_by_round")] == result["course"][
        "at"
    ]
    assert "figures/confusion-matrix.png" in {one.path for one in client.list_artifacts(run.info.run_id, "figures")}
    assert not connections


@pytest.mark.skipif(missing("wandb"), reason="the extra wandb is not installed")
def test_wandb_stays_offline_whatever_the_environment_says(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, connections: list[Any]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "online")
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    log_twice("wandb", finished, tmp_path)
    (run,) = tmp_path.glob("wandb/offline-run-*")
    (stored,) = run.glob("*.wandb")
    digest = read_result(finished)["release_digest"].encode()
    until = time.monotonic() + 120  # a process of wandb's own writes the file, after the run has finished
    while digest not in (content := stored.read_bytes()) and time.monotonic() < until:
        time.sleep(0.1)
    assert b"scores/accuracy" in content and b"accuracy_by_round" in content and digest in content
    assert {path.name.split("_")[0] for path in run.rglob("*.png")} >= {"confusion-matrix", "accuracy-over-rounds"}
    held = [path.name for path in run.rglob("*") if path.is_file()]
    assert not {"requirements.txt", "wandb-metadata.json", "conda-environment.yaml", "output.log", "diff.patch"} & set(held)
    assert b"secret-place" not in content and not connections
