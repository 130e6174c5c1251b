"""Every verb on the embedded digits at its smallest: what it prints, what it writes, what scripts get."""

from __future__ import annotations

import csv
import io
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.cli.conftest import Osfl

RUN = "run --method fedavg --dataset digits --clients 3 --partition iid --preset smoke --seed 1 --samples 150"
COMPARE = "compare --methods local_only,fedavg --clients 3 --partition iid --seeds 0,1 --smoke --samples 150 --out runs/c"


def test_run_prints_a_summary_and_where_things_are(osfl: Osfl) -> None:
    output = osfl(RUN)
    assert output.code == 0
    folder = Path("runs/fedavg-digits-iid-seed1")
    for piece in ("Accuracy", "AUROC", "Own distribution", "Worst client", "Sent up", f"{folder}/report/index.html"):
        assert piece in output.out
    assert (folder / "results.json").exists() and (folder / "report" / "index.html").exists()
    assert "clients  3/3" in output.err


def test_run_as_json_is_exactly_the_results(osfl: Osfl) -> None:
    output = osfl(f"{RUN} --out runs/a --format json")
    assert output.out == Path("runs/a/results.json").read_text()
    result = output.json
    assert result["method"] == "fedavg" and len(result["clients"]) == 3 and result["costs"]["upload_bytes"] > 0


def test_run_again_returns_at_once(osfl: Osfl) -> None:
    first = osfl(f"{RUN} --out runs/a --format json").json
    begin = time.process_time()  # of this process: a busy machine does not count
    again = osfl(f"{RUN} --out runs/a")
    assert time.process_time() - begin < 5 and "nothing was computed again" in again.out
    assert json.loads(Path("runs/a/results.json").read_text())["release_digest"] == first["release_digest"]


def test_run_refuses_a_folder_of_another_round(osfl: Osfl) -> None:
    assert osfl(f"{RUN} --out runs/a").code == 0
    output = osfl(f"{RUN} --out runs/a --set epochs=2")
    assert output.code == 1 and "settings.epochs (1 there, 2 now)" in output.err


def test_the_command_in_the_results_repeats_the_run(osfl: Osfl) -> None:
    result = osfl(f"{RUN} --out runs/a --set epochs=2 --format json").json
    again = osfl(result["command"].removeprefix("osfl ").replace("runs/a", "runs/b") + " --format json").json
    assert again["release_digest"] == result["release_digest"]


def test_fewer_images_may_judge_the_same_models(osfl: Osfl) -> None:
    whole = osfl(f"{RUN} --out runs/a --format json").json
    fewer = osfl(f"{RUN} --test-samples 60 --out runs/b --format json").json
    assert whole["data"]["test_images"] > fewer["data"]["test_images"] == fewer["data"]["test_samples"] == 60
    assert fewer["models_digest"] == whole["models_digest"]
    again = osfl(fewer["command"].removeprefix("osfl ").replace("runs/b", "runs/c") + " --format json").json
    assert again["scores"] == fewer["scores"] != whole["scores"]
    output = osfl(f"{RUN} --test-samples 4 --out runs/d")
    assert output.code == 2 and "without any image to judge by" in output.err


def test_a_plan_runs_like_the_options_it_was_written_from(osfl: Osfl) -> None:
    command = "--method fedavg --clients 3 --partition iid --preset smoke --samples 150 --seed 2"
    assert osfl(f"new {command} --dataset digits --out plan.toml").code == 0
    by_options = osfl(f"run {command} --out runs/options --format json").json
    by_plan = osfl("run --plan plan.toml --out runs/plan --format json").json
    assert by_plan["settings"] == by_options["settings"]
    assert by_plan["release_digest"] == by_options["release_digest"]


def test_a_plan_for_other_data_is_refused(osfl: Osfl) -> None:
    osfl("new --method fedavg --dataset digits --smoke --out plan.toml")
    text = Path("plan.toml").read_text()
    digest = text.split('digest = "')[1][:64]
    Path("plan.toml").write_text(text.replace(digest, "0" * 64))
    output = osfl("run --plan plan.toml")
    assert output.code == 2 and "0000" in output.err and "write it again" in output.err


