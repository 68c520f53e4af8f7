"""One way over the input: what is still to do, where it goes, how that ends. The first, and one to retry failures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

from headrace.io.storage.checksums import Damage
from headrace.io.storage.parts import PartFolder
from headrace.records import JsonObject


@dataclass(frozen=True, slots=True)
class Finished:
    """What a finished job left."""

    records: int
    """Rows of the input, failed ones included."""
    failed: int
    bytes: int
    """Size of the merged file; 0 for a folder of parts."""
    digest: str = ""
    """Of the merged file (see `io/storage/checksums.py`); empty for a folder of parts, and where it was not kept."""
    errors_digest: str = ""
    """Of the file of dead letters; empty where there is none, and where it was not kept."""


class FinishedState(TypedDict):
    """A `Finished` in `job.json`."""

    records: int
    failed: int
    bytes: int
    digest: NotRequired[str]
    errors_digest: NotRequired[str]


class ModelState(TypedDict):
    """A downloaded model in `job.json`."""

    name: str
    """As the user wrote it."""
    commit: str


class JobState(TypedDict):
    """The content of `job.json`."""

    fingerprint: JsonObject
    """What decides the output."""
    settings: NotRequired[JsonObject | None]
    """See `jobs.settings.as_json`."""
    made_of: NotRequired[str | None]
    """See `engines.identity`."""
    model: NotRequired[ModelState | None]
    """The model that the job was begun with, if it was downloaded."""
    finished: FinishedState | None
    """None while records are left to do."""
    swap: NotRequired[bool]
    """Whether the new files of a retry are being moved into place."""


@dataclass(frozen=True, slots=True)
class Pass:
    """What a run is to do."""

    next_todo: Callable[[int], int]
    """The first position >= its argument that is still to do; beyond every input if there is none."""
    parts: PartFolder
    """Where outcomes are committed."""
    finish: Callable[[], Finished]
    """Called when nothing is left to do."""
    done: int
    """Records that an earlier run has committed in this pass."""
    failed: int
    """How many of them failed."""
    total: int | None
    """Records of this pass, where that is known."""
    place: Callable[[int], int] | None = None
    """Numbers the positions to do without gaps; None where they have none."""
    damaged: Sequence[Damage] = ()
    """Parts of earlier runs that were damaged: they are gone, and what they held is to do."""
