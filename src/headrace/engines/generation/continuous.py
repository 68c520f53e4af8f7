"""Text generation with transformers' paged continuous batching: requests join and leave between steps."""

from __future__ import annotations

import contextlib
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import torch

from headrace.device.placement import running
from headrace.engines.capabilities import PrefixCacheStats, Sleeper
from headrace.engines.generation.causal_lm import CausalLM, PromptSettings, TokenizedRequest, folder_of
from headrace.engines.generation.company import Trial
from headrace.engines.generation.options import Generation
from headrace.engines.generation.paging import PAGE, Pages, cannot_batch, check_pageable, open_cache, share_pages
from headrace.engines.generation.sampling import BatchSampler, Choose, TokenSampler, choose
from headrace.engines.generation.static import trial_of
from headrace.engines.generation.tensor_parallel import is_follower, load_options, loaded_together, start_ranks
from headrace.engines.profile import EngineProfile
from headrace.engines.requests.generation import GeneratedText
from headrace.engines.requests.vocabulary import TokenizedEngine
from headrace.errors import ConfigError, EngineDeadError, EngineError, ModelCodeError, RecordError, model_code

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.requests import RequestState

_TOKENS_PER_SLOT = 1_024
"""Default cache size per slot. Longer answers use the space of others."""


@dataclass(slots=True)
class ActiveAnswer:
    """A request in the engine."""

    ask: TokenizedRequest
    sampler: TokenSampler
    before: tuple[int, ...]
    """Generated before the request was removed and resumed."""
    cached: int | None = None
    """Tokens of the prompt that the prefix cache held when it began; None before."""


@dataclass(frozen=True, slots=True)
class ResumedAnswer:
    """A removed request with the tokens it has generated."""

    ask: TokenizedRequest
    sampler: TokenSampler
    generated: tuple[int, ...]
    cached: int | None


