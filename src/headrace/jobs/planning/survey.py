"""Describes the input of a job from a sample, prepared as in the job."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headrace.engines.requests.templates import chat_of
from headrace.errors import RecordError
from headrace.events import PrecisionChosen
from headrace.io.base import Chunk, Source
from headrace.jobs.pipeline.job import Job, OrderPlan
from headrace.jobs.pipeline.prefixes import prompt_text
from headrace.jobs.pipeline.prepare import Preparation
from headrace.jobs.pipeline.prepare_calls import InTime
from headrace.jobs.pipeline.work import Work
from headrace.jobs.planning.repeats import Repeats, repeats, template_repeats
from headrace.records import LeftOut

_BLOCK = 128
"""Consecutive rows of a sample."""
_BLOCKS = 8
_EXAMPLES = 3
_PROMPTS = 8192
_PROMPT_SIZE = 4_000
"""Maximum prompts that are compared, and the characters that each may have on average."""
_PROMPTS_S = 5.0
"""Maximum seconds to read these."""
_SMALL = 64 * 1024
"""Bytes of an input whose first rows may be all."""
_READ_S = 20.0
"""Maximum seconds to read for a sample; the rest is assumed to be similar."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a sample shows about the input."""

    records: int | None
    """Rows of the whole input; None if unknown."""
    counted: bool
    """Whether that is exact, not estimated from the size."""
    sampled: int
    failed: int
    """In the sample: could not be read or prepared."""
    truncated: int
    """In the sample: longer than the model's limit."""
    split: int
    """In the sample: longer, and split into chunks."""
    chunks: int
    """How many chunks these make."""
    work: tuple[Work, ...]
    """The other records of the sample, ready for the engine."""
    examples: tuple[object, ...]
    """Some inputs for the engine."""
    prepare_s: float
    """Seconds per record on one worker."""
    left_out: tuple[LeftOut, ...] = ()
    """Parts of the input that are not read, as far as known."""
    model: str | None = None
    """The model with its commit, if it was downloaded."""
    precision: PrecisionChosen | None = None
    """The model's dtype, if the sample decided it."""
    repeats: Repeats | None = None
    """What the prompts repeat, for an engine that reads a common beginning once."""
    form: str | None = None
    """What each prompt says of the form of its answer; None for no form."""
    order: OrderPlan | None = None
    """The order of work, as far as it is known before the prompts."""

    def quantile(self, fraction: float) -> int:
        """The quantile of the costs in the sample, in the engine's unit; 0 without a sample."""
        costs = sorted(item.cost for item in self.work)
        return costs[min(int(fraction * len(costs)), len(costs) - 1)] if costs else 0


def survey(job: Job, *, spread: bool) -> Survey:
    """Sample the input: its first rows, or with `spread` blocks of rows at equal distances. Blocks.

    Raises:
        JobError: the input cannot be read.
    """
    preparation = Preparation(
        job.columns,
        job.engine,
        job.user,
        dedupe=False,
        in_time=InTime(job.settings.config.call_timeout_s),
        form=job.form,
        samples=job.samples,
    )
    sample = _SampleReader(job.source)
    work: list[Work] = []
    left_out: list[LeftOut] = []
    examples: list[object] = []
    failed = truncated = split = chunks = 0
    prepare_s = 0.0
    for chunk in sample.spread() if spread else sample.head():
        prepared, event = preparation.prepare(chunk)
        work += prepared.work
        failed += sum(isinstance(answer, Exception) for _, answer in prepared.answered)
        truncated += prepared.truncated
        split += prepared.split
        chunks += prepared.chunks
        left_out += chunk.left_out
        prepare_s += event.duration_s
        if len(examples) < _EXAMPLES:
            examples += _inputs(job, chunk)
    sampled = len(work) + failed
    return Survey(
        records=sample.records,
        counted=sample.counted,
        sampled=sampled,
        failed=failed,
        truncated=truncated,
        split=split,
        chunks=chunks,
        work=tuple(work),
        examples=tuple(examples[:_EXAMPLES]),
        form=None if job.form is None else job.form.words,
        prepare_s=prepare_s / max(sampled, 1),
        left_out=tuple(left_out),
    )


def survey_prompts(job: Job, most: int = _PROMPTS) -> Repeats | None:
    """What the first prompts of a language model's job repeat, `most` at most; None for other engines. Blocks.

    Raises:
        JobError: the input cannot be read.
    """
    if job.order is None:
        return None
    prompts: list[str] = []
    fields: list[dict[str, str]] = []
    size, ends = 0, time.monotonic() + _PROMPTS_S
    for chunk in job.source.chunks(lambda position: position):
        for _, record in job.user.prepared(chunk.records):
            if isinstance(record, Exception):
                continue
            try:
                prompts.append(prompt_text(job.columns.input_of(record)))
                fields.append(job.columns.fields_of(record))
            except RecordError:
                continue
            size += len(prompts[-1])
        if len(prompts) >= most or size >= most * _PROMPT_SIZE or time.monotonic() > ends:
            break
    template, prompts = job.columns.template, prompts[:most]
    return (
        repeats(prompts)
        if template is None or chat_of(template) is not None
        else template_repeats(template, fields[:most])
    )


def _inputs(job: Job, chunk: Chunk) -> Iterator[object]:
    for _, record in job.user.prepared(chunk.records[:_EXAMPLES]):
        if not isinstance(record, Exception):
            try:
                yield job.columns.input_of(record)
            except RecordError:
                continue


class _SampleReader:
    def __init__(self, source: Source) -> None:
        self._source = source
        self.records = source.total_records
        self.counted = source.total_records is not None
        self._seen = 0

    def head(self) -> Iterator[Chunk]:
        """The first chunk that has rows."""
        chunks = self._source.chunks(lambda position: position)
        yield from self._read(chunks, lambda rows: rows > 0)
        total = self._source.total_bytes
        if not self.counted and total is not None and total <= _SMALL and not any(chunk.rows for chunk in chunks):
            self.records, self.counted = self._seen, True

    def spread(self) -> Iterator[Chunk]:
        """Blocks of rows at equal distances."""
        for _ in self.head():  # for the number of rows
            pass
        stride = max(_BLOCK, (self.records or 0) // _BLOCKS)

        def next_wanted(position: int) -> int:
            block = position // stride * stride
            return position if position < block + _BLOCK else block + stride

        ends = time.monotonic() + _READ_S
        return self._read(self._source.chunks(next_wanted), lambda _: time.monotonic() > ends)

    def _read(self, chunks: Iterator[Chunk], enough: Callable[[int], bool]) -> Iterator[Chunk]:
        size = 0
        for chunk in chunks:
            size += chunk.bytes
            rows = chunk.rows
            if rows and not self.counted and size and self._source.total_bytes:
                read = itertools.chain(chunk.records, (failed.record for failed in chunk.failures))
                last = max(record.position for record in read)
                self._seen = last + 1
                self.records = max(last + 1, round((last + 1) * self._source.total_bytes / size))
            if rows or chunk.left_out:
                yield chunk
            if enough(rows):
                return
