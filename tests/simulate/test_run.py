"""A run from options to report, and what a round folder promises."""

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch

import osfl
from osfl.core.errors import RoundError, UsageError
from osfl.core.result import read_result
from osfl.core.types import Payload
from osfl.evaluation.scores import probabilities
from osfl.rounds.finished import load_model
from osfl.runtime.environment import device_named
from osfl.runtime.machine import Machine
from osfl.runtime.meter import book, measure
from osfl.runtime.payloads import PayloadCache, from_raw, load_payload, payload_digest, save_payload, to_raw
from osfl.runtime.workers import Workers, default_workers
from osfl.simulate.compare import compare
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation, for_methods, prepare

SMALL = Simulation("fedavg", "digits", 3, "dirichlet:0.5", "smoke", samples=120, image_size=8)
CONTRACT = (
    "method",
    "scores.global.accuracy",
    "scores.global.auroc",
    "scores.clients.own.mean",
    "scores.clients.own.values",
    "costs.upload_bytes",
    "costs.download_bytes",
    "costs.client_seconds",
    "costs.server_seconds",
    "release_digest",
    "settings",
    "deviations",
    "environment",
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "fedavg"
    run(SMALL, folder)
    return folder


def value(result: object, path: str) -> object:
    for key in path.split("."):
        result = result[key]  # type: ignore[index]
    return result


@pytest.mark.parametrize("path", CONTRACT)
def test_results_keep_the_contract_with_scripts(finished: Path, path: str) -> None:
    assert value(read_result(finished), path) is not None


def test_the_folder_is_the_state(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert {
        "plan.json",
        "contract.json",
        "enrolled.json",
        "inbox",
        "journal.jsonl",
        "release.safetensors",
        "results.json",
        "report",
        "model_card.md",
    } <= names
    assert "scratch" not in names
    assert (finished / "report" / "index.html").stat().st_size > 10_000


def test_bytes_are_those_of_the_files(finished: Path) -> None:
    result = read_result(finished)
    uploads = {path.stem: path.stat().st_size for path in (finished / "inbox").glob("*.safetensors")}
    assert result["costs"]["upload_bytes_by_client"] == uploads
    assert result["costs"]["upload_bytes"] == sum(uploads.values())
    assert result["costs"]["download_bytes"] == 3 * (finished / "release.safetensors").stat().st_size


def test_a_finished_round_is_not_repeated(finished: Path) -> None:
    before = (finished / "results.json").stat().st_mtime_ns
    assert run(SMALL, finished)["release_digest"] == read_result(finished)["release_digest"]
    assert (finished / "results.json").stat().st_mtime_ns == before


def test_another_round_is_refused_and_says_what_differs(finished: Path) -> None:
    with pytest.raises(RoundError, match=r"seed \(0 there, 1 now\)"):
        run(Simulation("fedavg", "digits", 3, "dirichlet:0.5", "smoke", 1, samples=120, image_size=8), finished)


def test_two_processes_cannot_share_a_round(finished: Path) -> None:
    """The second is told, at once."""
    seen: list[BaseException] = []
    inside, leave = threading.Event(), threading.Event()

    def stay(what: str, done: int, total: int) -> None:
        inside.set()
        leave.wait(600)

    first = threading.Thread(target=lambda: run(SMALL, finished.parent / "shared", progress=stay))
    first.start()
    assert inside.wait(600)
    try:
        run(SMALL, finished.parent / "shared")
    except RoundError as error:
        seen.append(error)
    leave.set()
    first.join()
    assert "another process" in str(seen[0])


def test_a_changed_release_is_refused(finished: Path, tmp_path: Path) -> None:
    run(SMALL, tmp_path / "run")
    path = tmp_path / "run" / "release.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(osfl.core.errors.OsflError):
        load_model(tmp_path / "run")


def test_the_model_answers_as_it_was_scored(finished: Path) -> None:
    federation = prepare(SMALL)
    model, task = load_model(finished)
    found = probabilities(model, federation.test.images, torch.device("cpu"), Workers(1).map).argmax(1)
    accuracy = float((found == federation.test.labels.numpy()).mean())
    assert accuracy == read_result(finished)["scores"]["global"]["accuracy"]
    assert task.classes == tuple("0123456789")


def test_personal_models_need_a_name(tmp_path: Path) -> None:
    run(Simulation("local_only", "digits", 2, "iid", "smoke", samples=60, image_size=8), tmp_path / "run")
    with pytest.raises(RoundError, match="client-01 or client-02"):
        load_model(tmp_path / "run")
    assert load_model(tmp_path / "run", "client-02")[1].image == (1, 8, 8)


def test_compare_trains_each_client_model_once(tmp_path: Path) -> None:
    methods = ["fedavg", "ensemble", "ensemble@ensemble=class_count", "local_only"]
    comparison = compare(SMALL, methods, [0, 1], tmp_path / "out")
    assert len(list((tmp_path / "out" / "cache").glob("*.safetensors"))) == 3 * 2  # clients x seeds
    assert set(comparison["methods"]) == set(methods)
    for method in methods:
        assert comparison["methods"][method]["scores.global.accuracy"]["n"] == 2
        assert (tmp_path / "out" / method / "seed1" / "results.json").exists()
    spent = [read_result(tmp_path / "out" / m / "seed0")["costs"]["phases"]["client"]["flops"] for m in ("fedavg", "ensemble")]
    assert spent[0] == spent[1] > 0  # a shared model costs each method what it cost
    assert json.loads((tmp_path / "out" / "comparison.json").read_text())["methods"].keys() == comparison["methods"].keys()
    assert "--methods fedavg,ensemble,ensemble@ensemble=class_count,local_only" in comparison["command"]
    assert "--seeds 0,1" in comparison["command"]


def test_compare_gives_a_setting_to_all_that_have_it() -> None:
    varied = for_methods(Simulation("x", changes={"architecture": "cnn-w4", "rounds": "3"}), ["fedavg", "fedavg_rounds"])
    assert varied[0].changes == {"architecture": "cnn-w4"}
    assert varied[1].changes == {"architecture": "cnn-w4", "rounds": "3"}
    with pytest.raises(UsageError, match=r"none of these methods has a setting 'roundz'.*rounds"):
        for_methods(Simulation("x", changes={"roundz": "3"}), ["fedavg", "fedavg_rounds"])


def test_what_was_lost_is_drawn_again(finished: Path) -> None:
    before = read_result(finished)["release_digest"]
    (finished / "report" / "index.html").unlink()
    (finished / "model_card.md").unlink()
    (finished / "scratch").mkdir()
    assert run(SMALL, finished)["release_digest"] == before
    assert (finished / "report" / "index.html").exists() and (finished / "model_card.md").exists()
    assert not (finished / "scratch").exists()


def test_one_model_for_all_is_not_called_personal(finished: Path, tmp_path: Path) -> None:
    assert read_result(finished)["scores"]["personalized"] is False
    alone = run(Simulation("local_only", "digits", 1, "iid", "smoke", samples=60, image_size=8), tmp_path / "alone")
    assert alone["scores"]["personalized"] is True


def test_every_phase_counts_its_operations(finished: Path) -> None:
    phases = read_result(finished)["costs"]["phases"]
    assert phases["client"]["flops"] > 0 and phases["evaluate"]["flops"] > 0


def test_damaged_files_of_a_round_are_named(tmp_path: Path) -> None:
    run(SMALL, tmp_path / "run")
    (tmp_path / "run" / "plan.json").write_text('{"version": ')
    for again in (lambda: run(SMALL, tmp_path / "run"), lambda: load_model(tmp_path / "run")):
        with pytest.raises(RoundError, match=r"plan\.json is damaged"):
            again()


def test_a_client_that_took_no_part_has_no_model(finished: Path) -> None:
    with pytest.raises(RoundError, match="took no part"):
        load_model(finished, "nobody")


def test_diverged_training_is_a_sentence(tmp_path: Path) -> None:
    wild = Simulation("fedavg", "digits", 2, "iid", "smoke", changes={"lr": "1e30", "clip": "0"}, samples=60, image_size=8)
    with pytest.raises(osfl.core.errors.OsflError, match=r"not finite"):
        run(wild, tmp_path / "run")


def test_the_front_door_stays_open(tmp_path: Path) -> None:
    """`osfl.run` is a plain function: the first time, the second time, and after importing osfl.simulate.run."""
    code = (
        "import osfl, sys; s = osfl.Simulation('fedavg', 'digits', 2, 'iid', 'smoke', samples=40, image_size=8); "
        "first = osfl.run(s, sys.argv[1]); import osfl.simulate.run; again = osfl.run(s, sys.argv[1]); "
        "assert first['release_digest'] == again['release_digest']; assert 'fedavg' in osfl.method_names(); "
        "osfl.load_model(sys.argv[1]); osfl.Plan; osfl.Task; osfl.compare"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "run")], check=True)


