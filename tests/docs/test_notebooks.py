"""The tutorials run from top to bottom, at smoke size, in a folder of their own and without real datasets."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

TUTORIALS = sorted((Path(__file__).parents[2] / "docs" / "tutorials").glob("*.ipynb"))


def test_there_are_three() -> None:
    assert [path.stem for path in TUTORIALS] == ["add_a_method", "compare", "real_round"]


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_it_is_committed_without_outputs(path: Path) -> None:
    """Outputs would go out of date, and hold paths of the machine that made them."""
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in cells)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # sockets of the notebook kernel
def test_it_runs(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OSFL_DATA", raising=False)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert printed and not any(output.output_type == "error" for output in printed)
