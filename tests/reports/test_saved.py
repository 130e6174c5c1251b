"""Figures as files: SVG that stands alone, PNG that shows the same, CSV with the numbers that the page was drawn from."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image

from osfl.core.errors import UsageError
from osfl.evaluation.comparison import summarize
from osfl.reports.bitmap import SCALE
from osfl.reports.comparison import comparison_page
from osfl.reports.page import run_page
from osfl.reports.saved import figure_names, save_figures, stand_alone
from osfl.reports.tables import bars_table
from tests.reports.conftest import Runs, Sampler

SPACE = "{http://www.w3.org/2000/svg}"
KNOWN = {"svg", "title", "style", "rect", "text", "line", "circle", "polygon", "polyline", "g", "image"}


def pixels(path: Path) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def read(path: Path) -> list[list[str]]:
    return list(csv.reader(io.StringIO(path.read_text(encoding="utf-8"))))


@pytest.mark.parametrize("odd", [False, True])
def test_every_figure_of_a_run_is_saved_as_the_page_draws_it(sample: Sampler, tmp_path: Path, odd: bool) -> None:
    result = sample(figures=True, odd=odd)
    written = save_figures(lambda: run_page(result), tmp_path, ("svg", "png", "csv"))
    names = {path.stem for path in written}
    assert {
        "accuracy",
        "labels-over-clients",
        "confusion-matrix",
        "synthetic-images",
        "loss-while-distilling",
        "plane",
    } <= names
    assert len(set(written)) == len(written) and all(path.stat().st_size > 0 for path in written)
    page = run_page(result)
    for path in (path for path in written if path.suffix == ".svg"):
        root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
        found = {element.tag.removeprefix(SPACE) for element in root.iter()}
        assert root.tag == f"{SPACE}svg" and found <= KNOWN, path.name
        text = path.read_text()
        assert (
            "var(--" not in text and "currentColor" not in text and not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
        )
        with Image.open(path.with_suffix(".png")) as image:
            assert image.size == tuple(round(SCALE * float(root.attrib[side])) for side in ("width", "height"))
        shapes = len(re.findall(r"<(?:circle|polygon|polyline|rect) ", text))
        assert shapes > 1 or "<image" in text
    saved = "".join(path.read_text() for path in written if path.suffix == ".svg")
    drawn = re.findall(r'<div class="wide scroll"[^>]*>(<svg.*?</svg>)</div>', page, re.DOTALL)
    said = {text for svg in drawn for text in re.findall(r"<text[^>]*>([^<]+)", svg)}
    assert len(drawn) >= 6 and len(said) > 50 and all(f">{text}<" in saved for text in said)


def test_the_numbers_are_those_of_the_result(sample: Sampler, tmp_path: Path) -> None:
    result = sample(figures=True)
    save_figures(lambda: run_page(result), tmp_path, ("csv",))
    head, *rows = read(tmp_path / "confusion-matrix.csv")
    assert head[0] == "truth" and [[float(x) for x in row[1:]] for row in rows] == result["scores"]["confusion"]
    head, *rows = read(tmp_path / "labels-over-clients.csv")
    assert {row[0]: [int(x) for x in row[1:]] for row in rows} == {c["client"]: c["class_counts"] for c in result["clients"]}
    head, *rows = read(tmp_path / "loss-while-distilling.csv")
    figure = result["figures"]["Loss while distilling"]
    assert head == ["step", *figure["series"]] and [float(row[0]) for row in rows] == figure["x"]
    assert [row[2] for row in rows[:3]] == ["", "", ""] and float(rows[5][2]) == 1.1
    assert read(tmp_path / "plane.csv")[1:] == [
        ["a", "real", "0.0", "1.0"],
        ["a", "real", "2.0", "3.5"],
        ["a", "synthetic", "1.0", "1.0"],
    ]
    assert read(tmp_path / "confidence.csv")[1] == ["0.0", "0.1", "1", "2"]
    assert not (tmp_path / "synthetic-images.csv").exists()  # pictures have no numbers


def test_a_name_that_begins_like_a_formula_is_text(sample: Sampler, tmp_path: Path) -> None:
    result = sample()
    result["clients"][0]["client"] = '=HYPERLINK("x")'
    save_figures(lambda: run_page(result), tmp_path, ("csv",))
    assert read(tmp_path / "labels-over-clients.csv")[1][0] == '\'=HYPERLINK("x")'
    assert bars_table({"a": [(-0.5, None)]}, ["gain"])[1] == ["a", -0.5, None]


def test_png_shows_colors_at_their_places(sample: Sampler, tmp_path: Path) -> None:
    """The bar of the first accuracy is blue from 0 % to its value, white to the right of it; pictures are not smoothed."""
    result = sample(figures=True)
    save_figures(lambda: run_page(result), tmp_path, ("png", "svg"))
    root = ElementTree.fromstring((tmp_path / "accuracy.svg").read_text())
    left, top, *_ = (float(value) for value in root.attrib["viewBox"].split())
    bar = next(e for e in root.iter(f"{SPACE}rect") if float(e.attrib["height"]) == 13.5)
    x, y, width = (float(bar.attrib[key]) for key in ("x", "y", "width"))
    found, row = pixels(tmp_path / "accuracy.png"), round((y + 6 - top) * SCALE)
    blue = tuple(int(bar.attrib["fill"][i : i + 2], 16) for i in (1, 3, 5))
    assert tuple(found[row, round((x + width / 2 - left) * SCALE)]) == blue
    assert tuple(found[row, round((x + width - 2 - left) * SCALE)]) == blue
    assert tuple(found[2, 2]) == (255, 255, 255)
    gallery = pixels(tmp_path / "synthetic-images.png")
    first = gallery[28 : 28 + 192, 28 : 28 + 192]
    assert len(np.unique(first.reshape(-1, 3), axis=0)) <= 64 and first.std() > 10


def test_a_comparison_is_saved_too(demo_runs: Runs, tmp_path: Path) -> None:
    results = demo_runs(5, seeds=2)
    comparison = summarize(results)
    names = figure_names(lambda: comparison_page(comparison, results))
    assert {"balanced-accuracy-by-method", "accuracy-against-bytes"} <= names.keys()
    written = save_figures(lambda: comparison_page(comparison, results), tmp_path, ("csv",))
    assert len(written) == len([one for one in names.values() if one.table])
    head, *rows = read(tmp_path / "accuracy-against-bytes.csv")
    methods = comparison["methods"]
    assert head[:2] == ["method", "uploaded bytes"]
    assert {row[0]: float(row[1]) for row in rows} == {m: methods[m]["costs.upload_bytes"]["mean"] for m in methods}


def test_equal_titles_have_files_of_their_own(sample: Sampler, tmp_path: Path) -> None:
    result = sample()
    lines = {"kind": "lines", "x": [0, 1], "series": {"a": [0, 1]}}
    result["figures"] = {"Loss?": lines, "loss!": lines, "...": lines}
    names = {path.name for path in save_figures(lambda: run_page(result), tmp_path)}
    assert {"loss.svg", "loss-2.svg", "figure.svg"} <= names


def test_an_unknown_format_is_refused_before_anything_is_drawn(tmp_path: Path) -> None:
    def never() -> str:
        raise AssertionError

    with pytest.raises(UsageError, match=r"saved as svg, png, csv; got pgn.*png"):
        save_figures(never, tmp_path, ("svg", "pgn"))
    with pytest.raises(UsageError, match="got none"):
        save_figures(never, tmp_path, ())


def test_a_page_is_the_same_whether_its_figures_are_collected_or_not(sample: Sampler) -> None:
    result = sample(figures=True)
    alone = run_page(result)
    names = figure_names(lambda: run_page(result))
    assert run_page(result) == alone and all(stand_alone(one) == stand_alone(one) for one in names.values())
