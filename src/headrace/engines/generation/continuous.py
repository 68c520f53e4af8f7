"""Text generation in continuous batches: requests join and leave between steps."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import torch

from headrace.device.native import hardware, has_kernels
from headrace.device.placement import naming_device_errors
from headrace.device.step_sizes import StepTuner
from headrace.engines.base import PartialAnswer
from headrace.engines.capabilities import PrefixCacheStats, Sleeper
from headrace.engines.generation.batch_invariance import Trial
from headrace.engines.generation.causal_lm import CausalLM, TokenizedRequest, folder_of
from headrace.engines.generation.decode_graphs import DecodeGraphs
from headrace.engines.generation.options import Generation, StaticGeneration
from headrace.engines.generation.paged_attention import PAGE, PagedModel, StepPart
from headrace.engines.generation.paging import (
    CacheShapes,
    CannotBatchError,
    check_length,
    choose_size,
    open_cache,
    step_sizes,
)
from headrace.engines.generation.prefix_cache import PrefixCache
from headrace.engines.generation.sampling import TokenSampler, choose
from headrace.engines.generation.scheduler import AnswerTokens, PageScheduler, PlannedPart
from headrace.engines.generation.static import StaticGenerationEngine, trial_of
from headrace.engines.generation.tensor_parallel import is_follower, load_options, start_ranks
from headrace.engines.networks.adapters import NamedAdapters
from headrace.engines.profile import EngineProfile
from headrace.engines.requests.generation import GeneratedText
from headrace.engines.requests.vocabulary import TokenizedEngine
from headrace.errors import (
    EngineDeadError,
    EngineError,
    EngineOutOfMemoryError,
    ModelCodeError,
    RecordError,
    model_code,
)

logger = logging.getLogger("headrace")


_APART = 8
"""Steps that only continue answers, at most, while a few prompts wait: such steps are replayed as CUDA graphs."""
_NOTHING = PrefixCacheStats(0, 0, 0)


@dataclass(slots=True, eq=False, kw_only=True)
class Answer(AnswerTokens):
    """A request that has begun. Where it is removed and added again, its tokens are not generated again."""

    ask: TokenizedRequest
    sampler: TokenSampler


def load(options: Generation) -> GenerationEngine | StaticGenerationEngine:
    """An engine that batches continuously, or in static batches if the model does not allow it, which is said.

    Raises:
        ConfigError: no such folder, or a parameter out of range.
        EngineError: the files cannot be loaded.
        CannotBatchError: an option needs continuous batches.
    """
    try:
        return GenerationEngine(options)
    except CannotBatchError as error:
        caches = options.enable_prefix_caching or options.kv_cache_tokens is not None
        if options.tensor_parallel_size > 1 or caches or options.adapters:
            raise
        reason = error.reason
    logger.warning(
        "this model cannot be batched continuously: %s; prompts run in static batches, which is slower", reason
    )
    given = {one.name: getattr(options, one.name, None) for one in fields(StaticGeneration)}
    return StaticGenerationEngine(StaticGeneration(**{name: one for name, one in given.items() if one is not None}))


class GenerationEngine(TokenizedEngine):
    """Answers prompts and chats with a model from a Hugging Face folder; satisfies `StepEngine`.

    Raises:
        ConfigError: no such folder, or a parameter out of range.
        EngineError: the files cannot be loaded.
        CannotBatchError: the model cannot be batched continuously.
    """

    def __init__(self, options: Generation) -> None:
        size = options.tensor_parallel_size
        self._shares = options.enable_prefix_caching is not False
        self._answers: dict[int, Answer] = {}
        self._clock = time.monotonic
        self._scheduler = PageScheduler(PrefixCache((), PAGE, self._shares), _NOTHING)
        self._paged: PagedModel | None = None
        self._graphs: DecodeGraphs | None = None
        self._ranks = start_ranks(folder_of(options.model), size, options.device, partial(GenerationEngine, options))
        together = contextlib.nullcontext() if self._ranks is None else self._ranks.loading()
        with together, contextlib.ExitStack() as failed:
            split = load_options(size) if size > 1 else None
            self.tokens = self._lm = CausalLM(options, split, options.adapters)
            failed.callback(self._lm.close)
            self._adapters = NamedAdapters(self._lm.model, options.adapters) if options.adapters else None
            self._variants = {name: number for number, name in enumerate((None, *(options.adapters or ())))}
            check_length(self._lm)
            trial = trial_of(self._lm)  # before its attention is replaced; all ranks of a split model take part
            kind = self._lm.device.type
            if kind == "cpu" and size == 1:  # what other processes take of the cores says nothing of a step's size
                self._clock = time.thread_time
            self._forces = kind == "cpu"  # elsewhere a step of single tokens is replayed, or computed in one kernel
            self._kernels = has_kernels(self._lm.device)
            start, most = step_sizes(kind, options.max_num_seqs, options.max_num_batched_tokens)
            self.steps = StepTuner(start, most)
            self._shapes = CacheShapes(self._lm, most)
            self._size = choose_size(self._lm, self._shapes, start, most, options)
            self._open()
            failed.pop_all()
        self.profile = EngineProfile(
            batching="steps",
            max_in_flight=start.answers,
            max_cost=self._size.tokens,
            max_model_len=self._lm.max_model_len,
            splits=self._lm.long.splits,
            followable=True,
            sizes_steps=start != most,
            tokenizes=True,
            holds_forms=True,
            draws=True,
            caches_prefixes=self._shares,
        )
        if not is_follower():  # which repeats the steps of rank 0
            with contextlib.ExitStack() as failed:
                failed.callback(self.close)
                self._try(trial)
                failed.pop_all()

    def _open(self) -> None:
        """Make the key-value cache, and what schedules its pages."""
        self._paged = open_cache(self._lm, self._shapes.shapes, self._size, self._kernels)
        replays = self._kernels and self._ranks is None and not is_follower() and self._adapters is None
        self._graphs = DecodeGraphs(self._paged) if replays else None
        self.forget()

    def forget(self) -> None:
        pages = PrefixCache(range(self._size.pages), PAGE, self._shares)
        self._scheduler = PageScheduler(pages, self._scheduler.stats, _APART if self._graphs is not None else 0)

    def _try(self, trial: Trial) -> None:
        """Answer a few prompts together: some attentions load, and then fail at the first step, or compute nonsense.

        Raises:
            CannotBatchError: the model cannot be batched continuously.
        """
        reason = self._fault(trial)
        if reason and self._kernels:
            logger.warning("answers are computed without Headrace's own kernels, which is slower: %s", reason)
            self._kernels = False
            self._answers.clear()
            self._paged = self._graphs = None  # its memory is needed
            self._open()
            reason = self._fault(trial)
        if reason:
            raise CannotBatchError(reason)
        self._scheduler.stats = _NOTHING

    def _fault(self, trial: Trial) -> str:
        """Why answers must not be computed together; empty if they may."""
        try:
            with model_code():
                agrees = trial.agrees(self._together)
        except ModelCodeError as error:
            return f"its first step fails: {error}"
        return "" if agrees else "its answers beside others would not be those that it gives alone"

    def _together(self, asks: Sequence[TokenizedRequest], samplers: Sequence[TokenSampler]) -> None:
        for key, (ask, sampler) in enumerate(zip(asks, samplers, strict=True)):
            self.add(key, self._answer(ask, sampler))
        while self._answers:
            self.step()

    def describe(self) -> Mapping[str, object]:
        """The model digest and all parameters that affect an answer."""
        return {"engine": "generation", **self._lm.describe()}

    def hardware(self) -> Mapping[str, object]:
        """The device, its threads and PyTorch's version."""
        return hardware(self._lm.device)

    def span(self, record: TokenizedRequest | Answer) -> tuple[float, float]:
        """Tokens of the prompt with the first token of the answer, and with the longest allowed answer."""
        ask = record.ask if isinstance(record, Answer) else record
        return len(ask.prompt) + 1, len(ask.prompt) + ask.sampling.max_tokens

    def group(self, record: TokenizedRequest | Answer) -> int:
        """The first page of the prompt, which requests of one kind have in common."""
        ask = record.ask if isinstance(record, Answer) else record
        return hash((ask.adapter, ask.prompt[:PAGE]))

    def follow(self, payload: TokenizedRequest, listener: Callable[[PartialAnswer], None]) -> TokenizedRequest:
        return replace(payload, listener=listener)

    def count_cached(self, payload: TokenizedRequest) -> TokenizedRequest:
        return replace(payload, counts_cached=True)

    def add(self, key: int, record: TokenizedRequest | Answer) -> None:
        if isinstance(record, TokenizedRequest):
            record = self._answer(record, self._lm.sampler(record, forces=self._forces))
            record.generated.extend(record.sampler.forced(0))
        record.key, record.computed = key, 0
        self._answers[key] = record
        self._scheduler.add(record)

    def _answer(self, ask: TokenizedRequest, sampler: TokenSampler) -> Answer:
        return Answer(0, ask.prompt, [], variant=self._variants[ask.adapter], ask=ask, sampler=sampler)

    def step(self) -> list[tuple[int, GeneratedText | Exception]]:
        """Generate one token for each answer, or process a part of a prompt.

        Raises:
            EngineOutOfMemoryError: the requests do not fit on the device.
            EngineDeadError: the device failed, or the engine is closed.
        """
        if self._lm.model is None:
            raise EngineDeadError("the generation engine is closed; create a new one")
        if self._paged is None:
            raise EngineError("the model sleeps in host memory; wake it first")
        planned = self._scheduler.plan(self.steps.next)
        began, clocked = time.monotonic(), self._clock()
        choosing = [self._answers[part.tokens.key] for part in planned if part.chooses]
        try:
            tokens = self._compute(planned, choosing) if planned else []
        except EngineOutOfMemoryError:
            self.steps.out_of_memory()
            raise
        counts = self._scheduler.done(planned, time.monotonic() - began)
        self.steps.ran(*counts, self._clock() - clocked)
        finished: list[tuple[int, GeneratedText | Exception]] = []
        for answer, token in zip(choosing, tokens, strict=True):
            generated, ask = answer.generated, answer.ask
            generated.append(token)
            if self._lm.ended(ask, generated):
                finished.append((answer.key, self._generation(answer)))
                self.remove(answer.key)
                continue
            generated.extend(answer.sampler.forced(len(generated)))
            if ask.listener is not None:
                ask.listener(self._lm.grown(ask, generated))
        return finished

    def _compute(self, planned: Sequence[PlannedPart], choosing: Sequence[Answer]) -> list[int]:
        """Run a step; the next token of each answer that has one."""
        parts = []
        for part in planned:
            start, key = part.tokens.computed, part.tokens.key
            ids = part.tokens.between(start, start + part.length)
            parts.append(StepPart(ids, start, self._scheduler.pages.tables[key], part.chooses))
        with (
            self._ranks.step(parts) if self._ranks is not None else contextlib.nullcontext(),
            naming_device_errors(self._lm.device, lambda: f"a step of {len(self._answers)} answers"),
        ):
            if self._adapters is not None:
                self._adapters.place((self._answers[one.tokens.key].ask.adapter, one.length) for one in planned)
            logits = self._run(parts)
            samplers = [answer.sampler for answer in choosing]
            return choose(logits, samplers, [answer.generated for answer in choosing]) if choosing else []

    def _run(self, parts: Sequence[StepPart]) -> torch.Tensor:
        assert self._paged is not None, "not asleep"
        replayed = None if self._graphs is None else self._graphs.run(parts)
        return self._paged.run(parts) if replayed is None else replayed

    def repeat_step(self, parts: Sequence[StepPart]) -> None:
        """Run rank 0's step on another rank of a split model, which chooses no tokens."""
        with naming_device_errors(self._lm.device, lambda: f"a step of {len(parts)} answers"):
            self._run(parts)

    def _generation(self, answer: Answer) -> GeneratedText | RecordError:
        result = self._lm.answer(answer.ask, answer.generated, answer.sampler)
        if isinstance(result, RecordError):
            return result
        return {**result, "cached_tokens": answer.cached or 0} if answer.ask.counts_cached else result

    def needs(self, key: int) -> float:
        """Tokens of the prompt and the answer, including the next token."""
        return self._answers[key].count + 1

    def shared(self, key: int) -> float:
        """Tokens of the prompt in pages of an earlier request."""
        return self._scheduler.shared(key)

    def overlap(self, record: TokenizedRequest | AnswerTokens) -> float:
        """Tokens of the prompt in pages of requests that are in the engine."""
        if isinstance(record, TokenizedRequest):
            record = AnswerTokens(0, record.prompt, [], variant=self._variants[record.adapter])
        return self._scheduler.pages.held(record.opening(record.count))

    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Counts of tokens, also if no pages are shared."""
        return self._scheduler.stats

    def remove(self, key: int) -> Answer | None:
        """Remove a request. When it resumes, its generated tokens are prefilled, not generated again."""
        self._scheduler.remove(key)
        return self._answers.pop(key, None)

    @property
    def sleeper(self) -> Sleeper | None:
        """Moves the model to host memory; None if nothing is gained, as on a CPU."""
        return self if self._lm.can_sleep else None

    def sleep(self) -> None:
        """Move the weights to host memory. The key-value cache is freed."""
        self._drop_cache()
        self._lm.sleep()

    def wake(self) -> None:
        """Undo `sleep`. The key-value cache is made anew, and empty."""
        self._lm.wake()
        self._open()

    def _drop_cache(self) -> None:
        self._answers.clear()
        self._paged = self._graphs = None

    def close(self) -> None:
        """Free the model's memory. Safe to call twice."""
        self._drop_cache()
        self._lm.close()
        if self._ranks is not None:
            self._ranks.close()
