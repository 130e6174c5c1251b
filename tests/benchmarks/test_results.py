"""The pages of results: one screen first, one page a regime, cells that belong together side by side."""

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import advice, claims, onesum_card, results
from benchmarks.grid import CELLS, FACTORY_PRIOR, PUBLISHED, RECORDS, WITH_PRIOR, methods_of


def record(cell: str, **reached: float) -> dict[str, Any]:
    rows = {label: {"scores.global.accuracy": {"mean": value, "std": 0.01, "n": 3}} for label, value in reached.items()}
    return {"cell": cell, "published_is": "global", "methods": rows}


def test_cells_that_differ_in_the_number_of_clients_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    cells = [record("x-n20-a0.1", fedmitr=0.4, fedavg=0.2), record("x-n5-a0.1", fedmitr=0.6, fedavg=0.3, centralized=0.9)]
    page = "\n".join(results.over_clients([*cells, record("x-n5-a0.3", fedmitr=0.7), record("x-silos", fedmitr=0.1)]))
    assert "| x, a0.1: global | N = 5 | N = 20 |" in page and "| fedmitr | 60.0 ± 1.0 | 40.0 ± 1.0 |" in page
    assert "centralized" not in page and "a0.3" not in page and not list(tmp_path.iterdir())  # two points are no curve
    page = "\n".join(results.over_clients([*cells, record("x-n10-a0.1", fedmitr=0.5, fedavg=0.25)]))
    assert "(clients-x-a0.1.svg)" in page and "N = 5 | N = 10 | N = 20" in page
    drawn = ElementTree.fromstring((tmp_path / "clients-x-a0.1.svg").read_text())
    assert drawn.tag == "{http://www.w3.org/2000/svg}svg"  # else browsers show a file of its own as text
    assert len([one for one in drawn.iter() if one.tag.endswith("polyline")]) == 2


def test_a_cell_says_which_bytes_its_clients_started_from() -> None:
    rows: dict[str, dict[str, Any]] = {
        "fedavg": {"settings": {"pretrained": "vit_signs"}},
        "local_only": {"settings": {"epochs": 1}},
        "fedmitr": {"settings": {"pretrained": "w.safetensors", "pretrained_sha256": "ab" * 32}},
    }
    assert results.started_from(rows) == ["`vit_signs`", "`w.safetensors` (abababababab…)"]
    assert results.started_from({"local_only": rows["local_only"]}) == []


def test_every_cell_is_on_one_page() -> None:
    for cell in CELLS:
        assert sum(one.has(cell) for one in results.REGIMES) == 1, cell


def test_published_figures_stand_beside_cells_of_the_same_metric_and_say_which() -> None:
    """Only FedBiCross' paper reports the mean over clients, each on its own distribution; the others the whole test set."""
    committed = [json.loads((RECORDS / f"{cell}.json").read_text("utf-8")) for cell in PUBLISHED]
    assert {record["published_is"] for record in committed} == {"own", "global"}
    for record in committed:
        wanted = "own" if CELLS[record["cell"]].method == "fedavg" else "global"
        assert record["published_is"] == wanted and f"| published {wanted} |" in results.table(record)[4], record["cell"]
        assert wanted == "own" or not any(label.startswith("fedbicross") for label in record["published_percent"])


def test_results_open_with_one_screen_and_link_to_every_page() -> None:
    written = results.PAGE.read_text("utf-8").splitlines()
    head = written[: written.index("## All claims in one picture")]
    assert len(head) <= 40 and "| method | hold | inconclusive | do not hold |" in "\n".join(head)
    pages = {path.name for path in results.FOLDER.glob("*.md")}
    assert pages == {one.file for one in results.REGIMES} | set(results.OTHERS)
    assert all(f"(results/{name})" in "\n".join(head) for name in pages)


def test_what_rows_lack_follows_from_their_dates_and_settings() -> None:
    """Nothing is said of rows that are not there: a record without FedCGS has no line about its covariance."""
    old, new = ({"date": day, "settings": settings} for day, settings in (("2026-11-16", {}), ("2026-11-19", {"least": 3})))
    one = {"cell": "xray-a0.1", "date": "2026-11-16", "methods": {"falcon": old, "falcon@alpha=0": new, "local_only": new}}
    other = {"cell": "brain-a0.1", "date": "2026-11-16", "methods": {"falcon": {"settings": {}}}}
    page = "\n".join(results.older_rows([one, other]))
    assert "The 4 rows in 2 cells were made on: 2026-11-16 (2), 2026-11-19 (2)." in page
    assert "(`limits.share`, 0.4 now): 2 of 3 such rows, in 2 cells" in page
    assert "(`least`, 3 now): 2 of 3 such rows, in 2 cells" in page and "shared patients: 1 of 3 such rows, in 1 cells" in page
    assert "covariance" not in page and "generator" not in page


def test_committed_pages_are_what_the_records_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, folder = results.PAGE, results.FOLDER
    monkeypatch.setattr(results, "PAGE", tmp_path / "results.md")
    monkeypatch.setattr(results, "FOLDER", tmp_path / "results")
    monkeypatch.setattr(advice, "main", lambda options: None)  # its table has a test of its own
    card = onesum_card.PAGE
    (tmp_path / "methods").mkdir()
    monkeypatch.setattr(onesum_card, "PAGE", tmp_path / "methods" / card.name)
    onesum_card.PAGE.write_text(card.read_text("utf-8"), "utf-8")
    results.main()
    for path in (page, page.with_name("claims.svg"), card, *sorted(folder.iterdir())):
        made = tmp_path / path.relative_to(page.parent)
        assert made.read_text("utf-8") == path.read_text("utf-8"), f"{path.name}: run python -m benchmarks.results"


def test_a_cell_without_the_controls_of_own_accuracy_says_why() -> None:
    """Every table of own accuracy has both rows with the site's prior, or a reason."""
    lacking = ["onesum@symmetry=flip", "federated_factory@personalize=prior"]
    (_, few), (_, many) = (results.why_no_control(cell, lacking) for cell in ("pneumonia-n5-a0.3", "skin-meet-n70-a0.3"))
    assert "federated_factory@personalize=prior: not run" in few and "660 s a seed" in many
    assert not results.why_no_control("blood-silos", lacking[:1])
    for cell in CELLS:
        if CELLS[cell].method in ("fedavg", "fol", "federated_factory"):
            assert {*WITH_PRIOR, *FACTORY_PRIOR} <= set(methods_of(cell)), cell


def test_claims_about_own_accuracy_of_fedbicross_and_fol_are_judged_against_both_controls() -> None:
    for method in ("fedbicross", "fol"):
        asked = {(claim.left, claim.right, claim.metric) for claim in claims.PAPERS[method]}
        assert {(method, right, claims.OWN) for right in (*WITH_PRIOR, *FACTORY_PRIOR)} <= asked
