"""What advice is made from: a job's figures, and what the job had to work with. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace.events import EndpointUsed, PrefixCacheUsed, PromptsCompared
from headrace.observe.accounting.device_limit import DeviceFigures
from headrace.observe.accounting.timeline import Cause

BOTTLENECK = 0.7
"""A stage is the bottleneck if its work would fill this fraction of the time in which the job waited for it."""
_WAITING = 0.5
"""A worker that computes in less than this fraction of its time waits for something else than a core."""

LIMITED = 0.5
"""Fraction of the batches that met the limit, from which on the limit decides how large batches are."""
FIXED_ENOUGH = 0.05
"""Fraction of a batch that may be the same whatever is in it: above it, larger batches are worth trying."""


@dataclass(frozen=True, slots=True)
class Host:
    """What a run had for its host stages, and the limits of its batches."""

    cores: int = 1
    workers: int | None = None
    """Chunks prepared at once; None if the job chose that itself, up to the number of cores."""
    batch_size: int = 0
    """Records of a batch at most; 0 if unknown."""
    batch_cost: float = 0
    counts_tokens: bool = False
    """Whether cost is in tokens."""
    buffer_memory: int = 0
    """Bytes of rows and outputs at most; 0 if unknown."""
    slots: int = 0
    """Records in an engine that works in steps at most."""
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
class AdviceInputs:
    """The figures for the advice; times in seconds."""

    records: int
    """In this run, including failed ones."""
    failures: str
    """Says that many records failed; empty if few did, or if it is too early to say."""
    batches: int
    wall_s: float
    """From the start of the job, with its model loaded, to its end."""
    busy: float
    """Fraction of it with a batch in the engine."""
    padding_efficiency: float
    host_s: Mapping[str, float]
    """Seconds by host stage: load, prepare, finish, write."""
    causes: Mapping[Cause, float] = field(default_factory=dict)
    """Seconds by cause, the starting time included."""
    fixed_s: float | None = None
    """What a batch takes beside what grows with its cost."""
    limited_by_size: float = 0.0
    """Fraction of the batches that were closed because they had as many records as allowed."""
    limited_by_cost: float = 0.0
    """Fraction of the batches that were closed because more would have cost too much."""
    mean_cost: float = 0.0
    """Of a batch, padding included."""
    fill_s: float = 0.0
    """From the start of the job to its first batch, in which the device waits whatever is done."""
    out_of_memory: int = 0
    """Batches that ran out of memory and ran again in halves."""
    fitted: tuple[float, float] = (0.0, 0.0)
    """Records and computed cost of the largest batch that fitted, where some did not."""
    chunks: int = 1_000_000
    """Chunks of records that were prepared, each by one worker."""
    prepare_cpu_s: float | None = None
    """Seconds of a core that preparing took; None if unknown."""
    repeated: float = 0.0
    """Fraction of the records that are equal to an earlier one and computed again, of those that were compared."""
    slots_full: float = 0.0
    """Fraction of the steps with all slots taken."""
    tuning_s: float = 0.0
    """What it took to choose a data type, before the job started."""
    lanes: int = 0
    """Workers, each with an engine; 0 where the job has its own engine."""
    dtype: str = ""
    dtype_speed: float = 1.0
    """How many times as fast as in float32 the device computes a product in that type."""
    host: Host = Host()
    device: DeviceFigures | None = None
    larger_pay: bool | None = None
    """Whether batches larger than the largest budget allowed would be faster; None if unknown."""
    prompts: PromptsCompared | None = None
    prefix_cache: PrefixCacheUsed | None = None
    endpoint: EndpointUsed | None = None
    """Of a job whose engine is a server elsewhere."""

    @property
    def device_s(self) -> float:
        """Seconds with a batch in the engine."""
        return self.wall_s * self.busy

    def lost(self, *causes: Cause) -> float:
        """Seconds that went into these causes."""
        return sum(self.causes.get(cause, 0.0) for cause in causes)

    @property
    def starved_s(self) -> float:
        """Seconds in which the device waited for records: the slowest stage before it explains all of them."""
        return self.lost("read", "prepare", "company")

    @property
    def blocked_s(self) -> float:
        """Seconds in which the device waited for results to leave, those after the last batch included."""
        return self.lost("finish", "write", "draining")

    @property
    def at_once(self) -> int:
        """Chunks that are prepared at once."""
        return self.host.workers or self.host.cores

    @property
    def waits_to_prepare(self) -> bool:
        """Whether preparing waits for something else than a core, such as another service."""
        used = self.prepare_cpu_s
        return used is not None and not self.locked and used < _WAITING * self.host_s.get("prepare", 0.0)

    @property
    def locked(self) -> bool:
        """Whether threads that prepare wait for Python's lock: together they keep one core busy and no more."""
        used, work = self.prepare_cpu_s, self.host_s.get("prepare", 0.0)
        return used is not None and self.at_once > 1 and BOTTLENECK * self.wall_s < used < 0.75 * work

    @property
    def step_fixed_s(self) -> float:
        """What a step takes beside what grows with its tokens.

        Where all steps have equally many records, prompts tell what a token takes: they are read many tokens at a time.
        """
        used = self.prefix_cache
        if self.fixed_s is not None or used is None or not used.computed or used.computed_s is None:
            return self.fixed_s or 0.0
        token_s = used.computed_s / used.computed
        rest = self.device_s - used.computed_s - used.generated * token_s
        return max(rest, 0.0) / max(self.batches, 1)

    def host_floor(self, without: str = "") -> float:
        """What the host's stages take at least, one of them left out."""
        host = self.host_s
        each = {
            "load": host.get("load", 0.0),
            "prepare": host.get("prepare", 0.0) / self.at_once,
            "sink": host.get("finish", 0.0) + host.get("write", 0.0),
        }
        return max(seconds for stage, seconds in each.items() if stage != without)

    def gain(self, lost: float, floor: float) -> float:
        """What is won of `lost` seconds, in a run that takes at least `floor`."""
        return max(min(lost, self.wall_s - floor), 0.0)

    def device_gain(self, saved: float) -> float:
        """What is won if the device computes so much less: nothing where the host would not keep up."""
        return max(min(saved, self.device_s - self.host_floor()), 0.0)


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


def saving(numbers: AdviceInputs, gain_s: float) -> str:
    """Seconds saved of the seconds of the run, in words."""
    digits = 0 if numbers.wall_s >= 20 else 1
    return f"{gain_s:,.{digits}f} s of {numbers.wall_s:,.{digits}f} s"
