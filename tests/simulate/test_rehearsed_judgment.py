"""A rehearsal of a plan compares the uploads before the release, as the real round does, and its report says what was found."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from osfl.core.registry import load
from osfl.core.result import Result
from osfl.core.settings import resolve_settings
from osfl.core.types import Judging, Plan, Task
from osfl.runtime.machine import Machine
from osfl.simulate.run import run_federation
from osfl.simulate.simulation import rehearsal

SITES, LIAR, CLASSES = ("ann", "bob", "cem", "dan"), "cem", ("benign", "malignant")


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Dark and light images; one site has them the other way round."""
    folder, rng = tmp_path_factory.mktemp("sites"), np.random.default_rng(0)
    for site in SITES:
        for label, name in enumerate(CLASSES):
            (where := folder / site / name).mkdir(parents=True)
            shade = 1 - label if site == LIAR else label
            for number in range(40):
                pixels = np.clip(rng.normal(60 + 70 * shade, 20, (8, 8)), 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(where / f"{number:02}.png")
    return folder


def rehearsed(plan: Plan, sites: Path, out: Path) -> tuple[Result, list[str], list[bool]]:
    """The result, the lines about suspected sites, and whether there was a release by then."""
    lines, released = list[str](), list[bool]()

    def progress(what: str, done: int, total: int) -> None:
        if what.startswith("suspected"):
            lines.append(what)
            released.append((out / "release.safetensors").exists())

    about = {"preset": "", "command": ""}
    return run_federation(rehearsal(plan, sites), out, about, machine=Machine(workers=1), progress=progress), lines, released


def test_a_rehearsal_names_a_site_that_lies_before_the_release_and_in_its_report(sites: Path, tmp_path: Path) -> None:
    settings = resolve_settings(load("onesum"), "smoke", {"readable": "send", "blend": "0"})
    plan = Plan(Task("moles", CLASSES, (1, 8, 8)), "onesum", settings, SITES)
    result, lines, released = rehearsed(plan, sites, tmp_path / "out")
    assert {one["client"] for one in result["suspicions"]} == {LIAR}
    assert [line.split()[1] for line in lines] == [LIAR] * len(lines) and lines and not any(released)
    sentence = f"Suspected before the release: {LIAR} calls classes otherwise than all others together"
    assert sentence in (tmp_path / "out" / "report" / "index.html").read_text()
    assert sentence in (tmp_path / "out" / "model_card.md").read_text()
    kept = json.loads((tmp_path / "out" / "judgment.json").read_bytes())
    assert [one["rule"] for one in kept["suspicions"]] == [one["rule"] for one in result["suspicions"]]
    off, quiet, _ = rehearsed(replace(plan, judging=Judging(suspects="off")), sites, tmp_path / "off")
    assert "suspicions" not in off and not quiet and not (tmp_path / "off" / "judgment.json").exists()
