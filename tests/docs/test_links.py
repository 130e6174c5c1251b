"""Relative links of all pages lead somewhere, and the README stays short."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "examples")
PAGES = sorted([*ROOT.glob("*.md"), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.md"))])
LINK = re.compile(r"\]\(([^)\s]*)\)")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def anchors(page: Path) -> set[str]:
    """Headings as GitHub and MkDocs name them in links."""
    text = FENCE.sub("", page.read_text("utf-8"))
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title) for title in re.findall(r"^#+ (.*)$", text, re.M)]
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def broken(page: Path) -> list[str]:
    wrong = []
    for link in LINK.findall(FENCE.sub("", page.read_text("utf-8"))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        found = target.exists() and target.is_relative_to(ROOT)
        if not found or (anchor and target.suffix == ".md" and anchor not in anchors(target)):
            wrong.append(link)
    return wrong


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not broken(page)


def test_a_broken_link_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.docs.test_links.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("# A title\n[a](page.md) [b](page.md#a-title) [c](#none) [d](missing.md) [e](https://example.org)\n")
    assert broken(page) == ["#none", "missing.md"]


def test_every_page_is_in_the_navigation() -> None:
    """MkDocs checks the same with --strict; this needs no MkDocs."""
    listed = set(re.findall(r"[\w./-]+\.(?:md|ipynb)", (ROOT / "mkdocs.yml").read_text("utf-8")))
    docs = ROOT / "docs"
    there = {str(path.relative_to(docs)) for end in ("md", "ipynb") for path in docs.rglob(f"*.{end}")}
    assert there <= listed


def test_the_site_is_built_strictly() -> None:
    """`--quiet` hides warnings also from `--strict`: broken links would pass."""
    command = re.search(r"mkdocs build.*", (ROOT / "Makefile").read_text("utf-8"))
    assert command and "--strict" in command[0] and "--quiet" not in command[0] and "-q" not in command[0].split()
    assert "make docs" in (ROOT / ".ci" / "run").read_text("utf-8")


def test_the_readme_starts_with_install_commands_and_results() -> None:
    lines = (ROOT / "README.md").read_text("utf-8").splitlines()
    first = "\n".join(lines[:60])
    assert "pip install" in first and "osfl demo" in first and "osfl run" in first and "| FedAvg, one round |" in first


ROWS = {  # as a page calls them -> as the record does
    "OneSum: sums of features": "onesum",
    "each site alone": "local_only",
    "FedAvg, one round": "fedavg",
    "ensemble, weighted by class counts": "ensemble@ensemble=class_count",
    "FederatedFactory": "federated_factory",
    "FedAvg, ten rounds": "fedavg_rounds",
    "all images in one place": "centralized",
}


@pytest.mark.parametrize("page", ["README.md", "docs/start.md"])
def test_figures_of_the_demo_are_those_of_the_record(page: str) -> None:
    record = json.loads((ROOT / "benchmarks" / "records" / "demo.json").read_text("utf-8"))["methods"]
    text = (ROOT / page).read_text("utf-8").replace("**", "")
    for title, method in ROWS.items():
        shown = re.search(rf"^\| {title}[^|]*\| (\d+) % \| (\d+) % \|", text, re.M)
        keys = ("scores.global.accuracy", "scores.clients.own.mean")
        assert shown and [int(figure) for figure in shown.groups()] == [
            round(100 * record[method][key]["mean"]) for key in keys
        ]


def test_tables_of_the_readme_have_eight_rows_at_most() -> None:
    tables = re.findall(r"(?:^\|.*\n)+", (ROOT / "README.md").read_text("utf-8"), re.M)
    assert tables and max(len(table.splitlines()) - 2 for table in tables) <= 8


NAMED = re.compile(r"`([a-z]\w*/[\w./]*\.py)(?:: ([\w., ]+))?`")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_names_in_the_text_exist(page: Path) -> None:
    """`methods/fol/pruning.py: slimmed` names a file of src/osfl or of the repository, and a name in it."""
    wrong = []
    for path, names in NAMED.findall(page.read_text("utf-8").replace("methods/x.py", "core/method.py")):
        file = next((base / path for base in (ROOT / "src" / "osfl", ROOT / "src", ROOT) if (base / path).is_file()), None)
        text = file.read_text("utf-8") if file else ""
        wanted = [name.strip().rpartition(".")[2] for name in names.split(",") if name.strip()]
        if file is None or not all(re.search(rf"\b{name}\b", text) for name in wanted):
            wrong.append(f"{path}: {names}")
    assert page.name == "CHANGELOG.md" or not wrong