def test_the_command_names_what_changes_bits() -> None:
    assert Machine(device="cuda", threads=4).options() == " --device cuda --threads 4" and Machine().options() == ""
    assert Machine(engine="ray", precision="bf16").options() == " --precision bf16 --engine ray"


def test_the_command_repeats_the_run(finished: Path) -> None:
    command = read_result(finished)["command"]
    for arguments in ("--method fedavg", "--clients 3", "--partition dirichlet:0.5", "--preset smoke", "--samples 120"):
        assert arguments in command


def test_a_domain_partition_scores_each_client_on_its_own_domain(tmp_path: Path) -> None:
    from PIL import Image

    rng = torch.Generator().manual_seed(0)
    for domain in ("north", "south"):
        for c, name in enumerate(("cat", "dog")):
            (tmp_path / "data" / domain / name).mkdir(parents=True)
            for i in range(12):
                pixels = torch.randint(0, 60, (8, 8), generator=rng, dtype=torch.uint8) + c * 150
                Image.fromarray(pixels.numpy()).save(tmp_path / "data" / domain / name / f"{i}.png")
    arguments = Simulation("fedavg", str(tmp_path / "data"), None, "domains", "smoke", image_size=8)
    result = run(arguments, tmp_path / "run")
    assert set(result["scores"]["clients"]["own"]["values"]) == {"north", "south"}


