"""A whole round in a real browser: who is missing, a bundle dropped, a bad one refused, the server phase, the download."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from osfl.dashboard.server import address
from tests.dashboard.browser import CHROMIUM, Browser
from tests.dashboard.conftest import OpenDashboard, World

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt install chromium)"),
]
PICTURES = os.environ.get("OSFL_PICTURES")  # a folder, to look at the pages


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "profile") as opened:
        opened.resize(1280)
        yield opened


def look(browser: Browser, name: str) -> None:
    """No page scrolls sideways, on a desktop or on a phone; pictures for whoever wants to see them."""
    for width in (1280, 420):
        browser.resize(width, dark=width == 420)
        assert browser.run("document.documentElement.scrollWidth") <= width, f"{name} at {width}"
        if PICTURES:
            browser.picture(Path(PICTURES) / f"{name}-{width}.png")
    browser.resize(1280)


def site_is(client: str, state: str) -> str:
    return f"document.getElementById('site-{client}').dataset.state === '{state}'"


def test_a_round_from_the_first_look_to_the_download(
    open_dashboard: OpenDashboard, world: World, browser: Browser, tmp_path: Path
) -> None:
    dashboard = open_dashboard(key=world.key_file)
    browser.open(address(dashboard.server))
    assert browser.text("h1") == "0 of 3 sites have delivered."
    assert all(browser.run(site_is(client, "missing")) for client in ("north", "south", "west"))
    assert browser.run("document.getElementById('start').disabled")
    look(browser, "empty")

    browser.drop("#drop", world.bundles["north"])
    browser.until(site_is("north", "delivered"))
    assert "accepted: the upload of north" in browser.text("#received")

    browser.drop("body", world.bundles["foreign"])  # beside the field
    browser.until("document.getElementById('refused') !== null")
    assert "it was made for another round" in browser.text("#refused") and "refused:" in browser.text("#received")
    assert browser.run(site_is("south", "missing"))
    (tmp_path / "<b>photo.safetensors").write_bytes(os.urandom(5000))
    browser.choose("#files", tmp_path / "<b>photo.safetensors")
    browser.until("document.querySelectorAll('#received li').length === 3")
    browser.until("document.querySelector('#received li').innerText.includes('refused')")
    assert "<b>photo" in browser.text("#received")
    look(browser, "half")

    browser.choose("#files", world.bundles["south"], world.bundles["west"])
    browser.until("document.getElementById('start').disabled === false")
    browser.run("document.getElementById('start').focus()")
    browser.press("Enter")
    browser.until("['running', 'released'].includes(document.getElementById('phase').dataset.state)")
    look(browser, "running")
    browser.open(address(dashboard.server))  # loaded again in the middle
    browser.until("document.getElementById('phase').dataset.state === 'released'")
    assert browser.text("h1") == "The release is ready. Give it to the sites."
    look(browser, "released")

    browser.call("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path / "down"))
    browser.run("document.querySelector('#release a[download]').click()")
    release = tmp_path / "down" / "release.safetensors"
    end = time.monotonic() + 600
    while not release.exists() and time.monotonic() < end:
        time.sleep(0.1)
    assert release.read_bytes() == (dashboard.server.controller.round / "release.safetensors").read_bytes()

    browser.open(address(dashboard.server) + "inside/north")
    assert browser.text("h1") == "What north sends"
    look(browser, "inside")
    refused = [text for text in browser.complaints if "422" not in text]  # the browser notes every refusal
    assert refused == []


def test_the_token_opens_the_login_and_leaves_the_address(open_dashboard: OpenDashboard, browser: Browser) -> None:
    dashboard = open_dashboard(token="an unguessable token")
    browser.open(address(dashboard.server).split("#")[0])
    assert "needs its token" in browser.text("body")
    look(browser, "login")
    browser.run("document.getElementById('token').value = 'wrong wrong wrong'")
    browser.run("document.querySelector('#login button').click()")
    browser.until("document.getElementById('wrong').hidden === false")
    browser.open("about:blank")
    browser.open(address(dashboard.server))
    browser.until("document.querySelector('h1').innerText === '0 of 3 sites have delivered.'")
    assert browser.run("location.href").endswith("/") and "token" not in browser.run("location.href")
    assert browser.run("document.cookie") == ""  # scripts cannot read it


def test_a_dashboard_that_is_gone_is_noticed_and_so_is_the_next_one(world: World, browser: Browser, tmp_path: Path) -> None:
    fl_round = world.new_round(tmp_path / "round")
    with dashboard_process(fl_round, 0) as (first, where):
        browser.open(where)
        first.kill()
        browser.until("document.getElementById('gone').hidden === false")
        assert "nothing that was received is lost" in browser.text("#gone")
        first.wait()
    with dashboard_process(fl_round, int(where.rstrip("/").rpartition(":")[2])):
        browser.until("document.getElementById('gone').hidden")
        browser.choose("#files", world.bundles["north"])  # a page of the first dashboard: it loads itself again when it is used
        browser.until("document.readyState === 'complete' && document.getElementById('received').children.length === 0")
        browser.choose("#files", world.bundles["north"])
        browser.until(site_is("north", "delivered"))


@contextmanager
def dashboard_process(fl_round: Path, port: int) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command itself, as a process that can be killed."""
    command = [sys.executable, "-m", "osfl", "dashboard", str(fl_round), "--port", str(port), "--format", "json"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    stdout = process.stdout
    assert stdout is not None
    try:
        yield process, json.loads("".join(iter(stdout.readline, "}\n")) + "}")["address"]
    finally:
        process.terminate()
        process.wait()
        stdout.close()


def test_everything_can_be_reached_by_keyboard(open_dashboard: OpenDashboard, world: World, browser: Browser) -> None:
    dashboard = open_dashboard(key=world.key_file)
    for client in ("north", "south", "west"):
        dashboard.post("/bundles", world.bundles[client].read_bytes())
    browser.open(address(dashboard.server))
    browser.until("document.getElementById('start').disabled === false")
    reached = set()
    for _ in range(8):
        browser.press("Tab")
        reached.add(browser.run("document.activeElement.id"))
    assert {"inside-north", "inside-south", "inside-west", "start", "files"} <= reached
    unlabeled = "[...document.querySelectorAll('input, progress')].filter(e => !e.labels.length).length"
    assert browser.run(unlabeled) == 0 and browser.run("document.documentElement.lang") == "en"
