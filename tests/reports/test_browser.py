"""The pages as a browser lays them out, on a desktop, half a screen and a phone: no sideways scrolling, no text over text."""

from __future__ import annotations

import html
import json
import re
import shlex
import shutil
import subprocess
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from osfl.cli.main import answer
from osfl.evaluation.comparison import summarize
from osfl.evaluation.gains import gains_over, with_gains
from osfl.reports.comparison import write_comparison
from osfl.reports.page import write_report
from tests.reports.conftest import Runs, Sampler, sample_encounters

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
WIDTHS = (1280, 760, 420, 360)
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--window-size=1400,1000",
]

# Run beside the page, never inside what is shipped. An iframe stands for a window, because headless windows have a least width.
MEASURE = """
const report = {};
function overlaps(doc) {
  const boxes = [...doc.querySelectorAll('svg')].map(svg => [...svg.querySelectorAll('text')].map(t => {
    const r = t.getBoundingClientRect();
    return {text: t.firstChild ? t.firstChild.textContent : '', x: r.left, y: r.top, r: r.right, b: r.bottom};
  }).filter(b => b.r > b.x));
  const found = [];
  for (const texts of boxes) for (let i = 0; i < texts.length; i++) for (let j = i + 1; j < texts.length; j++) {
    const a = texts[i], b = texts[j];
    const w = Math.min(a.r, b.r) - Math.max(a.x, b.x), h = Math.min(a.b, b.b) - Math.max(a.y, b.y);
    // Boxes hold the line's leading above and below the letters: two pixels of shared height are empty.
    if (w > 0.5 && h > 2) found.push(a.text + ' / ' + b.text);
  }
  return found;
}
function outside(doc) {
  return [...doc.querySelectorAll('svg')].flatMap(svg => {
    const s = svg.getBoundingClientRect();
    return [...svg.querySelectorAll('text')].filter(t => {
      const r = t.getBoundingClientRect();
      return r.width && (r.left < s.left - 1 || r.right > s.right + 1 || r.top < s.top - 2 || r.bottom > s.bottom + 2);
    }).map(t => t.textContent);
  });
}
// Tables that have to be scrolled sideways to see their last column.
function cut(doc) {
  return [...doc.querySelectorAll('.scroll:has(> table)')].filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 1)
    .map(e => e.getAttribute('aria-label') + ': ' + e.scrollWidth + ' of ' + e.clientWidth);
}
window.onload = () => {
  for (const frame of document.querySelectorAll('iframe')) {
    const doc = frame.contentDocument, shown = [...doc.querySelectorAll('svg')].filter(s => s.getBoundingClientRect().width);
    report[frame.title] = {
      scroll: doc.documentElement.scrollWidth, window: doc.documentElement.clientWidth,
      overlaps: overlaps(doc), outside: outside(doc), shown: shown.length, cut: cut(doc),
    };
  }
  document.getElementById('out').textContent = JSON.stringify(report);
};
"""

# The other kinds of pages, as the commands write them.
COMMANDS = (
    "run --method fedavg --clients 3 --partition iid --smoke --out run",
    "audit run --shadows 0",
    "evaluate run --data digits --out measured",
    "inspect run/inbox/client-01.safetensors --html inspected.html",
    "run --method local_only --set architecture=cnn-w8 --clients 2 --image-size 8 --samples 100 --smoke --out sites",
    "fuse sites/models/client-01.safetensors sites/models/client-02.safetensors --method ensemble --architecture cnn-w8"
    " --image-size 8 --channels 1 --classes classes.txt --smoke --out fused",
)
MADE = {
    "audited run": "run/report/index.html",
    "evaluation": "measured/report/index.html",
    "inspection": "inspected.html",
    "fusion": "fused/report/index.html",
}
WITHOUT_DRAWINGS = ("fusion",)
WHOLE_TABLES = (1280, 420, 360)  # on half a screen wide tables scroll, with a shadow at the edge

Measured = dict[str, dict[str, Any]]  # by page and width


@pytest.fixture(scope="module")
def pages(sample: Sampler, demo_runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder, written = tmp_path_factory.mktemp("pages"), {}
    references = demo_runs(5, seeds=1)
    for clients, classes, odd in ((2, 2, True), (5, 8, False), (20, 10, True), (20, 100, False)):
        shown = {"figures": classes == 8, "generators": clients > 2}
        result = sample(clients=clients, classes=classes, odd=odd, personalized=odd, **shown)
        alone = sample("local_only", clients=clients, classes=classes, odd=odd, accuracy=0.7)
        result["gains"] = gains_over(result, alone)
        if odd:
            result["encounters"] = sample_encounters(result)
        name = f"run of {clients} clients, {classes} classes"
        written[name] = write_report(result, folder / name, references if classes > 2 else ())
    for methods in (1, 5, 25):  # the last with generators
        results = with_gains(demo_runs(methods, seeds=2))
        name = f"comparison of {methods}"
        written[name] = write_comparison(summarize(results, command="osfl compare"), results, folder / name)
    (folder / "classes.txt").write_text("".join(f"{number}\n" for number in range(10)))
    with chdir(folder):
        for command in COMMANDS:
            assert answer(shlex.split(command)) == 0, command
    written |= {name: folder / page for name, page in MADE.items()}
    return {name: path.read_text(encoding="utf-8") for name, path in written.items()}


@pytest.fixture(scope="module")
def measured(pages: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Measured:
    """One browser for everything: starting it costs more than measuring."""
    folder = tmp_path_factory.mktemp("browser")
    frames = [_frame(f"{name} at {width}", width, text) for name, text in pages.items() for width in WIDTHS]
    wrapper = folder / "measure.html"
    wrapper.write_text(f"<!doctype html><meta charset=utf-8>{''.join(frames)}<pre id=out></pre><script>{MEASURE}</script>")
    found: Measured = json.loads(_dump(wrapper, folder))
    return found


def _frame(title: str, width: int, text: str) -> str:
    return f'<iframe title="{title}" style="width:{width}px;height:900px;border:0" srcdoc="{html.escape(text)}"></iframe>'


def _dump(page: Path, folder: Path) -> str:
    assert CHROMIUM
    command = [CHROMIUM, *FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=600, check=True).stdout
    found = re.search(r'<pre id="out">(.*?)</pre>', dom, re.DOTALL)
    assert found and found[1], "the page was not measured"
    return html.unescape(found[1])


@pytest.mark.browser
@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed (Debian: apt install chromium)")
def test_pages_fit_their_window_and_no_text_covers_another(measured: Measured) -> None:
    assert len(measured) == (7 + len(MADE)) * len(WIDTHS)
    for name, found in measured.items():
        page, width = name.rsplit(" at ", 1)
        assert found["scroll"] <= found["window"], f"{name}: wider than its window"
        assert found["overlaps"] == [], f"{name}: texts overlap"
        assert found["outside"] == [], f"{name}: texts leave their drawing"
        assert found["cut"] == [] or int(width) not in WHOLE_TABLES, f"{name}: columns of a table are cut"
        assert found["shown"] >= (page not in WITHOUT_DRAWINGS), f"{name}: drawings are hidden"
