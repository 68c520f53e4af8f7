"""What a run had to work with, what its workers did, and `Advice`: one thing to change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What a run had for its host stages, and the limits of its batches."""

    cores: int = 1
    workers: int | None = None
    """Chunks prepared at once; None if the job chose that itself, up to the number of cores."""
    preparers: int | None = None
    """Processes that prepare the records; None if this engine cannot use them, or leaves no core for them."""
    batch_size: int = 0
    """Records of a batch at most; 0 if unknown."""
    batch_cost: float = 0
    counts_tokens: bool = False
    """Whether cost is in tokens."""
    buffer_memory: int = 0
    """Bytes of rows and outputs at most; 0 if unknown."""
    slots: int = 0
    """Records in an engine that works in steps at most; 0 if the job finds their number itself."""
    maps: bool = False
    """Whether a function of the user's prepares the rows."""
    finishes: bool = False
    """Whether a function of the user's finishes the outputs."""
    text_output: bool = False
    """Whether the output is written as text, which takes longer than Parquet."""
    replicas: int = 1
    """Engines that the devices of this machine or cluster have room for, those in use included."""
    replicas_setting: str = "data_parallel_size"
    """What sets their number."""
    keeps_order: bool = False
    """Whether the user wants a language model's records in the order of the input."""

    def limit(self, *, by_size: bool) -> tuple[str, float]:
        """The setting of a limit of batches, and its value."""
        if by_size or not self.counts_tokens:
            return "batch_size", self.batch_size
        return "batch_tokens", self.batch_cost


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """The figures of one cluster worker, including its replacements."""

    worker: str
    records: int
    failed: int
    batches: int
    busy: float
    """Fraction of the wall time with its engine busy."""
    lost: int
    """Number of its processes that died."""


@dataclass(frozen=True, slots=True)
class Advice:
    """One thing to change."""

    setting: str
    """The flag of the setting, or what takes its place."""
    value: str
    """What to set it to; empty where it is not a setting."""
    text: str
    """One sentence, its settings marked as `headrace.wording` has it."""
    gain_s: float
    """Seconds that it is expected to save, of a run like this one."""
