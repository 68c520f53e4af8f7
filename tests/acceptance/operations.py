"""Jobs that are killed just before each of their file operations in turn, looked at, and continued to their end.

After each kill `headrace inspect` must say what is true: nothing is damaged, and as many records are done as the next
run does not compute. In the end every record is once in the output or once among the dead letters.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.acceptance.command import headrace

from headrace.errors import RecordError
from headrace.testing import FakeEngine

MINE = "tests.acceptance.operations"
ROWS = 48
BAD = (3, 17, 18, 40)
"""Texts that the engine refuses until it is mended."""
ENDED = (0, 3)


class _Noting(FakeEngine):
    """Notes each record that it is asked for, in a file that outlives it."""

    def forward(self, batch: list[str]) -> list[list[float]]:
        with Path(os.environ["COMPUTED"]).open("a") as file:
            file.writelines(f"{_number(text)}\n" for text in batch)
        return super().forward(batch)


class _Sharing(_Noting):
    @property
    def profile(self):  # type: ignore[no-untyped-def]
        from headrace.engines.profile import EngineProfile

        return EngineProfile(batching="batches", batch_cost=4096, batch_size=8, workers_cache_prefixes=True)


def _number(text: str) -> int:
    return int(text.rsplit("#", 1)[1])


def _refuses(text: str) -> Exception | None:
    bad = _number(text) in BAD and not Path(os.environ["COMPUTED"]).with_name("mended").exists()
    return RecordError("not today") if bad else None


def engine(model: str | None = None) -> FakeEngine:
    """Refuses some records until the file `mended` is there."""
    return _Noting(model, refuses=_refuses)


def sharing(model: str | None = None) -> FakeEngine:
    """The same for a language model whose prompts begin alike."""
    return _Sharing(model, refuses=_refuses)


@dataclass(frozen=True)
class Case:
    """A job that is killed, and the commands before it."""

    output: str
    flags: tuple[str, ...] = ("--engine", f"{MINE}:engine")
    retries: bool = False
    overwrites: bool = False
    output_format: tuple[str, ...] = ()

    @property
    def run(self) -> tuple[str, ...]:
        """The command of the job."""
        return ("run", "-i", "../in.jsonl", "-o", self.output, *self.output_format, *self.flags)

    @property
    def struck(self) -> tuple[str, ...]:
        """The command that is killed, and continues."""
        if self.retries:
            return ("retry", self.output)
        return (*self.run, "--overwrite") if self.overwrites else self.run

    @property
    def is_folder(self) -> bool:
        return self.output.endswith("/")


_FEW = ("--engine", f"{MINE}:engine", "--buffer-memory", "200kB")
"""So little memory that a job has several parts."""
_STEPS = ("--config", "../steps.json")
_PREFIX = ("--task", "generate", "--engine", f"{MINE}:sharing", "--buffer-memory", "400kB", "--order", "prefix")
_JSONL = ("--output-format", "jsonl")

CASES = {
    "jsonl": Case("out.jsonl", _FEW),
    "parquet": Case("out.parquet", _FEW),
    "csv": Case("out.csv.gz"),
    "folder": Case("out/", _FEW, output_format=_JSONL),
    "link": Case("link.jsonl"),
    "retry": Case("out.jsonl", retries=True),
    "retry-parquet": Case("out.parquet", retries=True),
    "retry-folder": Case("out/", _FEW, retries=True, output_format=_JSONL),
    "overwrite": Case("out.jsonl", overwrites=True),
    "overwrite-folder": Case("out/", _FEW, overwrites=True, output_format=_JSONL),
    "steps": Case("out.jsonl", _STEPS),
    "retry-steps": Case("out.jsonl", _STEPS, retries=True),
    "prefix": Case("out.jsonl", _PREFIX),
    "prefix-folder": Case("out/", _PREFIX, output_format=_JSONL),
}


def make_input(folder: Path) -> None:
    """The input of all jobs; two of its lines are broken."""
    lines = []
    for number in range(ROWS):
        text = f"document {number % 5} " + "word " * (600 + number % 7) + f" #{number}"
        lines.append("broken\n" if number in (5, 30) else json.dumps({"id": number, "text": text}) + "\n")
    (folder / "in.jsonl").write_text("".join(lines))
    steps = [{"name": name, "engine": f"{MINE}:engine", "task": "embed"} for name in ("first", "second")]
    (folder / "steps.json").write_text(json.dumps({"steps": steps}))


class Job:
    """One job in a folder of its own, below that of the input."""

    def __init__(self, case: Case, folder: Path, name: str) -> None:
        self._case = case
        self.folder = folder / name
        self._computed = folder / f"{name}.computed"
        self._environment = {"COMPUTED": str(self._computed)}
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir()
        if case.output == "link.jsonl":
            (self.folder / "elsewhere").mkdir()
            (self.folder / "link.jsonl").symlink_to("elsewhere/out.jsonl")
        self._mended = folder / "mended"
        self._mended.unlink(missing_ok=True)
        if (case.retries or case.overwrites) and (prepared := folder / f"{name} before").is_dir():
            shutil.copytree(prepared, self.folder, symlinks=True, dirs_exist_ok=True)
        elif case.retries or case.overwrites:
            status, said = headrace(*case.run, folder=self.folder, **self._environment)
            assert status == 3, said
            shutil.copytree(self.folder, prepared, symlinks=True)
        if case.retries:
            self._mended.touch()
        self._computed.write_text("")

    def strike(self, number: int, refusal: str = "", named: str = "") -> tuple[int, str]:
        """Begin the job, and strike before its n-th operation: see `striking.install`."""
        given = f"{number}, {str(self.folder)!r}, {refusal!r}, {named!r}"
        hook = f"from tests.acceptance.striking import install; install({given}); "
        return headrace(*self._case.struck, folder=self.folder, before=hook, **self._environment)

    def inspected(self) -> tuple[int, int, str] | None:
        """Records ok and failed, and all that `inspect` says; None if it says that there is no job."""
        status, said = headrace("inspect", "--verify", self._case.output, folder=self.folder)
        if status == 2:
            assert "no job has written" in said, said
            return None
        assert status == 0, said
        found = re.search(r"records +([\d,]+) ok, ([\d,]+) failed", said)
        if found is None:
            assert "not begun" in said, said
            return None
        return int(found[1]), int(found[2]), said

    def go_on(self) -> set[int]:
        """Continue to the end. Returns the records that were computed for it."""
        self._computed.write_text("")
        command = self._case.struck if not self._case.overwrites or not self._has_begun_anew() else self._case.run
        status, said = headrace(*command, folder=self.folder, **self._environment)
        assert status in ENDED, said
        return set(map(int, self._computed.read_text().split()))

    def _has_begun_anew(self) -> bool:
        state = next(iter(self.folder.glob("*/job.json")), None) or next(iter(self.folder.glob("*/*/job.json")), None)
        return state is not None and json.loads(state.read_text())["finished"] is None

    def check(self) -> None:
        """Each record is where it belongs, once."""
        rows, letters = self.rows(), self.letters()
        refused = {5, 30} if self._mended.exists() else {5, 30, *BAD}
        assert letters == sorted(refused), letters
        assert rows == [number for number in range(ROWS) if number not in refused], rows
        left = [path for path in self.folder.rglob("*") if path.suffix == ".tmp" or path.name in ("retry", "retry-new")]
        assert not left, left
        if self._case.output == "link.jsonl":
            assert (self.folder / "link.jsonl").is_symlink()

    def rows(self) -> list[int]:
        """The ids of the output's rows."""
        files = (
            sorted((self.folder / "out").glob("part-*")) if self._case.is_folder else [self.folder / self._case.output]
        )
        found: list[int] = []
        for file in files:
            if file.suffix == ".parquet":
                import pyarrow.parquet as pq

                found += pq.read_table(file)["id"].to_pylist()
            elif file.suffix == ".gz":
                import gzip

                found += [
                    int(line.split(",", 1)[0]) for line in gzip.decompress(file.read_bytes()).decode().splitlines()[1:]
                ]
            else:
                found += [json.loads(line)["id"] for line in file.read_text().splitlines()]
        return found

    def letters(self) -> list[int]:
        """The positions of the dead letters."""
        name = self._case.output.partition(".")[0]
        path = self.folder / ("out/_headrace/errors.jsonl" if self._case.is_folder else f"{name}.errors.jsonl")
        return [json.loads(line)["position"] for line in path.read_text().splitlines()] if path.exists() else []


