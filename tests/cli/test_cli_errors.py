"""Messages name what is wrong, what was expected and what to do; several mistakes come in one message."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from osfl.core.plan import read_plan
from tests.cli.conftest import Osfl

# name: (command, exit code, pieces of the message)
MISTAKES: dict[str, tuple[str, int, tuple[str, ...]]] = {
    "unknown verb": ("rum", 2, ("No such command 'rum'", "Did you mean", "'run'", "See `osfl --help`")),
    "unknown option before the verb": ("--forma json run", 2, ("No such option", "--forma")),
    "unknown option": ("run --clinets 3", 2, ("No such option", "--clinets", "--clients", "See `osfl run --help`")),
    "not a number": ("run --method fedavg --clients many", 2, ("--clients", "integer")),
    "no clients": ("run --method fedavg --clients 0", 2, ("--clients", "1")),
    "no workers": ("run --method fedavg --workers 0", 2, ("--workers", "1")),
    "unknown format": ("run --method fedavg --format xml", 2, ("--format", "'xml' is not one of 'text', 'json'")),
    "unknown list": ("ls method", 2, ("'method' is not one of", "'methods'")),
    "no method": ("compare --methods ,", 2, ("--methods names none", "osfl ls methods")),
    "unknown method": ("run --method fedavgg", 2, ("no method 'fedavgg'", "Did you mean 'fedavg'", "Known methods")),
    "unknown preset": ("run --method fedavg --preset cpux", 2, ("no preset 'cpux'", "'cpu'", "Presets: paper")),
    "unknown partition": ("run --method fedavg --partition skewed", 2, ("'skewed' is not", "Examples: iid")),
    "partition without number": ("run --method fedavg -p dirichlet", 2, ("'dirichlet'", "takes one number")),
    "partition below zero": ("run --method fedavg -p dirichlet:-1", 2, ("above 0", "'-1'")),
    "set without value": ("run --method fedavg --set epochs", 2, ("--set 'epochs'", "expected key=value")),
    "unknown setting": ("run --method fedavg --set epoch=2", 2, ("no setting 'epoch'", "'epochs'", "Settings:")),
    "setting of another kind": ("run --method fedavg --set epochs=two", 2, ("'epochs'", "expected int", "'two'")),
    "setting out of a choice": ("run --method fedavg --set optimizer=lion", 2, ("'optimizer'", "'lion'", "sgd, adam")),
    "setting out of range": ("run --method fedavg --smoke --set epochs=0", 2, ("'epochs'", "at least 1", "got 0")),
    "unknown dataset": ("run --method fedavg --dataset digit", 2, ("no dataset 'digit'", "digits", "osfl ls datasets")),
    "missing file": ("run --method fedavg --dataset ./no.npz", 2, ("./no.npz",)),
    "unknown device": ("run --method fedavg --device tpu9", 2, ("no device 'tpu9'", "cpu, cuda")),
    "tiny images": ("run --method fedavg --image-size 2", 2, ("image size 2", "between 4 and 1024")),
    "two channels": ("run --method fedavg --channels 2", 2, ("2 channels", "1 is gray, 3 is RGB")),
    "unknown architecture": ("run --method fedavg --set architecture=resnt18", 2, ("'resnt18'", "resnet18")),
    "silos of another number": ("run -m fedavg -p silos -n 3", 2, ("3 clients do not fit 10 classes", "--clients 10")),
    "no domains": ("run -m fedavg -p domains", 2, ("no domains", "domain/class/*")),
    "too many classes": ("run -m fedavg -p classes:11", 2, ("classes:11", "10 classes")),
    "too many clients": ("run -m fedavg -p iid -n 5000", 1, ("1346 training images", "5000 clients", "fewer clients")),
    "plan and method": ("run --plan plan.toml --method fedavg", 2, ("--plan", "contradict")),
    "no plan": ("run --plan plan.toml", 2, ("no plan at plan.toml", "osfl new")),
    "seeds": ("compare --methods fedavg --seeds a,b", 2, ("--seeds 'a,b'", "whole numbers", "0,1,2")),
    "method twice": ("compare --methods fedavg,fedavg", 2, ("fedavg is named twice", "once")),
    "one of several methods": ("compare --methods fedavg,ensembl", 2, ("'ensembl'", "'ensemble'")),
    "a setting that none has": ("compare --methods fedavg,ensemble --set epoks=1", 2, ("'epoks'",)),
    "nothing to report": ("report nowhere", 1, ("no finished run in nowhere", "results.json", "osfl run")),
    "predict without run": ("predict dot.png", 2, ("Missing option '--run'",)),
    "predict from nothing": ("predict --run nowhere dot.png", 1, ("nowhere holds no finished", "osfl run", "osfl personalize")),
    "check of no plan": ("check plan.toml", 1, ("no plan at plan.toml", "osfl new")),
    "template and dataset": ("new --method fedavg --dataset digits --classes a,b", 2, ("--classes", "names its classes")),
    "out is empty": ("run --method fedavg --out ''", 2, ("--out", "empty", "runs/first")),
    "show of a file": ("show afile", 1, ("afile is no folder", "osfl enroll")),
    "show of nothing": ("show nowhere", 1, ("nowhere/plan.json is missing", "no folder nowhere: check the path")),
    "show of another folder": ("show data", 1, ("data/plan.json is missing", "not a whole round folder", "osfl enroll")),
    "doctor of a file": ("doctor --out afile", 2, ("--out", "afile is a file")),
    "out is a file": ("run --method fedavg --smoke --out afile", 2, ("--out", "afile is a file")),
    "out in a file": ("run --method fedavg --smoke --out afile/a/b", 2, ("--out", "afile is not a folder")),
    "comparison in a file": ("compare --methods fedavg --smoke --out afile", 2, ("--out", "afile is a file")),
    "demo in a file": ("demo --smoke --out afile", 2, ("--out", "afile is a file")),
    "report in a file": ("report data --out afile", 2, ("--out", "afile is a file")),
    "new plan in a file": ("new --method fedavg --out afile/x.toml", 2, ("--out", "afile is not a folder")),
    "new plan is a folder": ("new --method fedavg --out data --force", 2, ("--out", "data is a folder", "data/plan.toml")),
    "plan is a folder": ("run --plan data", 2, ("data cannot be read", "Is a directory", "plan.toml")),
    "checked plan is a folder": ("check data", 1, ("data cannot be read", "Is a directory")),
    "plan and options": (
        "run --plan plan.toml -n 3 --seed 1 --smoke --samples 9 --test-samples 9 -p iid --evaluate-on test",
        2,
        (
            "contradict",
            "--clients",
            "--seed",
            "--smoke",
            "--samples",
            "--test-samples",
            "--partition",
            "--evaluate-on",
        ),
    ),
    "checked plan and options": ("check plan.toml --clients 3", 2, ("contradict", "--clients")),
    "variant without value": (
        "compare --methods fedavg,ensemble@ensemble",
        2,
        ("'ensemble@ensemble'", "key=value", "ensemble@ensemble=size"),
    ),
    "variant of nothing": ("compare --methods ensemble@ --smoke", 2, ("'ensemble@'", "key=value")),
    "one class": ("new --method fedavg --classes a", 2, ("at least 2 classes", "got 1")),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_a_message(osfl: Osfl, name: str) -> None:
    command, code, pieces = MISTAKES[name]
    Path("afile").touch()
    result = osfl(command)
    assert result.code == code
    assert result.out == ""
    text = " ".join(result.err.split())
    assert "Traceback" not in text
    assert [piece for piece in pieces if piece not in text] == [], text


@pytest.mark.parametrize("name", MISTAKES)
def test_the_same_for_scripts(osfl: Osfl, name: str) -> None:
    command, code, pieces = MISTAKES[name]
    if "--format" in command:
        pytest.skip("says another format itself")
    Path("afile").touch()
    result = osfl(f"{command} --format json")
    assert result.code == code
    assert result.json["error"] and result.json["reason"]
    assert pieces[0] in " ".join(map(str, result.json.values()))


def test_all_mistakes_at_once(osfl: Osfl) -> None:
    result = osfl("run --method fedavgg -p skewed --set epochs --preset fast --dataset digit --device tpu9 --channels 7")
    assert result.code == 2
    for piece in ("'fedavgg'", "'skewed'", "--set 'epochs'", "'fast'", "'digit'", "'tpu9'", "7 channels"):
        assert piece in result.err
    assert result.err.count("\n  - ") == 7


def test_all_mistakes_of_a_comparison_before_it_starts(osfl: Osfl) -> None:
    result = osfl("compare --methods fedavg,fedavg_rounds --smoke --seeds x --set epochs=0 --out runs/c")
    assert result.code == 2 and "--seeds 'x'" in result.err
    result = osfl("compare --methods fedavg,fedavg_rounds --smoke --set epochs=0 --set rounds=0 --out runs/c")
    assert result.code == 2 and "'epochs'" in result.err and "'rounds'" in result.err
    assert not Path("runs/c/fedavg").exists()


def test_a_plan_of_open_sums_says_what_protects_small_sites(osfl: Osfl) -> None:
    real = "new --classes a,b --clients 2 --image-size 8 --out plan.toml --force"
    assert "--secure-sum" in osfl(f"{real} --method onesum").out
    for closed in ("--method onesum --secure-sum", "--method onesum --epsilon 8 --delta 1e-5", "--method fedavg"):
        done = osfl(f"{real} {closed}")
        assert done.code == 0 and "--secure-sum" not in done.out


@pytest.mark.parametrize("method", ["onesum", "fedcgs"])
def test_a_plan_for_three_real_sites_has_a_secure_sum_and_says_what_it_costs(osfl: Osfl, method: str) -> None:
    real = f"new --method {method} --smoke --classes a,b --clients north,south,west --image-size 8 --out plan.toml --force"
    for command, masked in (
        (real, True),
        (f"{real} --open-sum", False),
        (f"{real} --set readable=send", False),
        (f"{real} --quorum 1", False),  # what only one site added is that site's upload
        (f"{real} --quorum 2", False),  # in a sum of two, each knows the other's part
        (f"{real} --quorum 3", True),
        (f"new --method {method} --smoke --dataset digits --clients 3 --out plan.toml --force", False),  # a simulation
        (
            f"new --method {method} --smoke --dataset digits --clients a,b,c --samples 90 --sites s --out plan.toml --force",
            True,
        ),
    ):
        done = osfl(command)
        plan = read_plan(Path("plan.toml"))
        text = Path("plan.toml").read_text()
        assert done.code == 0 and plan.secure_sum is masked, command
        assert (plan.limits.share == 1) is masked and ("# Why: whoever reads open sums" in text) is masked
        assert ("secure_sum = true" in done.out) is masked


def test_a_plan_that_cannot_have_a_secure_sum_keeps_open_ones(osfl: Osfl) -> None:
    real = "new --method onesum --smoke --classes a,b --clients north,south,west --image-size 8 --out plan.toml --force"
    for more in ("--topology mesh", "--set send=smaller", "--epsilon 8 --delta 1e-5"):
        assert osfl(f"{real} {more}").code == 0 and not read_plan(Path("plan.toml")).secure_sum, more
    assert osfl(f"{real} --secure-sum --set send=smaller").code == 2  # who asks for it is told why not


def test_all_mistakes_of_a_plan(osfl: Osfl) -> None:
    assert osfl("new --method fedavg --classes a,b --clients 2").code == 0
    plan = Path("plan.toml")
    broken = plan.read_text().replace("epochs = 20", 'epochs = "many"').replace("clip = ", "clop = ")
    plan.write_text(broken)
    result = osfl("check plan.toml")
    assert result.code == 1
    assert "'many'" in result.err and "'clop'" in result.err and "'clip'" in result.err


def test_a_plan_is_not_overwritten(osfl: Osfl) -> None:
    assert osfl("new --method fedavg").code == 0
    result = osfl("new --method fedavg")
    assert result.code == 2 and "plan.toml exists" in result.err and "--force" in result.err
    assert osfl("new --method ensemble --force").code == 0


# what the file system answers: (errno, piece of the remedy)
REFUSALS = {
    "not ours": (errno.EACCES, "yours to write"),
    "read-only": (errno.EROFS, "yours to write"),
    "in the way": (errno.EEXIST, "move away"),
    "not a folder": (errno.ENOTDIR, "move away"),
    "a folder": (errno.EISDIR, "move away"),
    "full": (errno.ENOSPC, "Free some disk space"),
    "without locks": (errno.ENOLCK, "no locks"),
    "broken": (errno.EIO, "drive failed"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_file_system_that_says_no_is_a_message(osfl: Osfl, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number, remedy = REFUSALS[name]

    def refuses(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), "runs/there")

    monkeypatch.setattr("osfl.simulate.run.run", refuses)
    result = osfl("run --method fedavg --smoke")
    assert result.code == 1 and f"runs/there: {os.strerror(number)}." in result.err and remedy in result.err
    assert osfl("run --method fedavg --smoke --format json").json["error"] == "FilesError"


def test_a_full_disk_need_not_name_a_file(osfl: Osfl, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("osfl.simulate.run.run", full)
    result = osfl("run --method fedavg --smoke")
    assert result.code == 1 and "No space left" in result.err and "None" not in result.err


def test_other_errors_of_the_system_are_ours(osfl: Osfl, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgets(*_: object, **__: object) -> None:
        raise FileNotFoundError(errno.ENOENT, "No such file", "a file of ours")

    monkeypatch.setattr("osfl.simulate.run.run", forgets)
    with pytest.raises(FileNotFoundError):
        osfl("run --method fedavg --smoke")


# architectures are checked before anything is trained: (command, pieces)
ARCHITECTURES = {
    "unknown": ("local_only --set architecture=nonsense", ("'nonsense'", "Known: cnn")),
    "unknown for one": ("ensemble --set 'architecture=client-01:cnn-w4,*:resnt18'", ("'resnt18'", "resnet18")),
    "no rule for others": ("local_only --set architecture=client-01:cnn-w4", ("no rule for clients", ",*:cnn-w4")),
    "too small": ("local_only --set 'architecture=client-01:vit-p5,*:cnn'", ("patch 5 does not divide", "-p4")),
    "averaged": ("fedavg --set 'architecture=client-01:cnn,*:cnn'", ("averaging", "one name such as 'cnn'")),
    "many rounds": ("fedavg_rounds --set 'architecture=client-01:cnn,*:cnn-w4'", ("rounds", "one name such as 'cnn'")),
    "pooled": ("centralized --set 'architecture=client-01:cnn,*:cnn-w4'", ("one model", "one name such as 'cnn'")),
    "scaffold, too": ("scaffold --set architecture=nonsense", ("'nonsense'", "Known: cnn")),
    "the server's": ("dense --set student=resnt18", ("'student'", "'resnt18'", "resnet18")),
    "inherited": ("dense --set architecture=nonsense", ("'nonsense'", "Known: cnn")),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_are_checked_before_training(osfl: Osfl, name: str) -> None:
    command, pieces = ARCHITECTURES[name]
    result = osfl(f"check --smoke --method {command}")
    assert result.code == 2 and [piece for piece in pieces if piece not in result.err] == [], result.err


def test_clients_may_have_their_own_architectures(osfl: Osfl) -> None:
    assert osfl("check --smoke --method local_only --set 'architecture=client-01:cnn-w8,*:cnn-w4'").code == 0


def test_settings_that_make_no_sense_for_a_method(osfl: Osfl) -> None:
    assert "'mu': expected at least 0, got -1.0" in osfl("check --smoke --method fedprox --set mu=-1").err
    result = osfl("check --smoke --method scaffold --set lr_floor=0 --set optimizer=adam")
    assert "'lr_floor': expected above 0" in result.err and "assume 'sgd', got 'adam'" in result.err
    assert osfl("check --smoke --method scaffold --set momentum=0.9").code == 0


def test_half_a_comparison_is_named(osfl: Osfl) -> None:
    Path("c").mkdir()
    for text in ('{"runs": [{"pa', "{}", "[]", '{"runs": [{"path": "fedavg/seed0"}]}'):
        Path("c/comparison.json").write_text(text)
        result = osfl("report c")
        assert result.code == 1 and "c/comparison.json is not a comparison" in result.err and "osfl compare" in result.err


def test_our_own_mistakes_show_a_traceback(osfl: Osfl, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("osfl.simulate.run.run", broken)
    with pytest.raises(ZeroDivisionError):
        osfl("run --method fedavg --smoke")


def test_ctrl_c_says_how_to_continue(osfl: Osfl, monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("osfl.simulate.run.run", stopped)
    result = osfl("run --method fedavg --smoke")
    assert result.code == 130 and "run the same command again" in result.err
    assert osfl("run --method fedavg --smoke --format json").json["error"] == "Interrupted"


def test_windows_is_answered_in_one_sentence(osfl: Osfl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("osfl.cli.main.sys.platform", "win32")
    result = osfl("ls methods")
    assert result.code == 1 and "(WSL 2)" in result.err and "Traceback" not in result.err


@pytest.mark.parametrize(("system", "verdict"), [("linux", "PASS"), ("darwin", "NOTE")])
def test_doctor_says_what_is_weaker_elsewhere(monkeypatch: pytest.MonkeyPatch, system: str, verdict: str) -> None:
    from osfl.cli.doctor import _system

    monkeypatch.setattr("osfl.cli.doctor.sys.platform", system)
    assert _system().verdict == verdict