def test_a_plan_keeps_its_limits(osfl: Osfl) -> None:
    osfl("new --method fedavg --dataset digits --clients 2 --partition iid --smoke --samples 150 --out plan.toml")
    text = Path("plan.toml").read_text()
    Path("plan.toml").write_text(text.replace("facts_bytes = 65536", "facts_bytes = 4096"))
    result = osfl("run --plan plan.toml --out runs/a --format json").json
    assert json.loads(Path("runs/a/plan.json").read_text())["limits"]["facts_bytes"] == 4096
    assert result["plan_digest"] == osfl("check plan.toml --format json").json["plan"]
    again = osfl(result["command"].removeprefix("osfl ").replace("runs/a", "runs/b") + " --format json").json
    assert again["plan_digest"] == result["plan_digest"]
    Path("plan.toml").write_text(text.replace("facts_bytes = 65536", "facts_bytes = 8"))
    output = osfl("run --plan plan.toml --out runs/c")
    assert output.code == 1 and "facts" in output.err


def test_compare_writes_a_folder_a_run_and_a_table(osfl: Osfl) -> None:
    output = osfl(COMPARE)
    assert output.code == 0
    assert all(Path(f"runs/c/{m}/seed{s}/results.json").exists() for m in ("local_only", "fedavg") for s in (0, 1))
    assert "local_only" in output.out and "± " in output.out and "runs/c/report/index.html" in output.out
    assert "fedavg seed 1 finished, 4 of 4 runs" in output.err
    again = osfl(f"{COMPARE} --format json")
    assert again.json == json.loads(Path("runs/c/comparison.json").read_text())
    assert again.json["methods"]["fedavg"]["scores.global.accuracy"]["n"] == 2


def test_variants_are_rows_of_their_own(osfl: Osfl) -> None:
    output = osfl("compare --methods ensemble,ensemble@ensemble=probabilities --smoke --samples 150 --out runs/v --format json")
    assert list(output.json["methods"]) == ["ensemble", "ensemble@ensemble=probabilities"]
    page = Path("runs/v/ensemble/seed0/report/index.html")
    before = page.read_text()
    assert "ensemble@ensemble=probabilities" in before
    assert osfl("report runs/v").code == 0
    assert page.read_text() == before  # variants keep their names as references
    assert osfl("report 'runs/v/*/seed0' --out runs/both").code == 0
    assert "ensemble (ensemble=probabilities)" in page.read_text()