def test_a_domain_without_test_images_is_refused_before_training(tmp_path: Path) -> None:
    from PIL import Image

    lines = ["path,label,split,domain"]
    for i in range(24):
        Image.new("L", (8, 8), i * 10).save(tmp_path / f"{i}.png")
        lines.append(f"{i}.png,{'xy'[i % 2]},{'train' if i < 18 else 'test'},{'north' if i % 4 < 2 or i >= 18 else 'south'}")
    (tmp_path / "table.csv").write_text("\n".join(lines))
    with pytest.raises(osfl.core.errors.DataError, match="no test images of the domain"):
        prepare(Simulation("fedavg", str(tmp_path / "table.csv"), None, "domains", "smoke", image_size=8))


def test_smoke_on_a_gpu_that_is_not_there_is_a_clear_error(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    with pytest.raises(UsageError, match="no usable cuda device"):
        run(SMALL, tmp_path / "run", machine=Machine(device="cuda"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cuda:2", r"no device 'cuda:2': it has 2 of kind cuda.*Use --device cuda:1 or a lower number"),
        ("cpu:1", "it has 1 of kind cpu"),
        ("xpu", "there is no device 'xpu'"),
        ("meta", "there is no device 'meta'"),
        ("cuda:", "there is no device 'cuda:'"),
    ],
)
def test_a_device_that_is_not_there_is_refused(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert device_named("cuda:1") == torch.device("cuda:1") and device_named("cuda") == torch.device("cuda")
    with pytest.raises(UsageError, match=f"(?s){message}"):
        device_named(name)


# --- storage and workers ---------------------------------------------------------------------------------------------


def test_tensors_survive_the_way_to_bytes_and_back() -> None:
    tensors = {
        "f": torch.randn(2, 3),
        "h": torch.randn(4).half(),
        "b": torch.randn(2).bfloat16(),
        "i": torch.arange(3),
        "u": torch.arange(5, dtype=torch.uint8),
        "t": torch.tensor([True, False]),
        "s": torch.tensor(3.5),
        "e": torch.zeros(0, 4),
        "n": torch.randn(4, 4).t(),
    }
    back = from_raw(to_raw(tensors))
    assert all(torch.equal(back[name], tensor) and back[name].dtype == tensor.dtype for name, tensor in tensors.items())


def test_a_payload_file_is_whole_or_absent(tmp_path: Path) -> None:
    payload = Payload({"w": torch.randn(3)}, {"rounds": 2})
    save_payload(tmp_path / "deep" / "x.safetensors", payload)
    kept = load_payload(tmp_path / "deep" / "x.safetensors")
    assert kept is not None and payload_digest(kept) == payload_digest(payload)
    (tmp_path / "deep" / "x.safetensors").write_bytes(b"torn")
    assert load_payload(tmp_path / "deep" / "x.safetensors") is None
    assert load_payload(tmp_path / "nothing") is None


def test_a_shelf_makes_things_once(tmp_path: Path) -> None:
    made: list[int] = []

    def make() -> Payload:
        made.append(1)
        book(1000.0)
        return Payload({"w": torch.ones(1)}, {"a": 1})

    assert dict(PayloadCache(tmp_path).get_or_compute({"what": "x"}, make).facts) == {"a": 1}
    with measure() as meter:
        assert dict(PayloadCache(tmp_path).get_or_compute({"what": "x"}, make).facts) == {"a": 1}
    assert meter.seconds > 999  # the second user pays what the first one did
    PayloadCache(tmp_path).get_or_compute({"what": "y"}, make)
    assert len(made) == 2


def test_workers_keep_the_order_and_raise_the_first_failure() -> None:
    assert Workers(2).map(lambda x: x * x, range(5)) == [0, 1, 4, 9, 16]
    assert default_workers() >= 1

    def fail(x: int) -> int:
        if x == 3:
            raise ValueError("three")
        return x

    with pytest.raises(ValueError, match="three"):
        Workers(2).map(fail, range(6))


def test_workers_compute_with_one_thread_each_and_restore() -> None:
    before = torch.get_num_threads()
    assert set(Workers(2).map(lambda _: torch.get_num_threads(), range(4))) == {1}
    assert torch.get_num_threads() == before
