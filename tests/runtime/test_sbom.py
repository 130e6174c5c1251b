"""The bill of materials beside a release: what is in it, and that the same installation writes the same bytes."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

from osfl.runtime.sbom import NAME, bill_of_materials
from osfl.simulate.run import run
from osfl.simulate.simulation import Simulation


def test_it_names_what_is_installed_with_its_version() -> None:
    found = json.loads(bill_of_materials())
    assert (found["bomFormat"], found["specVersion"]) == ("CycloneDX", "1.5")
    parts = {part["name"]: part for part in found["components"]}
    for name in ("torch", "numpy", "safetensors", "cryptography", "scipy"):
        assert parts[name]["version"] == version(name) and parts[name]["purl"] == f"pkg:pypi/{name}@{version(name)}"
    refs = {part["bom-ref"] for part in found["components"]} | {"osfl"}
    assert {row["ref"] for row in found["dependencies"]} == refs
    assert all(set(row["dependsOn"]) <= refs for row in found["dependencies"])
    assert "sympy" in parts and "osfl" not in parts  # what torch needs, too


def test_it_stands_beside_every_release_and_repeats(tmp_path: Path) -> None:
    for name in ("a", "b"):
        run(Simulation("fedavg", "digits", 2, "iid", "smoke", samples=60, image_size=8), tmp_path / name)
    assert (tmp_path / "a" / NAME).read_bytes() == (tmp_path / "b" / NAME).read_bytes() == bill_of_materials()
