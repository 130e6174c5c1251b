"""The sum that the server keeps: forgetting subtracts one term, joining adds one, and no trace of the forgotten stays in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from osfl.core.errors import Rejected, RoundError
from osfl.core.method import Context, add_up
from osfl.core.types import Total, Upload
from osfl.methods.onesum import OneSum
from osfl.roles import coordinator
from osfl.rounds.folder import TOTAL, Round, existing_round, simulated_key
from osfl.rounds.forgetting import forget, verify
from osfl.rounds.state import read_policy
from osfl.rounds.total import KeptTotal, keep_total, read_total
from osfl.simulate.checks import files_with, never_joined, small_federation, windows_of
from osfl.simulate.run import run_federation
from osfl.simulate.simulation import Federation
from osfl.wire.gate import verify_release, verify_total
from tests.rounds.forgetting.conftest import ABOUT, ONE, failed, real_round


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OSFL_CACHE", str(tmp_path / "cache"))


@contextmanager
def terms_read() -> Iterator[list[str]]:
    """Whose upload is turned into a term."""
    read: list[str] = []
    original = OneSum.term

    def counted(self: OneSum, upload: Upload) -> Total:
        read.append(upload.client)
        return original(self, upload)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(OneSum, "term", counted)
        yield read


def kept(folder: Path, federation: Federation | None = None) -> KeptTotal:
    with existing_round(folder, (federation or small_federation("onesum")).plan) as fl_round:
        found = read_total(fl_round)
    assert found is not None
    return found


def summed_again(fl_round: Round) -> KeptTotal:
    uploads, made_from = fl_round.uploads()
    method = OneSum(fl_round.plan.task, fl_round.plan.settings)
    return KeptTotal(add_up(method, uploads, Context(fl_round.plan, torch.device("cpu"))), made_from)


def same(one: KeptTotal, other: KeptTotal) -> bool:
    pairs = [(value, other.total.tensors[name]) for name, value in one.total.tensors.items()]
    return (one.made_from, one.total.images) == (other.made_from, other.total.images) and all(torch.equal(*p) for p in pairs)


def fresh(folder: Path, federation: Federation | None = None) -> KeptTotal:
    with existing_round(folder, (federation or small_federation("onesum")).plan) as fl_round:
        return summed_again(fl_round)


def test_a_finished_round_keeps_the_sum_of_its_uploads(rounds: Any, tmp_path: Path) -> None:
    folder = rounds("onesum", tmp_path / "round")
    assert same(kept(folder), fresh(folder)) and set(kept(folder).made_from) == {"client-01", "client-02", "client-03"}
    assert (folder / TOTAL).stat().st_mode & 0o077 == 0
    assert not (rounds("ensemble", tmp_path / "other") / TOTAL).exists()
    policy = read_policy(folder)
    with pytest.raises(Rejected, match="another kind of bundle"):
        verify_release(folder / TOTAL, policy.server, policy.plan)
    with pytest.raises(Rejected, match="another kind of bundle"):
        verify_total(folder / "release.safetensors", policy.server, policy.plan)


def test_forgetting_reads_the_term_of_the_forgotten_alone(rounds: Any, tmp_path: Path) -> None:
    even = {"partition": "iid", "clients": 4}  # the term of a site above its share of all images would be read, too
    folder, federation = rounds("onesum", tmp_path / "round", **even), small_federation("onesum", "iid", 4)
    windows = windows_of("client-02", folder)
    old = (folder / TOTAL).read_bytes()
    with terms_read() as read:
        certificate = forget(folder, clients=["client-02"], machine=ONE)
    assert read == ["client-02"]
    assert same(kept(folder, federation), fresh(folder, federation)) and "client-02" not in kept(folder, federation).made_from
    assert certificate["release"]["after"] == never_joined(federation, folder / "inbox", tmp_path / "never")
    assert windows and files_with(windows, folder) == [] and failed(folder) == []
    assert "total" in [finding.check for finding in verify(folder)]
    (folder / "total.old").write_bytes(old)  # the new sum subtracted from it is the forgotten term
    assert failed(folder) == ["bytes"]


def test_a_copy_of_the_old_sum_holds_the_certificate_back(rounds: Any, tmp_path: Path) -> None:
    folder = rounds("onesum", tmp_path / "round")
    (folder / "backup").write_bytes((folder / TOTAL).read_bytes())
    with pytest.raises(RoundError, match="still in backup"):
        forget(folder, clients=["client-02"], machine=ONE)
    (folder / "backup").unlink()
    forget(folder, clients=["client-02"], machine=ONE)
    assert failed(folder) == []


def test_the_old_sum_put_back_is_found_and_not_used(rounds: Any, tmp_path: Path) -> None:
    folder = rounds("onesum", tmp_path / "round")
    old = (folder / TOTAL).read_bytes()
    expected = forget(folder, clients=["client-02"], machine=ONE)["release"]["after"]
    good = (folder / TOTAL).read_bytes()
    (folder / TOTAL).write_bytes(old)
    assert failed(folder) == ["total", "bytes"]
    (folder / "release.safetensors").unlink()
    result = run_federation(small_federation("onesum"), folder, ABOUT, machine=ONE)
    assert result["release_digest"] == expected and (folder / TOTAL).read_bytes() == good and failed(folder) == []


@pytest.mark.parametrize("how", ["a changed byte", "another signature", "another sum, signed"])
def test_a_sum_that_is_not_the_server_s_or_not_the_sum_is_found(rounds: Any, tmp_path: Path, how: str) -> None:
    folder, plan = rounds("onesum", tmp_path / "round"), small_federation("onesum").plan
    forget(folder, clients=["client-03"], machine=ONE)
    with existing_round(folder, plan, simulated_key(plan.seed, "server")) as fl_round:
        right = summed_again(fl_round)
        if how == "a changed byte":
            data = bytearray((folder / TOTAL).read_bytes())
            data[-1] ^= 1
            (folder / TOTAL).write_bytes(data)
        elif how == "another signature":
            keep_total(replace(fl_round, server_key=simulated_key(7, "server")), right)
        else:
            more = {**right.total.tensors, "counts": right.total.tensors["counts"] + 1}
            keep_total(fl_round, replace(right, total=replace(right.total, tensors=more)))
    assert failed(folder) == ["total"]
    if how != "another sum, signed":  # the server does not believe it either, and adds up again
        forget(folder, clients=["client-02"], machine=ONE)
        assert same(kept(folder), fresh(folder)) and failed(folder) == []


def test_a_sum_of_another_upload_is_dropped_and_made_again(rounds: Any, tmp_path: Path) -> None:
    folder = rounds("onesum", tmp_path / "round")
    with terms_read() as read, pytest.MonkeyPatch.context() as patched:
        patched.setattr("osfl.rounds.forgetting.execution.read_total", _wrong_origin)
        forget(folder, clients=["client-02"], machine=ONE)
    assert {"client-01", "client-03"} == set(read)
    assert same(kept(folder), fresh(folder)) and failed(folder) == []


def _wrong_origin(fl_round: Round) -> KeptTotal | None:
    """A sum that was made of another upload of this client."""
    found = read_total(fl_round)
    return found and replace(found, made_from={**found.made_from, "client-02": "0" * 64})


def test_a_class_is_taken_out_of_the_sum_too(tmp_path: Path) -> None:
    federation = small_federation("onesum")
    plan = replace(federation.plan, settings=replace(federation.plan.settings, by_class=True, head="qda"))
    federation, folder = replace(federation, plan=plan), tmp_path / "round"
    run_federation(federation, folder, ABOUT, machine=ONE)
    label = int(kept(folder, federation).total.tensors["counts"].argmax())
    certificate = forget(folder, class_name=str(label), machine=ONE)
    left = kept(folder, federation)
    assert certificate["uploads"] and not left.total.tensors["counts"][label] and same(left, fresh(folder, federation))
    assert failed(folder) == []


def test_who_joins_late_adds_one_term(tmp_path: Path) -> None:
    fl_round, known, bundles = real_round(tmp_path, deliver=("north", "south"), method="onesum", quorum=1, late=True)
    coordinator.make_release(fl_round, known["server"], machine=ONE)
    coordinator.receive(fl_round, bundles["west"])
    with terms_read() as read:
        coordinator.make_release(fl_round, known["server"], machine=ONE)
    assert read == ["west"]


def test_where_nothing_is_left_no_sum_is_kept(rounds: Any, tmp_path: Path) -> None:
    folder = rounds("onesum", tmp_path / "round")
    everybody = list(read_policy(folder).enrolled)
    forget(folder, clients=everybody, withdraw=True, machine=ONE)
    assert not (folder / TOTAL).exists() and failed(folder) == []
