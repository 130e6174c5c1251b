"""The model card: every part is there, and claims follow the result."""

from __future__ import annotations

from pathlib import Path

from osfl.core.result import Result
from osfl.reports.model_card import write_model_card
from tests.reports.conftest import Sampler

PARTS = [
    "# Model card",
    "## Intended use and limits",
    "## Data",
    "## Training",
    "## Evaluation",
    "### By class",
    "## Costs",
    "## Privacy",
    "## Deviations from the paper",
    "## Record",
    "## How to use it",
]


def card_of(result: Result, folder: Path) -> str:
    return write_model_card(result, folder).read_text(encoding="utf-8")


def test_all_parts_in_order(sample: Sampler, tmp_path: Path) -> None:
    text = card_of(sample(), tmp_path)
    places = [text.index(part) for part in PARTS]
    assert places == sorted(places)
    assert "osfl predict --run DIR image.png" in text and "CC BY 4.0" in text and "Worst client: site-01" in text
    assert sample()["command"] in text and sample()["models_digest"] in text


def test_hostile_names_stay_text(sample: Sampler, tmp_path: Path) -> None:
    text = card_of(sample(odd=True, command="x\n```\n# not a heading"), tmp_path)
    outside_code = "".join(text.split("`")[::2])
    assert "<script>" not in outside_code and "<b>" not in outside_code
    assert text.count("```") == 4


def test_privacy_follows_what_was_sent(sample: Sampler, tmp_path: Path) -> None:
    assert "No image left a client" in card_of(sample(), tmp_path)
    assert "No privacy audit was run" in card_of(sample(), tmp_path)
    assert "Nothing was uploaded" in card_of(sample("local_only", messages=0), tmp_path)
    assert "pooled in one place" in card_of(sample("centralized", messages=0), tmp_path)
    audited = card_of(sample(audits={"membership AUC": 0.53}), tmp_path)
    assert "membership AUC: 0.53" in audited and "lower bounds" in audited and "No privacy audit" not in audited


def test_personalized_and_missing_values(sample: Sampler, tmp_path: Path) -> None:
    text = card_of(sample(personalized=True, auroc=None, odd=True, deviations=[], settings={}), tmp_path)
    assert "mean over the clients' own models" in text and "None recorded." in text and "null" not in text.split("## Data")[0]


def test_a_missing_license_is_stated(sample: Sampler, tmp_path: Path) -> None:
    result = sample()
    del result["data"]["license"]
    assert "license: not recorded" in card_of(result, tmp_path)


def test_generators_that_copy_are_named_under_privacy(sample: Sampler, tmp_path: Path) -> None:
    text = write_model_card(sample(generators=True), tmp_path).read_text(encoding="utf-8")
    assert "**Generators copy training images of basophil" in text.split("## Privacy")[1].split("##")[0]
