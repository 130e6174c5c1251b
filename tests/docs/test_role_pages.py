"""The commands of the role pages, as they stand there, from a plan to a measured model: each role in a folder of its own.

A command is looked up in its page word for word, then run. What people carry between machines is copied between folders.
"""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from osfl.cli.main import answer

DOCS = Path(__file__).resolve().parents[2] / "docs"
SITES = ("north", "south", "west")
CLASSES = ("benign", "malignant")


def text_of(page: str) -> str:
    """The text of a page with single blanks, so that a command may go on in the next line."""
    return re.sub(r"\s+", " ", (DOCS / f"{page}.md").read_text(encoding="utf-8"))


def follow(page: str, command: str, at: Path, /, more: str = "", **replaced: str) -> None:
    """Run a command of a page in a folder. `more` is what the page says may be added; `replaced` are names of one's own."""
    assert command in text_of(page), f"docs/{page}.md no longer says: {command}"
    for old, new in replaced.items():
        command = re.sub(rf"\b{old}\b", new, command)
    with chdir(at):
        arguments = shlex.split(f"{command} {more}", comments=True)
        found = [name for word in arguments[1:] for name in (map(str, sorted(Path().glob(word))) if "*" in word else [word])]
        assert arguments[0] == "osfl" and answer(found) == 0, f"docs/{page}.md: {command}"


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A coordinator, and three sites with a few images of two classes."""
    rng, here = np.random.default_rng(0), tmp_path_factory.mktemp("roles")
    for site in SITES:
        for part, images in (("train", 16), ("test", 4)):
            for level, name in zip((60, 190), CLASSES, strict=True):
                folder = here / site / "images" / part / name
                folder.mkdir(parents=True)
                for number in range(images):
                    pixels = rng.normal(level, 25, (64, 64)).clip(0, 255).astype(np.uint8)
                    Image.fromarray(pixels).save(folder / f"{number}.png")
    (here / "coordinator").mkdir()
    yield {name: here / name for name in ("coordinator", *SITES)}


def carry(source: Path, *names: str, to: Path) -> None:
    to.mkdir(exist_ok=True)
    for name in names:
        shutil.copy(source / name, to)


def test_a_round_from_the_plan_to_a_measured_model(places: dict[str, Path]) -> None:
    coordinator = places["coordinator"]
    follow(
        "coordinator",
        "osfl new --method fedavg --classes benign,malignant --image-size 64 --clients north,south,west",
        coordinator,
        "--smoke --channels 1",  # seconds instead of minutes
    )
    follow("coordinator", "osfl keys server", coordinator)
    for site in SITES:
        at = places[site]
        carry(coordinator, "plan.toml", "server.pub", to=at)
        follow("site", "osfl keys north", at, north=site)
        follow("site", "osfl check plan.toml --data images --client north", at, north=site)
        carry(at, f"{site}.pub", to=coordinator / "keys")
    follow("coordinator", "osfl enroll plan.toml --server server.pub --keys keys --out round", coordinator)
    for site in SITES:
        at = places[site]
        upload = "osfl client plan.toml --client north --data images --key north.key --out north.safetensors"
        follow("site", upload, at, north=site)
        inspect = "osfl inspect north.safetensors --plan plan.toml --key north.pub --data images --html north.html"
        follow("site", inspect, at, north=site)
        carry(at, f"{site}.safetensors", to=coordinator / "inbox")
    for command in ("osfl receive round inbox/", "osfl show round", "osfl server round --key server.key"):
        follow("coordinator", command, coordinator)
    use = "osfl personalize plan.toml --client north --release release.safetensors --server server.pub --out model"
    for site in SITES:
        at = places[site]
        carry(coordinator / "round", "release.safetensors", to=at)
        follow("site", use, at, "--data images", north=site)
        assert (at / "model" / "report" / "index.html").is_file() and (at / "model" / "evaluation.json").is_file()
        carry(at / "images" / "test" / "benign", "0.png", to=at)
        follow("site", "osfl predict --run model image.png", at, image="0")
        measured = "osfl evaluate model --data images --client north --key north.key --out measured"
        follow("site", measured, at, north=site)
        (coordinator / "usb").mkdir(exist_ok=True)
        shutil.copy(at / "measured" / "summary.json", coordinator / "usb" / f"{site}.json")
    follow("coordinator", "osfl results round usb/", coordinator)
    verify_as_an_auditor(coordinator)
    forget_a_site(coordinator)


def verify_as_an_auditor(at: Path) -> None:
    carry(at, "server.pub", to=at / "keys")
    carry(at / "inbox", "north.safetensors", to=at)
    carry(at / "round", "release.safetensors", to=at)
    follow("anybody", "osfl verify --round round", at)
    follow("anybody", "osfl verify round/inbox/*.safetensors round/release.safetensors --plan plan.toml --keys keys", at)
    follow("anybody", "osfl verify release.safetensors --plan plan.toml --server server.pub", at)
    follow("anybody", "osfl verify north.safetensors --plan plan.toml --keys keys", at)
    follow("anybody", "osfl inspect north.safetensors --plan plan.toml --key keys/north.pub", at)
    follow("anybody", "osfl keys server --out mine", at)
    follow("anybody", "osfl enroll plan.toml --keys keys --server mine/server.pub --out again", at)
    follow("anybody", "osfl receive again round/inbox", at)
    follow("anybody", "osfl server again --key mine/server.key", at)


def forget_a_site(at: Path) -> None:
    follow("forgetting", "osfl forget ROUND --client north --key server.key", at, ROUND="round")
    follow("forgetting", "osfl forget ROUND --verify", at, ROUND="round")


def test_peers_exchange_models_without_a_server(tmp_path: Path) -> None:
    for command in re.findall(r"^osfl .*$", (DOCS / "peer.md").read_text(encoding="utf-8"), re.MULTILINE):
        follow("peer", re.sub(r"\s+", " ", command), tmp_path)
    assert (tmp_path / "model").is_dir()


def test_a_finished_run_is_measured_and_exported(tmp_path: Path) -> None:
    for command in (
        "osfl run --method fedavg --clients 3 --partition iid --smoke --out runs/asked",
        "osfl evaluate runs/asked --data digits --out runs/measured",
        "osfl export runs/asked --out model.pt2",
        "osfl export runs/asked --out model.onnx",
    ):
        follow("evaluate", command, tmp_path)
