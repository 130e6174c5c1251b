"""What the record of lying sites counts, by hand; and that the page has the record's table."""

from __future__ import annotations

from typing import Any

from benchmarks import lying_sites
from benchmarks.bench import kept_figures


def row(named: list[str], others: list[str], with_them: float | None, defended: float | None) -> dict[str, Any]:
    found = {"with": with_them, "defended": defended, "named": named, "others named": others, "rules": []}
    return {"liars": ["a", "b"], "without liars": 0.9, "label flip": found}


def test_a_round_counts_where_all_liars_are_named_or_accuracy_stays() -> None:
    rows = {
        "FedAvg, one": row(["a", "b"], [], 0.5, 0.9),
        "FedAvg, two": row(["a"], ["c"], 0.5, 0.7),  # one liar and an honest site
        "FedAvg, three": row([], [], 0.89, 0.89),  # nobody, and it did no harm
    }
    counted = lying_sites.summary(rows)["label flip"]
    assert [counted[key] for key in lying_sites.COUNTED] == [3, 1, 1, 2, 2]
    assert lying_sites.summary(rows)["all attacks"] == counted
    assert "| label flip | FedAvg | 3 | 1 | 1 | 90.0% | 63.0% | 83.0% |" in lying_sites.table(rows)


def test_the_one_who_was_copied_may_be_named_and_a_stopped_round_has_no_accuracy() -> None:
    found = {**row(["a", "b"], ["c"], None, None), "copy of another site": row(["a", "b"], ["c"], 0.9, 0.9)["label flip"]}
    counted = lying_sites.summary({"FedAvg, one": found})
    assert counted["copy of another site"]["an honest site named"] == 0 == counted["label flip"]["within two points"]
    assert "| label flip | FedAvg | 1 | 1 | 1 | 90.0% | stopped | stopped |" in lying_sites.table({"FedAvg, one": found})


def test_flips_among_few_classes_are_counted_apart() -> None:
    rows = {"FedAvg, one": row(["a", "b"], [], 0.5, 0.9), "FedAvg, two": row([], [], 0.5, 0.5)}
    figures = {"table": rows, "summary": lying_sites.summary(rows), "not run": {}}
    assert "Apart from these" not in lying_sites.sentences(figures)
    text = lying_sites.sentences({**figures, "few classes": rows})
    assert "every liar was named in\n1 of 2 rounds, named or within two points in 1, an honest site named in 0." in text


def test_the_page_has_the_table_of_the_record() -> None:
    kept, page = kept_figures("lying_sites"), lying_sites.PAGE.read_text(encoding="utf-8")
    assert lying_sites.table(kept["table"]) in page and lying_sites.sentences(kept) in page
    assert lying_sites.summary(kept["table"]) == kept["summary"]
