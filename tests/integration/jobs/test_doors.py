"""Every door names settings in its own terms: the command, a file of steps, a notebook, and the processes of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.acceptance.command import FAKE, ROOT, headrace

from headrace.processes.spawn import spawn
from headrace.wording import Interface, speak


def write(folder: Path, name: str, content: str) -> str:
    (folder / name).write_text(content)
    return name


def test_the_command_names_flags_and_a_file_of_steps_keys(tmp_path: Path) -> None:
    source = write(tmp_path, "in.jsonl", json.dumps({"id": 1, "words": "a"}) + "\n")
    files = ("-i", source, "-o", "out.jsonl")
    status, said = headrace("run", *FAKE, *files, folder=tmp_path)[:2]
    assert (status, "name yours with --text-column" in said) == (2, True)
    steps = write(tmp_path, "steps.json", json.dumps({"steps": [{"engine": FAKE[1]}]}))
    said = headrace("run", "--config", steps, *files, folder=tmp_path)[1]
    assert "name yours with text_column" in said
    write(tmp_path, "steps.json", json.dumps({"steps": [{"engine": FAKE[1], "text_column": "words"}]}))
    said = headrace("run", "--config", steps, *files, "--id-column", "none", folder=tmp_path)[1]
    assert "name yours with --id-column" in said, "it is no key of the file"


def test_an_id_of_a_megabyte_does_not_fill_the_terminal(tmp_path: Path) -> None:
    rows = [{"id": "x" * 1_000_000 if n in (3, 7) else str(n), "text": "a"} for n in range(9)]
    source = write(tmp_path, "in.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    status, said = headrace("run", *FAKE, "-i", source, "-o", "out.jsonl", folder=tmp_path)[:2]
    assert status == 1
    [line] = [line for line in said.splitlines() if "comes twice" in line]
    assert len(line) < 700
    assert "xxx' (1,000,000 characters) comes twice: in column 'id' of records 3 and 7" in line


@pytest.mark.parametrize("door", ["flags", "python"])
def test_a_process_of_a_job_speaks_as_the_job_does(door: Interface) -> None:
    speak(door)
    try:
        process, connection = spawn("tests.integration.jobs.doors")
    finally:
        speak("python")
    assert connection.recv() == door
    connection.close()
    process.wait()


def test_a_notebook_shows_the_line_of_the_cell_and_no_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat: Any = pytest.importorskip("nbformat")
    nbclient: Any = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    job = f"headrace.run(['a'], sink={str(tmp_path / 'out.jsonl')!r}, engine=lambda texts: texts, progress=False"
    cells = [
        "import headrace, warnings; warnings.simplefilter('error', RuntimeWarning)",
        f"{job});",
        f"{job}, text_column='b')",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=100, allow_errors=True).execute()
    first, second, third = (cell.outputs for cell in notebook.cells)
    assert not first
    assert not [output for output in second if output["output_type"] in ("error", "stream")]
    [error] = third
    assert error["ename"] == "ConfigError"
    assert error["evalue"].endswith("name yours with text_column")
    shown = "\n".join(error["traceback"])
    assert "In[3]" in shown
    assert "site-packages" not in shown
    assert "/headrace/" not in shown