def kills(case: Case, folder: Path, first: int = 1, step: int = 1) -> Iterator[int]:
    """Kill jobs of this kind, each just before another operation, until one has no more. Yields the numbers of these.

    Raises:
        AssertionError: a record is lost or doubled, or `inspect` says what is not true.
    """
    number = first
    while True:
        job = Job(case, folder, f"job-{abs(hash(case))}")
        status, said = job.strike(number)
        if status in ENDED:
            job.check()
            return
        assert status == -9, said
        try:
            found = job.inspected()
            computed = job.go_on()
            check_said(case, found, computed)
            job.check()
            after = job.inspected()
            assert after is not None and after[:2] == (len(job.rows()), len(job.letters())), after
        except AssertionError as error:
            raise AssertionError(f"killed before operation {number} of {' '.join(case.struck)}: {error}") from error
        yield number
        number += step


def check_said(case: Case, found: tuple[int, int, str] | None, computed: set[int]) -> None:
    """What `inspect` said after a kill must fit what the next run then computed."""
    if "--config" in case.flags:
        return  # both steps compute each record
    if found is None:
        assert len(computed) == ROWS - 2
        return
    ok, failed, said = found
    if case.retries:
        old = (ROWS - 2 - len(BAD), 2 + len(BAD))
        assert (ok, failed) == (
            old if computed or ("it was killed at its end" not in said and ok == old[0]) else (ROWS - 2, 2)
        ), said
        assert "of 2 failed" not in said, said
        return
    if case.overwrites and "finished" in said.splitlines()[0]:
        assert (ok, failed) == (ROWS - 2 - len(BAD), 2 + len(BAD)), said
        return
    broken = {5, 30} - ({5, 30} if ok + failed == ROWS else set())
    assert len(computed) + ok + failed in range(ROWS - len(broken), ROWS + 1), (said, len(computed))
