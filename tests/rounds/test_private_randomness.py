"""Private randomness: what the seed still decides, what a site alone can repeat, and what the audit then cannot replay."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path

import torch

from osfl.core.method import Context
from osfl.core.plan import read_plan, write_plan
from osfl.core.types import Payload
from osfl.roles import site
from osfl.rounds.phases import with_secret
from osfl.runtime.machine import Machine
from osfl.runtime.payloads import PayloadCache
from osfl.simulate.audit import Attempt, audit
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation, prepare
from tests.roles.test_roles import keys, make_plan, make_sites

ONE = Machine(workers=1)
PRIVATE = Simulation("fedavg", "digits", 2, "iid", "smoke", samples=120, image_size=8, private_randomness=True)


def drawn(ctx: Context, *labels: str) -> float:
    return float(torch.rand(1, generator=ctx.generator(*labels)))


def test_what_names_a_client_is_secret_and_what_all_share_follows_from_the_seed(tmp_path: Path) -> None:
    plan = prepare(PRIVATE).plan
    public = Context(replace(plan, private_randomness=False), torch.device("cpu"))
    mine, again = (with_secret(Context(plan, torch.device("cpu")), "client-01", tmp_path) for _ in range(2))
    other = with_secret(Context(plan, torch.device("cpu")), "client-01")
    assert drawn(mine, "init", "cnn") == drawn(public, "init", "cnn")
    assert drawn(mine, "local", "client-01") == drawn(again, "local", "client-01")
    assert len({drawn(ctx, "local", "client-01") for ctx in (mine, other, public)}) == 3
    assert stat.S_IMODE((tmp_path / "client-01.secret").stat().st_mode) == 0o600
    assert with_secret(public, "client-01", tmp_path) is public


def test_work_that_was_kept_without_the_secret_is_not_used(tmp_path: Path) -> None:
    kept = PayloadCache(tmp_path / "kept")
    ctx = Context(prepare(PRIVATE).plan, torch.device("cpu"), get_or_compute=kept.get_or_compute)
    made: list[int] = []

    def work() -> Payload:
        made.append(1)
        return Payload({})

    for one in (ctx, with_secret(ctx, "client-01"), with_secret(ctx, "client-01")):
        one.get_or_compute("key", work)
    assert len(made) == 3


def test_a_plan_says_it_and_a_plan_without_it_keeps_its_digest(tmp_path: Path) -> None:
    plan = prepare(PRIVATE).plan
    (tmp_path / "plan.toml").write_text(write_plan(plan), encoding="utf-8")
    assert read_plan(tmp_path / "plan.toml").digest == plan.digest != replace(plan, private_randomness=False).digest
    assert "--private-randomness" in PRIVATE.command("out") and "round" not in replace(plan, private_randomness=False).as_json()


def test_a_site_alone_repeats_its_upload(tmp_path: Path) -> None:
    plan = replace(make_plan("fedavg"), private_randomness=True)
    folder, key = make_sites(tmp_path / "sites") / "north", keys()["north"]
    path = site.make_upload(plan, "north", folder, key, tmp_path / "work", machine=ONE)
    sent = path.read_bytes()
    path.unlink()
    assert site.make_upload(plan, "north", folder, key, tmp_path / "work", machine=ONE).read_bytes() == sent
    assert site.make_upload(plan, "north", folder, key, tmp_path / "elsewhere", machine=ONE).read_bytes() != sent


def test_the_audit_cannot_replay_such_a_site(tmp_path: Path) -> None:
    run(PRIVATE, tmp_path, machine=ONE)
    quick = Attempt(shadows=2, canaries=0, images=10, inversion=1)
    found = audit(tmp_path, prepare(PRIVATE), attempt=quick, machine=ONE)["audit"]
    assert found["replayed"] is False and not any("check the guess" in sentence for sentence in found["verdict"])
