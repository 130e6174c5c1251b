"""The page of one run: complete, self-contained, escaped, honest about whose accuracy it shows."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from osfl.core.result import Result
from osfl.reports.page import write_report
from tests.reports.conftest import Sampler

SHAPES = [(2, 2), (5, 8), (20, 10), (20, 100), (1, 2)]
SECTIONS = ["accuracy", "labels", "clients", "confusion", "costs", "deviations", "record", "repeat"]


class Tags(HTMLParser):
    """Every tag and its attributes, and whether all that opens is closed."""

    VOID = frozenset({"meta", "img", "br", "link", "hr", "input"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.seen: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def page_of(result: Result, folder: Path, references: Sequence[Result] = ()) -> str:
    return write_report(result, folder, references).read_text(encoding="utf-8")


@pytest.mark.parametrize(("clients", "classes"), SHAPES)
@pytest.mark.parametrize("odd", [False, True])
def test_the_page_is_whole_and_self_contained(sample: Sampler, tmp_path: Path, clients: int, classes: int, odd: bool) -> None:
    odd = odd and clients > 1
    text = page_of(sample(clients=clients, classes=classes, odd=odd, figures=True), tmp_path, [sample("centralized")])
    tags = Tags(text)
    assert not tags.open
    assert [attrs["id"] for tag, attrs in tags.seen if tag == "section" and attrs["id"] != "figures"] == SECTIONS
    assert "http://" not in text and "https://" not in text and "@import" not in text
    for tag, attrs in tags.seen:
        assert tag not in ("script", "link", "iframe", "object", "base", "form")
        assert "src" not in attrs or str(attrs["src"]).startswith("data:image/png;base64,")
        assert (attrs.get("href") or "#").startswith("#")
        assert not any(name.startswith("on") for name in attrs)


@pytest.mark.parametrize(("clients", "classes"), SHAPES)
def test_every_drawing_is_xml(sample: Sampler, tmp_path: Path, clients: int, classes: int) -> None:
    text = page_of(sample(clients=clients, classes=classes, odd=clients > 1, figures=True), tmp_path)
    found = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(found) == 3 * 7  # three widths of bars, labels, confusion, and the figures heatmap, lines, histogram, scatter
    for svg in found:
        ElementTree.fromstring(svg)


def test_hostile_names_stay_text(sample: Sampler, tmp_path: Path) -> None:
    text = page_of(sample(odd=True, command="echo '<img src=x onerror=alert(1)>'"), tmp_path)
    assert {tag for tag, _ in Tags(text).seen}.isdisjoint({"script", "img"}) and "<b>&#39;" not in text
    assert "&lt;script&gt;" in text and "&lt;img src=x" in text


def test_text_that_is_not_unicode_does_not_stop_the_report(sample: Sampler, tmp_path: Path) -> None:
    assert "bad" in page_of(sample(deviations=["bad \ud800 surrogate"]), tmp_path)


def test_headline_and_command_are_shown(sample: Sampler, tmp_path: Path) -> None:
    result = sample("fedavg", seed=7)
    text = page_of(result, tmp_path)
    assert "fedavg on bloodcells-28" in text and "dirichlet:0.1" in text and result["command"] in text
    for shown in ("78.0\xa0%", "6.22\xa0MB", result["scores"]["clients"]["own"]["worst_client"], "1\xa0message each"):
        assert shown in text


def test_personalized_methods_say_whose_accuracy_it_is(sample: Sampler, tmp_path: Path) -> None:
    arguments = "mean over the clients&#39; own models"
    assert arguments in page_of(sample(personalized=True), tmp_path)
    assert arguments not in page_of(sample(personalized=False), tmp_path)


def test_messages_decide_how_the_run_is_called(sample: Sampler, tmp_path: Path) -> None:
    assert "uploaded exactly once" in page_of(sample(), tmp_path)
    assert "no message was sent" in page_of(sample("local_only", messages=0), tmp_path)
    assert "were pooled" in page_of(sample("centralized"), tmp_path)
    assert "not a one-shot method" in page_of(sample("fedavg_rounds", messages=20), tmp_path)


def test_validation_is_not_called_test(sample: Sampler, tmp_path: Path) -> None:
    result = sample()
    result["data"]["evaluated_on"] = "val"
    text = page_of(result, tmp_path)
    assert "global validation set" in text and "global test set" not in text


def test_references_appear_once_and_the_run_itself_only_as_itself(sample: Sampler, tmp_path: Path) -> None:
    result = sample("ensemble")
    text = page_of(result, tmp_path, [result, sample("fedavg", seed=0), sample("fedavg", seed=1), sample("fedavg", seed=1)])
    assert "ensemble (this run)" in text and ">ensemble</text>" not in text
    for name in ("fedavg, seed 0", "fedavg, seed 1 (1)", "fedavg, seed 1 (2)"):
        assert f">{name}<" in text


def test_missing_auroc_is_a_dash_with_a_reason(sample: Sampler, tmp_path: Path) -> None:
    text = page_of(sample(auroc=None), tmp_path)
    assert "needs images of two classes" in text and "None" not in text


def test_the_same_result_gives_the_same_bytes(sample: Sampler, tmp_path: Path) -> None:
    first = page_of(sample(figures=True), tmp_path / "a", [sample("fedavg")])
    assert first == page_of(sample(figures=True), tmp_path / "b", [sample("fedavg")])


def test_deviations_are_listed_or_their_absence_stated(sample: Sampler, tmp_path: Path) -> None:
    assert "20 local epochs" in page_of(sample(), tmp_path)
    assert "None recorded" in page_of(sample(deviations=[]), tmp_path)


def test_names_that_fit_are_not_cut(sample: Sampler, tmp_path: Path) -> None:
    text = page_of(sample(clients=20, classes=10), tmp_path)
    assert text.count(">site-19</text>") == 3  # the label map in three widths


def test_a_best_and_a_worst_client_are_marked_unless_all_are_equal(sample: Sampler, tmp_path: Path) -> None:
    assert 'class="mark worst"' in page_of(sample(), tmp_path)
    assert 'class="mark' not in page_of(sample(clients=1, classes=2), tmp_path)


BAD_FIGURES = {
    "unknown kind": {"kind": "pie"},
    "no kind": {"values": []},
    "not a mapping": [1, 2],
    "ragged": {"kind": "heatmap", "rows": ["a"], "columns": ["b", "c"], "values": [[1]]},
    "short series": {"kind": "lines", "x": [1, 2], "series": {"a": [1]}},
    "words for numbers": {"kind": "lines", "x": ["a", "b"], "series": {"a": [1, 2]}},
    "not a png": {"kind": "gallery", "images": [{"png": '" onerror="alert(1)'}]},
    "no bins": {"kind": "histogram", "bins": [], "series": {"a": []}},
    "nobody's group": {"kind": "groups", "groups": ["a"], "classes": ["b"]},
}


@pytest.mark.parametrize("name", BAD_FIGURES)
def test_a_bad_figure_costs_a_sentence_not_the_report(sample: Sampler, tmp_path: Path, name: str) -> None:
    text = page_of(sample(figures={name: BAD_FIGURES[name]}), tmp_path)
    assert "This figure cannot be drawn" in text and "onerror=" not in text


def test_groups_stand_beside_the_label_counts_that_a_simulation_knows(sample: Sampler, tmp_path: Path) -> None:
    """A server that was told no class counts still knows who is in which group; the report of a simulation knows both."""
    clients = [row["client"] for row in sample()["clients"]]
    figure = {"kind": "groups", "groups": {"cluster 1": clients[1:], "cluster 2": clients[:1]}, "classes": ["x"]}
    reported = page_of(sample(figures={"Clusters": {**figure, "classes": sample()["task"]["classes"]}}), tmp_path / "told")
    assert "clients of one group stand together" in reported
    assert reported.index(f"{clients[1]} (cluster 1)") < reported.index(f"{clients[0]} (cluster 2)")
    strange = page_of(sample(figures={"Clusters": figure}), tmp_path / "strange")  # other classes than were counted
    assert "Who is in which group" in strange
