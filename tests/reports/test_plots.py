"""Drawings: legal XML, escaped, the same every time, and with nothing lost at the edges of what they are given."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from osfl.reports.plots import Point, bars, cloud, confusion, heatmap, histogram, lines, scatter
from osfl.reports.svg import fit, fit_middle, width_of, wrap

WIDTHS = (300.0, 570.0, 890.0)
HOSTILE = '</svg><script>alert(1)</script>&"\x00\ud800'


def drawings(name: str = "plain", width: float = 890) -> dict[str, str]:
    pair = [(0.5, 0.1), (None, None)]
    points = [Point(name, 0, 0.4), Point("b", 1e6, 0.9, 0.02), Point("c", 1e6, 0.9, kind=1)]
    return {
        "bars": bars({name: pair, "b": pair}, ["one", name], what=name, width=width, reference=(name, 0.1), strong=name),
        "heatmap": heatmap([name, "b"], [name, "d", "e"], [[0, 1, 2.5], [4, 1e6, 3]], what=name, width=width, unit=name),
        "confusion": confusion([name, "b"], [[5, 1], [0, 0]], what=name, width=width, right=[0.83, None]),
        "lines": lines([0, 1, 2], {name: [1, None, 3], "b": [2, 2, 2]}, what=name, width=width, x_label=name),
        "histogram": histogram([0, 1, 2], {name: [1, 4], "b": [0, 0]}, what=name, width=width, x_label=name),
        "scatter": scatter(points, what=name, width=width, x_label=name, y_label=name),
        "log scatter": scatter(points, what=name, width=width, log_y=True, kinds=[name, "b", "c"], y_label=name),
        "cloud": cloud({name: {"real": [(0, 1), (2, 3)], "made": [(1, 1)]}, "b": {"real": []}}, what=name, width=width),
    }


def texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("text")]


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", ["plain", HOSTILE, "x" * 300, "血液 🩸 Größe", ""])
def test_drawings_are_xml_whatever_the_names(name: str, width: float) -> None:
    for svg in drawings(name, width).values():
        root = ElementTree.fromstring(svg)
        assert root.attrib["role"] == "img" and "aria-label" in root.attrib
        assert not list(root.iter("script"))


def test_drawings_are_the_same_every_time() -> None:
    assert drawings() == drawings()


def test_drawings_follow_the_theme() -> None:
    for svg in drawings().values():
        assert "currentColor" in svg and "var(--" in svg


def test_cells_show_counts_and_drop_them_when_there_are_too_many() -> None:
    assert {"1", "5"} <= set(texts(drawings()["confusion"]))
    many = [f"c{index}" for index in range(100)]
    counts = [[float(r == c) * 7 for c in range(100)] for r in range(100)]
    shown = texts(confusion(many, counts, what="many"))
    assert "7" not in shown and "c0" in shown


@pytest.mark.parametrize("name", ["client-04", "st-mary", "lymphocyte", "a", "site 7"])
@pytest.mark.parametrize("width", WIDTHS)
def test_row_names_that_fit_are_not_cut(name: str, width: float) -> None:
    assert texts(heatmap([name], ["a", "b"], [[1, 2]], what="w", width=width)).count(name) >= 1


def test_a_confusion_row_without_images_is_drawn() -> None:
    assert "0.0" not in texts(confusion(["a", "b"], [[0, 0], [0, 3]], what="w"))


def test_a_missing_bar_says_so() -> None:
    assert "not available" in texts(drawings()["bars"])


def test_scatter_keeps_a_place_for_zero_and_numbers_what_it_cannot_name() -> None:
    assert "0" in texts(drawings()["scatter"])
    points = [Point(f"method {index}", 10.0**index, index / 25) for index in range(25)]
    shown = texts(scatter(points, what="many", width=300))
    assert "25" in shown and any(text.endswith("method 24") for text in shown)


def test_a_log_axis_upwards_keeps_a_place_for_zero() -> None:
    points = [Point("nothing", 0, 0), Point("little", 10, 1e3), Point("much", 1e5, 1e9)]
    shown = texts(scatter(points, what="w", log_y=True, kinds=["one", "two"]))
    assert shown.count("0") == 2 and {"1k", "1G", "one", "two"} <= set(shown)
    dots = [float(dot.attrib["cy"]) for dot in ElementTree.fromstring(scatter(points, what="w", log_y=True)).iter("circle")]
    assert dots == sorted(dots, reverse=True) and dots[0] - dots[1] > 20


@pytest.mark.parametrize("shares", [[0.5, 1.0], [1.0, 1.0], [0.97, 0.99], [0.0, 0.0]])
def test_axes_of_shares_end_at_100_percent(shares: list[float]) -> None:
    points = [Point("", index, share) for index, share in enumerate(shares)]
    drawn = scatter(points, what="w", share_y=True, y_format=lambda share: f"{100 * share:.1f} %")
    marks = [float(text[:-2]) for text in texts(drawn) if text.endswith(" %")]
    assert marks and min(marks) >= 0.0 and max(marks) <= 100.0
    percent = {"a": [100 * share for share in shares]}
    drawn = lines([1, 1000], percent, what="w", x_label="round", y_label="accuracy, %", percent=True)
    marks = [float(text) for text in texts(drawn) if text.replace(".", "").isdecimal() and float(text) not in (1, 1000)]
    assert not [mark for mark in marks if 100 < mark < 200]


def test_clouds_show_every_point_and_number_groups_that_share_a_color() -> None:
    groups = {f"class {index}": {"real": [(index, 0)], "synthetic": [(index, 1), (index, 2)]} for index in range(14)}
    svg = cloud(groups, what="w")
    root = ElementTree.fromstring(svg)
    assert len(list(root.iter("circle"))) == 14 + 1 and len(list(root.iter("polygon"))) == 28 + 1  # and the key
    assert "14" in texts(svg) and "14 class 13" in texts(svg)
    ten = dict(list(groups.items())[:10])  # CIFAR's: a color each
    assert "10" not in texts(cloud(ten, what="w"))
    assert texts(cloud({str(index): group for index, group in enumerate(groups.values())}, what="w")).count("9") == 2
    few = texts(cloud(dict(list(groups.items())[:3]), what="w"))
    assert few == ["class 0", "class 1", "class 2", "real", "synthetic"]


def test_a_number_stands_on_the_first_kind_of_its_group() -> None:
    """Between real images and synthetic ones that are far away from them there may be another class."""
    groups = {f"class {index}": {"real": [(index, 0)], "synthetic": [(index, 9)] * 5} for index in range(14)}
    root = ElementTree.fromstring(cloud(groups, what="w"))
    dots = {float(dot.attrib["cx"]): float(dot.attrib["cy"]) for dot in root.iter("circle")}
    marks = [text for text in root.iter("text") if "strong" in text.attrib.get("class", "")]
    assert marks and all(abs(dots[float(mark.attrib["x"])] + 4 - float(mark.attrib["y"])) < 0.2 for mark in marks)


def test_points_of_a_line_are_marked_where_they_are_few() -> None:
    """Else nobody sees that a curve over 5, 10 and 20 clients was measured three times; and one point alone is no line."""

    def drawn(values: list[float | None]) -> tuple[int, int]:
        root = ElementTree.fromstring(lines(list(range(len(values))), {"a": values}, what="w"))
        return len(list(root.iter("circle"))), len(list(root.iter("polyline")))

    assert drawn([1.0, 2.0, 3.0]) == (3, 1) and drawn([1.0, None, 3.0, 4.0]) == (3, 1)
    assert drawn([1.0] * 13) == (0, 1) and drawn([1.0, None, *[2.0] * 12]) == (1, 1)


def test_marks_are_whole_where_values_are_and_never_called_alike() -> None:
    shown = texts(lines([1, 2, 3], {"a": [10.15, 10.18, 10.2]}, what="w"))
    assert {"1", "2", "3"} <= set(shown) and "1.5" not in shown
    up = [text for text in shown if text.startswith("10.")]
    assert len(up) > 3 and len(set(up)) == len(up)


@pytest.mark.parametrize("values", [[], [0.0], [1.0], [0.3, 0.3]])
def test_axes_hold_for_few_values(values: list[float]) -> None:
    points = [Point("a", 0, value) for value in values]
    ElementTree.fromstring(scatter(points, what="few"))
    ElementTree.fromstring(lines(list(range(len(values))), {"a": values}, what="few"))


def test_texts_are_cut_to_their_room() -> None:
    assert fit("short", 12, 100) == "short"
    assert fit("a rather long name", 12, 60).endswith("…")
    assert fit_middle("method@epochs=20", 12, 80).endswith("20")
    assert all(width_of(cut, 12) <= 60 for cut in (fit("w" * 40, 12, 60), fit_middle("w" * 40, 12, 60)))
    assert wrap("two words", 12, 40) == ["two", "words"]
    assert len(wrap("one two three four five six", 12, 40)) == 3
