"""A round of OneSum with the plan that `osfl new` writes for real sites: masked uploads, and what the rehearsal gives."""

from __future__ import annotations

from pathlib import Path

from safetensors.numpy import load_file

from osfl.core.plan import read_plan
from tests.cli.conftest import Osfl

SITES = ("north", "south", "west")


def test_a_folder_that_is_no_round_is_refused_before_anything_is_written(osfl: Osfl) -> None:
    assert osfl("keys server --out keys").code == 0
    Path("empty").mkdir()
    for folder, why in (("nowhere", "There is no folder nowhere"), ("empty", "This is not a whole round folder")):
        refused = osfl(f"server {folder} --key keys/server.key --without-missing")
        assert refused.code == 1 and why in refused.err and "Traceback" not in refused.err
    assert not list(Path("empty").iterdir()) and not Path("nowhere").exists()


def test_the_plan_of_three_real_sites_runs_to_the_model_of_its_rehearsal(osfl: Osfl) -> None:
    data = f"--dataset digits --clients {','.join(SITES)} --partition iid --samples 150 --smoke --sites sites"
    client = "client plan.toml --client {0} --data sites/{0} --key keys/{0}.key --keys keys --out usb/{0}.safetensors"
    for command in (
        f"new --method onesum {data}",
        "check plan.toml --data sites/north --client north",
        f"keys server {' '.join(SITES)} --out keys",
        "enroll plan.toml --keys keys --out round",
        *map(client.format, SITES),
        "receive round usb",
        "server round --key keys/server.key",
        "run --plan plan.toml --sites sites --out rehearsal",
    ):
        done = osfl(command)
        assert done.code == 0, (command, done.err)
    assert read_plan(Path("plan.toml")).secure_sum
    real, rehearsed = (load_file(f"{folder}/release.safetensors") for folder in ("round", "rehearsal"))
    assert real.keys() == rehearsed.keys() and all((real[name] == rehearsed[name]).all() for name in real)
    contents = [
        osfl(f"{command} --format json").json for command in ("show round", "verify --round round", "verify --round rehearsal")
    ]
    released = [one for found in contents[1:] for one in found["files"] if one["kind"] == "release"]
    assert len({contents[0]["content"], *(one["content"] for one in released)}) == 1
    assert released[0]["digest"] != released[1]["digest"]
    personal = "personalize plan.toml --client north --release round/release.safetensors --server keys/server.pub --out model"
    assert osfl(personal).code == 0
    refused = osfl("forget round --client north --key keys/server.key")
    assert refused.code == 1 and "masked" in refused.err and "--withdraw" in refused.err