@pytest.mark.parametrize("width", [60, 80, 100])
def test_a_table_keeps_the_columns_that_fit_whole(osfl: Osfl, monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    output = osfl("compare --methods ensemble@ensemble=probabilities,local_only --smoke --samples 150 --seeds 0,1 --out runs/w")
    lines = output.out.splitlines()
    assert max(map(len, lines)) <= width
    assert [line for line in lines if "Accuracy" in line and "Own mean" in line and "Up" in line]
    assert ("Msgs" in output.out) == (width == 100)


def test_report_draws_again_and_compares(osfl: Osfl) -> None:
    osfl(COMPARE)
    page = Path("runs/c/fedavg/seed0/report/index.html")
    page.unlink()
    assert "runs/c/report/index.html" in osfl("report runs/c").out and page.exists()
    table = osfl("report 'runs/c/*/seed0' --markdown --out runs/both").out
    assert table.startswith("| Method") and "| fedavg" in table and Path("runs/both/index.html").exists()
    assert osfl("report runs/c/fedavg/seed0 --format json").json["method"] == "fedavg"
    assert set(osfl("report runs/c --format json").json["methods"]) == {"fedavg", "local_only"}
    assert osfl("report runs/c/fedavg/seed0 --out runs/one").code == 0 and Path("runs/one/index.html").exists()
    output = osfl("report runs/c --figures figures --as csv,svg")
    assert f"{len([*Path('figures').rglob('*.*')])} files in figures" in output.out
    assert Path("figures/accuracy-by-method.svg").exists() and Path("figures/fedavg-seed1/confusion-matrix.csv").exists()
    one = osfl("report runs/c/fedavg/seed0 --figures one --as csv --format json").json
    assert "one/confusion-matrix.csv" in one["saved"] and all(Path(path).exists() for path in one["saved"])
    rows = [[float(x) for x in row.split(",")[1:]] for row in Path("one/confusion-matrix.csv").read_text().splitlines()[1:]]
    assert rows == one["scores"]["confusion"]
    output = osfl("report runs/c --figures more --as gif")
    assert output.code == 2 and "svg, png, csv; got gif" in output.err and not Path("more").exists()


def test_predict_names_classes_and_what_it_could_not_read(osfl: Osfl, tmp_path: Path) -> None:
    osfl(f"{RUN} --out runs/a")
    (tmp_path / "images").mkdir()
    for number in range(3):
        Image.new("RGB", (30, 20), (number * 80, 0, 0)).save(tmp_path / "images" / f"{number}.png")
    output = osfl("predict --run runs/a images --format json")
    assert output.code == 0 and len(output.json["predictions"]) == 3
    row = output.json["predictions"][0]
    assert row["class"] in output.json["classes"] and abs(sum(row["probabilities"].values()) - 1) < 1e-3
    rows = list(csv.DictReader(io.StringIO(osfl("predict --run runs/a images --csv").out)))
    assert [row["path"] for row in rows] == ["images/0.png", "images/1.png", "images/2.png"]
    (tmp_path / "bad.png").write_text("not an image")
    output = osfl("predict --run runs/a images/0.png bad.png gone.png")
    assert output.code == 1 and "images/0.png" in output.out
    assert "bad.png: not an image" in output.err and "gone.png: No such file" in output.err


def test_predict_asks_whose_model_where_each_has_its_own(osfl: Osfl) -> None:
    osfl("run --method local_only --clients 3 --partition iid --smoke --samples 150 --out runs/l")
    Image.new("L", (16, 16)).save("dot.png")
    output = osfl("predict --run runs/l dot.png")
    assert output.code == 1 and "--client client-01" in output.err
    assert osfl("predict --run runs/l --client client-02 dot.png").code == 0


def test_check_draws_labels(osfl: Osfl) -> None:
    output = osfl("check --dataset digits --partition silos")
    assert output.code == 0 and "client-10" in output.out and "█" in output.out
    assert "a client without images of a class: 90 × left as it is: the other clients may have some" in output.out
    facts = osfl("check --dataset digits --partition iid --clients 2 --format json").json
    assert sum(map(sum, facts["clients"].values())) == facts["train_images"]
    assert [one["what"] for one in facts["findings"]] == ["a test image that looks like a training image"]


def test_check_finds_bounds_for_what_sites_claim(osfl: Osfl) -> None:
    command = "check --dataset digits --partition iid --clients 2"
    claims = osfl(f"{command} --format json").json["claims"]
    assert claims["allowed"] == {"samples": 10**6, "class_samples": 10**6} and claims["share"] == 0.4
    assert 300 < claims["found"]["samples"] < 800 and claims["closer"] == {k: 2 * n for k, n in claims["found"].items()}
    output = " ".join(osfl(command).out.split())
    assert f"samples = {claims['closer']['samples']}, class_samples = {claims['closer']['class_samples']}" in output


def test_a_site_with_more_images_than_the_plan_allows_is_stopped_before_it_trains(osfl: Osfl) -> None:
    osfl("new --method fedavg --dataset digits --clients a,b --partition iid --smoke --samples 90 --sites sites")
    osfl("keys server a b --out keys")
    text = Path("plan.toml").read_text()
    for limit, most in (("class_samples", 2), ("samples", 20)):
        Path("plan.toml").write_text(re.sub(rf"(?m)^{limit} = 1000000", f"{limit} = {most}", text))
        for command in (
            "check plan.toml --client a --data sites/a",
            "client plan.toml --client a --data sites/a --key keys/a.key --out a.safetensors",
        ):
            output = osfl(command)
            assert output.code == 1 and f"limits.{limit} = " in output.err and not Path("a.safetensors").exists()


def test_check_lists_files_that_cannot_be_used(osfl: Osfl, tmp_path: Path) -> None:
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(20):
            shade = number * 10 + (name == "dog")
            Image.new("L", (16, 16), shade).save(tmp_path / "pets" / name / f"{number}.png")
    (tmp_path / "pets" / "cat" / "broken.png").write_bytes(b"\x89PNG no")
    output = osfl("check --dataset ./pets --partition iid --clients 2")
    assert output.code == 0 and "broken.png" in output.out and "a run can start" in output.out
    problems = osfl("check --dataset ./pets --partition iid --clients 2 --format json").json["findings"]
    assert any("broken.png" in " ".join(problem["examples"]) for problem in problems)


def test_check_of_a_template(osfl: Osfl) -> None:
    osfl("new --method fedavg --classes a,b --clients 2")
    assert "good plan" in osfl("check plan.toml").out
    assert osfl("check plan.toml --format json").json["findings"] == []


@pytest.mark.parametrize("method", ["fedavg", "fedavg_rounds", "centralized", "deepinversion_vit"])
def test_estimated_bytes_are_those_of_the_run(osfl: Osfl, method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osfl.simulate.rehearsal.TARGET", 0.05)
    command = f"--method {method} --clients 3 --partition iid --smoke --samples 150"
    guess = osfl(f"estimate {command} --format json").json
    costs = osfl(f"run {command} --out runs/e --format json").json["costs"]
    assert guess["upload_bytes_total"] == pytest.approx(costs["upload_bytes"], abs=64)
    assert guess["download_bytes_total"] == pytest.approx(costs["download_bytes"], abs=64)
    assert guess["messages_per_client"] == costs["messages_per_client"]
    assert guess["wall_seconds"] > 0 and guess["memory_bytes"] > 1e7
    for phase in ("client", "server", "personalize"):
        assert guess["phases"][phase]["flops"] == pytest.approx(costs["phases"][phase]["flops"], rel=1e-3)
    assert guess["server_flops"] == guess["phases"]["server"]["flops"]


def test_lists(osfl: Osfl) -> None:
    for what in ("methods", "datasets", "architectures", "encoders", "weights", "partitions", "presets"):
        rows = osfl(f"ls {what} --format json").json
        text = osfl(f"ls {what}").out
        assert rows and all(row["description"] for row in rows) and rows[0]["name"] in text
    digits = osfl("ls datasets --format json").json[0]
    assert digits["name"] == "digits" and digits["available"] == "yes" and digits["license"]
    every = {"methods", "datasets", "architectures", "encoders", "weights", "partitions", "presets"}
    assert set(osfl("ls --format json").json) == every
    (signs,) = (row for row in osfl("ls weights --format json").json if row["name"] == "vit_signs")
    assert signs["available"] == "yes" and signs["architecture"] == "vit"


def test_doctor(osfl: Osfl, monkeypatch: pytest.MonkeyPatch) -> None:
    output = osfl("doctor --format json")
    assert output.code == 0 and output.json["ok"]
    assert {"python", "torch", "determinism", "hard links", "disk"} <= {row["name"] for row in output.json["findings"]}
    monkeypatch.setenv("OSFL_DATA", "/nowhere")
    output = osfl("doctor")
    assert output.code == 1 and "FAIL  data" in output.out and "Set OSFL_DATA" in output.out


def test_demo_says_what_it_shows(osfl: Osfl) -> None:
    output = osfl("demo --smoke --out runs/demo")
    assert output.code == 0
    text = " ".join(output.out.split())
    assert "FederatedFactory, whose sites send generators instead, reaches" in text
    assert "FedAvg in one round" in text and "runs/demo/report/index.html" in text and "centralized" in text
    assert "FedMITR's server makes images from the models" in text and "demo/transformers/report/index.html" in text


def test_a_demo_for_scripts_has_both_tables(osfl: Osfl) -> None:
    found = osfl("demo --smoke --out runs/demo --format json").json
    assert "federated_factory" in found["methods"] and "fedmitr" in found["transformers"]["methods"]
    rows = found["transformers"]["methods"].values()
    assert len({row["costs.upload_bytes"]["mean"] for row in rows}) == 3  # nothing; a ViT; a ViT and class counts


def test_ctrl_c_stops_at_once(osfl: Osfl, tmp_path: Path) -> None:
    """A real process and a real signal, while clients train."""
    command = [
        "run",
        "--method",
        "fedavg",
        "--clients",
        "3",
        "--partition",
        "iid",
        "--samples",
        "150",
        "--set",
        "epochs=400",
        "--out",
        "runs/stopped",
    ]
    process = subprocess.Popen([sys.executable, "-m", "osfl", *command], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "runs/stopped/plan.json").exists() and process.poll() is None:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, output = process.communicate(timeout=600)
    assert process.returncode == 130 and "run the same command again" in output
    assert not (tmp_path / "runs/stopped/results.json").exists()


def test_a_class_that_no_client_has_is_reported_and_is_no_error(osfl: Osfl) -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 2], 30)  # and none of class 1
    np.savez("hole.npz", train_images=rng.integers(0, 255, (60, 8, 8), dtype=np.uint8), train_labels=labels)
    output = osfl("run --method fedavg --dataset hole.npz --clients 2 --partition iid --smoke --out here")
    assert output.code == 0, output.err
    assert "no training image of a class: 1 × kept as a class; nothing can be learned about it (1)" in " ".join(
        output.out.split()
    )
