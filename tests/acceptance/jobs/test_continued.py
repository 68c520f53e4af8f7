"""A job that an earlier version of Headrace began and that was killed is continued by this one.

The earlier code is read from the repository's history; without it, these tests are skipped.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from tests.acceptance.command import MAIN, ROOT, headrace
from tests.waiting import until

EARLIER = "5d0cb115"
"""The commit whose jobs are continued."""
ENGINE = """
import os, time
from headrace.testing import FakeEngine

class Engine(FakeEngine):
    def forward(self, batch):
        time.sleep(float(os.environ.get("PAUSE_S", "0")))
        with open("seen.txt", "a") as seen:
            seen.writelines(text + "\\n" for text in batch)
        if "fails" in batch:
            raise ValueError("this text is refused")
        return super().forward(batch)
"""
OWN = ("--task", "embed", "--engine", "engine:Engine")
CASES = {
    "jsonl": ("out.jsonl", *OWN, "--dedupe", "--keep-columns", "kind", "--batch-size", "64"),
    "parquet": (
        "out.parquet",
        *OWN,
        "--dedupe",
        "--keep-columns",
        "kind,number",
        "--prompt-template",
        "{kind}: {text}",
    ),
    "folder": ("out/", "--output-format", "parquet", *OWN, "--keep-columns", "number", "--map", "engine:shorter"),
    "model": ("out.parquet", "--task", "embed", "--limit", "1200", "--dtype", "float32", "--truncate-dim", "64"),
    "steps": ("out.jsonl", "--config", "steps.json"),
}
ROWS = 5_000


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources of the earlier version."""
    done = subprocess.run(["git", "-C", str(ROOT), "archive", EARLIER, "src"], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"the history of {EARLIER} is not here")
    folder = tmp_path_factory.mktemp("earlier")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "engine.py").write_text(ENGINE + "\ndef shorter(row):\n    return row | {'text': row['text'][:40]}\n")
    with (tmp_path / "in.jsonl").open("w") as lines:
        for n in range(ROWS):
            text = "fails" if n % 997 == 5 else f"text {n % 4_000} " + "word " * (n % 40)
            lines.write(json.dumps({"id": f"r{n}", "number": n, "kind": f"k{n % 7}", "text": text}) + "\n")
            if n % 1_999 == 7:
                lines.write("no JSON\n")
    steps = [{"name": name, "task": "embed", "engine": "engine:Engine"} for name in ("first", "second")]
    (tmp_path / "steps.json").write_text(json.dumps({"steps": steps}))
    return tmp_path


def parts_of(folder: Path, name: str) -> list[Path]:
    """The committed parts that show that a job has come far enough to be killed."""
    if name == "steps":
        return [*folder.glob("out.jsonl.parts/part-*.jsonl")]
    return [part for part in folder.glob("out*/part-*") if part.suffix != ".errors"]


def begin(earlier: Path, folder: Path, name: str) -> None:
    """Run the job on the earlier code, and kill it when some parts are committed."""
    output, *flags = CASES[name]
    command = [sys.executable, "-c", MAIN, "run", "-i", "in.jsonl", "-o", output, *flags]
    path = os.pathsep.join([str(earlier), str(folder)])
    variables = {**os.environ, "PYTHONPATH": path, "PAUSE_S": "0.1"}
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(command, env=variables, cwd=folder, stdout=log, stderr=log)
        until(lambda: parts_of(folder, name) or job.poll() is not None)
        job.kill()
        assert job.wait() == -9, (folder / "log").read_text()


def committed(folder: Path, name: str) -> int:
    """How many records the parts hold, by their names."""
    places = [part.name.partition(".")[0].split("-")[1:] for part in parts_of(folder, name)]
    return sum(int(end) - int(start) for start, end in places)


def output_of(place: Path) -> dict[str, object]:
    """The content of an output and of its dead letters; the parts of a folder are cut where the kill came."""
    if place.is_dir():
        table = ds.dataset(place, format="parquet", exclude_invalid_files=True).to_table()
        errors = list((place / "_headrace").glob("*.errors"))
        return {"rows": table.sort_by("number").to_pylist(), "errors": letters_of(errors)}
    found: dict[str, object] = {path.name: path.read_bytes() for path in place.parent.glob("out*") if path.is_file()}
    return found | {errors.name: letters_of([errors]) for errors in place.parent.glob("out*.errors.jsonl")}


def letters_of(files: Sequence[Path]) -> list[dict[str, object]]:
    """Dead letters by position. The earlier version gave a line that is no JSON its position as its id."""
    letters = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    for letter in letters:
        if letter["record"] == "no JSON":
            assert letter["id"] in (None, letter["position"])
            letter["id"] = None
    return sorted(letters, key=lambda letter: int(letter["position"])) if len(files) > 1 else letters


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough if name == "model" else ()) for name in CASES]
)
def test_a_job_that_was_killed_is_continued(earlier: Path, folder: Path, name: str) -> None:
    output, *flags = CASES[name]
    begin(earlier, folder, name)
    done = committed(folder, name)
    assert done
    (folder / "seen.txt").unlink(missing_ok=True)
    command = ("run", "-i", "in.jsonl", *flags)
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(folder)])
    status, said = headrace(*command, "-o", output, folder=folder, PYTHONPATH=path)
    assert status == 3, said
    if (folder / "seen.txt").exists():  # a batch that fails is run again in halves
        assert len((folder / "seen.txt").read_text().splitlines()) <= 1.5 * (ROWS - done)

    (folder / "whole").mkdir()
    assert headrace(*command, "-o", f"whole/{output}", folder=folder, PYTHONPATH=path)[0] == status
    if name == "model":  # in other batches, whose sums differ in their last bits
        tables = [pq.read_table(place / output) for place in (folder, folder / "whole")]
        assert [table.drop(["embedding"]) for table in tables[:1]] == [
            table.drop(["embedding"]) for table in tables[1:]
        ]
        vectors = [np.array(table["embedding"].to_pylist()) for table in tables]
        np.testing.assert_allclose(*vectors, atol=1e-5)
    else:
        assert output_of(folder / output) == output_of(folder / "whole" / output)


def test_one_that_cannot_be_continued_says_why_in_one_line(earlier: Path, folder: Path) -> None:
    begin(earlier, folder, "folder")
    code = folder / "engine.py"
    code.write_text(
        code.read_text().replace(
            "super().forward(batch)", "[[number / 3 for number in one] for one in super().forward(batch)]"
        )
    )
    output, *flags = CASES["folder"]
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), str(folder)])
    status, said = headrace(
        "run", "-i", "in.jsonl", *flags, "-o", output, "--max-errors", "50", folder=folder, PYTHONPATH=path
    )
    assert status == 1, said
    [why] = [line for line in said.splitlines() if "parts committed before" in line]
    assert "column 'embedding' is of type fixed_size_list<element: float>[8]" in why
    assert "write one .parquet file" in why
