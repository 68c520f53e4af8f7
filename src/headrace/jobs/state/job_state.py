"""What `job.json` holds, and one pass over the input: which records are unfinished, and where outcomes go."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypedDict

from headrace.io.storage.checksums import Damage
from headrace.io.storage.parts import PartFolder
from headrace.jobs.state.windows import Windows
from headrace.records import JsonObject


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """The result of a finished job."""

    records: int
    """Rows of the input, failed ones included."""
    failed: int
    bytes: int
    """Size of the merged file; 0 for a folder of parts."""
    digest: str = ""
    """The checksum of the merged file (`io/storage/checksums.py`); empty for a folder of parts, or if unknown."""
    errors_digest: str = ""
    """The checksum of the file of dead letters; empty if there is none, or if unknown."""


class ModelState(TypedDict):
    """A downloaded model in `job.json`."""

    name: str
    """As the user wrote it."""
    commit: str


@dataclass(frozen=True, slots=True)
class JobState:
    """The content of `job.json`."""

    fingerprint: JsonObject
    """The facts that determine the output."""
    settings: JsonObject | None = None
    """The settings as `jobs.settings.as_json` gives them; None if JSON cannot hold them."""
    made_of: str | None = None
    """The identity of the engine, from `engines.choosing.identity`; None if unknown."""
    model: ModelState | None = None
    """The model that the job was begun with, if it was downloaded."""
    before: dict[str, list[int] | None] | None = None
    """The stamps of the files, at the places of the output and of the dead letters, that the job is to replace."""
    finished: FinishedJob | None = None
    """None while records are left to do."""
    swap: bool = False
    """Whether the new files of a retry are being moved into place."""
    clearing: bool = False
    """Whether the files of an earlier job are being removed."""


@dataclass(frozen=True, slots=True)
class Pass:
    next_todo: Callable[[int], int]
    """The first unfinished position >= its argument; `sys.maxsize` if a retry has none left. It may have `next_done`,
    as a `Ledger` has, which says where a run of unfinished ones ends."""
    parts: PartFolder
    """The parts in input order."""
    finish: Callable[[], FinishedJob]
    """Called when all records are finished."""
    done: int
    """Records of this pass that earlier runs have committed."""
    failed: int
    """How many of these failed."""
    total: int | None
    """Records of this pass; None if unknown."""
    place: Callable[[int], int] | None = None
    """Numbers the positions without gaps; None if they have none."""
    damaged: Sequence[Damage] = ()
    """Damaged parts of earlier runs. They were removed, and their records are unfinished."""
    may_be: Callable[[int, object], bool] | None = None
    """Whether a record of this id belongs at this position, in a retry."""
    windows: Windows | None = None
    """Takes outcomes in another order, which become parts in input order later; None if this pass has no such."""

    @property
    def sink(self) -> PartFolder | Windows:
        return self.windows or self.parts

    def records_now(self) -> int:
        """How many records are committed now."""
        staged = 0 if self.windows is None else self.windows.staged
        return staged + sum(end - start for start, end in self.parts.committed())