class GenerationEngine(TokenizedEngine):
    """Answers prompts and chats with a model from a Hugging Face folder; satisfies `StepEngine`.

    Raises:
        ConfigError: no such folder, or a parameter out of range.
        EngineError: the files cannot be loaded.
    """

    def __init__(self, options: Generation) -> None:
        prompting = PromptSettings.of(options)
        slots, size, shares = options.max_num_seqs, options.tensor_parallel_size, options.enable_prefix_caching
        self._answers: dict[int, ActiveAnswer] = {}
        self._choose: Choose = choose
        self._is_split = size > 1
        self._before_sleep = PrefixCacheStats(0, 0, 0)
        self._ranks = start_ranks(folder_of(options.model), size, options.device, partial(GenerationEngine, options))
        with loaded_together(self._ranks):
            split = load_options(size) if self._is_split else None
            self.tokens = self._lm = CausalLM(options, prompting, split)
            longest = self._lm.max_model_len
            wanted = (
                slots * min(longest, _TOKENS_PER_SLOT) if options.kv_cache_tokens is None else options.kv_cache_tokens
            )
            if wanted < longest:
                raise ConfigError(
                    f"``kv_cache_tokens`` is {wanted}: one answer may need {longest}; raise it or lower "
                    "``max_model_len``"
                )
            self._sampler = BatchSampler(self._chosen, is_split=self._is_split)
            self._attention = self._lm.model.config._attn_implementation
            check_pageable(self._lm.model, longest)
            trial = trial_of(self._lm)  # before its attention is replaced; all ranks of a split model take part
            self._pages = Pages(wanted, slots, shares, self._is_split)
            self._make_cache()
        self.profile = EngineProfile(
            batching="steps",
            max_in_flight=slots,
            max_cost=wanted,
            max_model_len=longest,
            splits=prompting.long.splits,
            followable=True,
            tokenizes=True,
            draws=True,
            caches_prefixes=self._scheduler is not None and shares is not False,
        )
        if not is_follower():  # which repeats the steps of rank 0
            with contextlib.ExitStack() as failed:
                failed.callback(self.close)
                self._try(trial)
                failed.pop_all()

    def _try(self, trial: Trial) -> None:
        """Answer a few prompts together: some attentions load, and then fail at the first step, or compute nonsense.

        Raises:
            EngineError: the model cannot be batched continuously.
        """
        try:
            with model_code():
                agrees = trial.agrees(self._together)
        except ModelCodeError as error:
            raise cannot_batch(f"its first step fails: {error}") from error
        if not agrees:
            raise cannot_batch("its answers beside others would not be those that it gives alone")
        if self._scheduler is not None:
            self._scheduler.count_from(PrefixCacheStats(0, 0, 0))

    def _together(
        self, asks: Sequence[TokenizedRequest], samplers: Sequence[TokenSampler], choose_noted: Choose
    ) -> None:
        self._choose = choose_noted
        for key, (ask, sampler) in enumerate(zip(asks, samplers, strict=True)):
            self.add(key, ResumedAnswer(ask, sampler, (), None))
        while self._answers:
            for _, result in self.step():
                if isinstance(result, Exception):
                    raise result
        self._choose = choose

    def _make_cache(self) -> None:
        """Make the key-value cache, and what schedules its pages."""
        self._manager, self._processor = open_cache(self._lm, self._sampler, self._pages)
        self._scheduler = share_pages(self._lm, self._processor, self._pages)
        if self._scheduler is not None:
            self._scheduler.on_start = self._note_cached

    def describe(self) -> Mapping[str, object]:
        """The model digest and all parameters that affect an answer."""
        return {"engine": "generation", **self._lm.describe()}

    def span(self, record: TokenizedRequest | ResumedAnswer) -> tuple[float, float]:
        """Tokens of the prompt with the first token of the answer, and with the longest allowed answer."""
        ask = record.ask if isinstance(record, ResumedAnswer) else record
        return len(ask.prompt) + 1, len(ask.prompt) + ask.sampling.max_tokens

    def group(self, record: TokenizedRequest | ResumedAnswer) -> int:
        """The first page of the prompt, which requests of one kind have in common."""
        return hash((record.ask if isinstance(record, ResumedAnswer) else record).prompt[:PAGE])

    def follow(self, payload: TokenizedRequest, listener: Callable[[str], None]) -> TokenizedRequest:
        """The same request, with `listener` called with the partial answer."""
        return replace(payload, listener=listener)

    def count_cached(self, payload: TokenizedRequest) -> TokenizedRequest:
        """The same request; its answer has `cached_tokens`."""
        return replace(payload, counts_cached=True)

    def add(self, key: int, record: TokenizedRequest | ResumedAnswer) -> None:
        """Add a request to the next step."""
        if isinstance(record, ResumedAnswer):
            answer = ActiveAnswer(record.ask, record.sampler, record.generated, record.cached)
        else:
            answer = ActiveAnswer(record, self._lm.sampler(record), ())
        ends = self._lm.ends_of(answer.ask)
        self._manager.add_request(
            [*answer.ask.prompt, *answer.before],
            request_id=str(key),
            max_new_tokens=answer.ask.sampling.max_tokens - len(answer.before),
            eos_token_id=sorted(ends) or -1,
        )
        self._answers[key] = answer

    def step(self) -> list[tuple[int, GeneratedText | Exception]]:
        """Generate one token for each answer, or process a part of a prompt.

        Raises:
            EngineOutOfMemoryError: the requests do not fit on the device.
            EngineDeadError: the device failed, or the engine is closed.
        """
        if self._lm.model is None:
            raise EngineDeadError("the generation engine is closed; create a new one")
        if self._processor is None:
            raise EngineError("the model sleeps in host memory; wake it first")
        with self._ranks.step() if self._ranks is not None else contextlib.nullcontext():
            self._run_step()
        finished = [*self._ended(), *self._stopped()]
        for key, answer in self._answers.items():
            if answer.ask.listener is not None:
                answer.ask.listener(self._lm.grown(answer.ask, self._generated(key)))
        return finished

    def _run_step(self) -> None:
        began = time.monotonic()
        with running(self._lm.device, lambda: f"a step of {len(self._answers)} answers"):
            if self._processor.prepare_next_batch():
                self._processor._generation_step(self._lm.model)
                self._processor.update_batch()
                if self._scheduler is not None:
                    self._scheduler.step_done(time.monotonic() - began)

    def repeat_step(self) -> None:
        """Run rank 0's step on another rank of a split model."""
        self._run_step()
        self._ended()

    def _ended(self) -> list[tuple[int, GeneratedText | Exception]]:
        """The answers that transformers has ended: by an end token, by `max_tokens`, or by an error."""
        ended: list[tuple[int, GeneratedText | Exception]] = []
        while True:
            try:
                output = self._manager.output_router.output_queue.get_nowait()
            except queue.Empty:
                return ended
            key = int(output.request_id)
            answer = self._answers.pop(key, None)
            if answer is None:
                continue
            if output.error is not None:
                ended.append((key, EngineError(f"transformers failed at the request: {output.error}")))
            else:
                ended.append((key, self._generation(answer, (*answer.before, *output.generated_tokens))))

    def _stopped(self) -> list[tuple[int, GeneratedText | Exception]]:
        """The answers that contain a stop string."""
        stopped: list[tuple[int, GeneratedText | Exception]] = []
        for key, answer in list(self._answers.items()):
            if not answer.ask.sampling.stop:
                continue
            generated = self._generated(key)
            if self._lm.stopped(answer.ask, generated):
                stopped.append((key, self._generation(answer, generated)))
                self.remove(key)
        return stopped

    def _generation(self, answer: ActiveAnswer, generated: Sequence[int]) -> GeneratedText | RecordError:
        result = self._lm.answer(answer.ask, generated, answer.sampler)
        if isinstance(result, RecordError):
            return result
        return {**result, "cached_tokens": answer.cached or 0} if answer.ask.counts_cached else result

    def _note_cached(self, request_id: str, found: int) -> None:
        answer = self._answers.get(int(request_id))
        if answer is not None and answer.cached is None:  # it may begin again, with its own pages
            answer.cached = found

    def needs(self, key: int) -> float:
        """Tokens of the prompt and the answer, including the next token."""
        return len(self._answers[key].ask.prompt) + self._count(key) + 1

    def shared(self, key: int) -> float:
        """Tokens of the prompt in pages of an earlier request."""
        return 0 if self._scheduler is None else self._scheduler.shared(str(key))

    def overlap(self, record: TokenizedRequest | ResumedAnswer) -> float:
        """Tokens of the prompt in pages of requests that are in the engine."""
        if self._scheduler is None:
            return 0
        ask, before = (record.ask, record.generated) if isinstance(record, ResumedAnswer) else (record, ())
        return self._scheduler.pages.held((*ask.prompt, *before))

    def prefix_cache_stats(self) -> PrefixCacheStats:
        """Counts of tokens, also if no pages are shared; 0 with transformers' own scheduler."""
        return self._before_sleep if self._scheduler is None else self._scheduler.stats

    def remove(self, key: int) -> ResumedAnswer | None:
        """Remove a request. When it resumes, its generated tokens are prefilled, not generated again."""
        answer = self._answers.get(key)
        if answer is None:
            return None
        generated = self._generated(key)
        del self._answers[key]
        if self._state(key) is None:
            self._manager.cancel_request(str(key))  # not yet scheduled
        else:
            if self._ranks is not None:
                self._ranks.cancel(str(key))
            self.cancel(str(key))
        return ResumedAnswer(answer.ask, answer.sampler, generated, answer.cached)

    def cancel(self, request_id: str) -> None:
        """Remove a request that is scheduled, on this rank alone."""
        self._processor.scheduler.set_request_cancellation(request_id)
        self._processor.scheduler.clear_cancelled_requests()

    @property
    def sleeper(self) -> Sleeper | None:
        """Moves the model to host memory; None if nothing is gained, as on a CPU."""
        return self if self._lm.can_sleep else None

    def sleep(self) -> None:
        """Move the weights to host memory. The key-value cache is freed."""
        self._before_sleep = self.prefix_cache_stats()
        self._drop_cache()
        self._lm.sleep()

    def wake(self) -> None:
        """Undo `sleep`. The key-value cache is made anew, and empty."""
        self._lm.wake()
        self._lm.model.set_attn_implementation(self._attention)  # the first cache has replaced it
        self._make_cache()
        if self._scheduler is not None:
            self._scheduler.count_from(self._before_sleep)

    def _drop_cache(self) -> None:
        self._answers.clear()
        self._manager = self._processor = self._scheduler = None

    def close(self) -> None:
        """Free the model's memory. Safe to call twice."""
        self._drop_cache()
        self._lm.close()
        if self._ranks is not None:
            self._ranks.close()

    def _state(self, key: int) -> RequestState | None:
        scheduler = self._processor.scheduler
        return scheduler.active_requests.get(str(key)) or scheduler.waiting_requests.get(str(key))

    def _generated(self, key: int) -> tuple[int, ...]:
        answer, state = self._answers[key], self._state(key)
        if state is None:
            return answer.before
        # After evicting a request, transformers appends its generated tokens to the prompt.
        return (*state.initial_tokens[len(answer.ask.prompt) :], *state.generated_tokens)

    def _count(self, key: int) -> int:
        """The number of tokens in `_generated`."""
        answer, state = self._answers[key], self._state(key)
        if state is None:
            return len(answer.before)
        return len(state.initial_tokens) + len(state.generated_tokens) - len(answer.ask.prompt)

    def _chosen(self, requests: Sequence[str], scores: torch.Tensor) -> list[int]:
        """The next tokens of these requests."""
        keys = [int(request) for request in requests]
        samplers = [self._answers[key].sampler for key in keys]
        tokens = self._choose(scores, samplers, [self._generated(key) for key in keys])
        return list(tokens)
