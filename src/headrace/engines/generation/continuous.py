"""Text generation with transformers' paged continuous batching: answers join and leave between steps."""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.logits_process import LogitsProcessorList

from headrace.batching.options import whole
from headrace.device.placement import running
from headrace.engines.base import Prepared
from headrace.engines.generation.causal_lm import CausalLM, PromptSettings, TokenizedRequest
from headrace.engines.generation.ragged_attention import use_ragged_attention
from headrace.engines.generation.sampling import TokenSampler
from headrace.engines.profile import EngineProfile
from headrace.engines.requests import Generation, default_sampling
from headrace.errors import ConfigError, EngineDeadError, EngineError

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.continuous_api import (
        ContinuousBatchingManager,
        ContinuousBatchProcessor,
    )
    from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState

_PAGE = 32
"""Tokens of a page of the key-value cache. transformers' own 256 would waste most of it on short answers."""

_BATCH_TOKENS = {"cpu": 512, "cuda": 8_192}
"""Most tokens of one step: longer prompts are read in several. It bounds the attention mask, which needs this many rows
of the whole cache where no flash attention is there."""

_TOKENS_PER_SLOT = 1_024
"""Context that the cache holds for each slot, where nothing else is said. Longer answers take their neighbours'."""


@dataclass(slots=True)
class _Answer:
    """A request in the engine."""

    ask: TokenizedRequest
    draw: TokenSampler
    before: tuple[int, ...]
    """Generated before it was sent back."""


@dataclass(frozen=True, slots=True)
class _Resumed:
    """A request that was sent back, with what it had."""

    ask: TokenizedRequest
    draw: TokenSampler
    generated: tuple[int, ...]


class GenerationEngine:
    """Answers prompts and chats with a model from a Hugging Face folder. It is a `StepEngine`.

    Args:
        model: a local folder; None for the arithmetic model that comes with Headrace.
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
        dtype: "auto" (float32 on CPU, the weights' own on CUDA), "float32", "float16" or "bfloat16".
        max_model_len: longest prompt and answer together, in tokens; None for the model's own limit.
        max_num_seqs: answers generated at a time.
        kv_cache_tokens: what these may hold together, in tokens; None for what suits `max_num_seqs`.
        chat: a plain text is a user's message, not a prompt to go on from.
        system_prompt: begins each chat that has no system message of its own; implies `chat`.
        seed: of all random numbers, together with each prompt; a request's own seed goes before it.
        sampling: how answers are drawn where a request does not say: `max_tokens`, `temperature`, `top_p`, `top_k`,
            `min_p`, `stop`, `ignore_eos` and so on, see `headrace.engines.requests.Sampling`.

    Raises:
        ConfigError: no such folder, or a parameter out of range.
        EngineError: the files cannot be loaded.
    """

    def __init__(  # noqa: PLR0913  # keyword-only options, each with a flag
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 64,
        kv_cache_tokens: int | None = None,
        chat: bool = False,
        system_prompt: str | None = None,
        seed: int = 0,
        **sampling: object,
    ) -> None:
        prompting = PromptSettings(default_sampling(sampling), system_prompt, chat, seed)
        self._lm = CausalLM(model, prompting, device, dtype, max_model_len)
        whole("max_num_seqs", max_num_seqs, 1)
        longest = self._lm.max_model_len
        wanted = max_num_seqs * min(longest, _TOKENS_PER_SLOT) if kv_cache_tokens is None else kv_cache_tokens
        if wanted < longest:
            raise ConfigError(
                f"kv_cache_tokens is {wanted}: one answer may need {longest}; raise it or lower max_model_len"
            )
        self._sampler = _Sampler(self._choose)
        self._answers: dict[int, _Answer] = {}
        with torch.inference_mode():
            # A page more for each answer, whose last one is seldom full, so that the budget is in tokens.
            self._manager, self._processor = self._open(-(-wanted // _PAGE) + max_num_seqs + 1, max_num_seqs)
        self.profile = EngineProfile(
            batching="steps", max_in_flight=max_num_seqs, max_cost=wanted, max_model_len=longest, followable=True
        )

    def _open(self, pages: int, slots: int) -> tuple[ContinuousBatchingManager, ContinuousBatchProcessor]:
        config = ContinuousBatchingConfig(
            page_size=_PAGE,
            num_blocks=pages,
            max_batch_tokens=max(_BATCH_TOKENS[self._lm.device.type], slots),
            max_requests_per_batch=slots,
            safety_margin=0.0,  # the batcher keeps to the budget
            allow_block_sharing=False,
            # Each step is driven from here, and tokens are chosen here: nothing may run ahead or be recorded.
            use_async_batching=False,
            use_cuda_graph=False,
            auto_switch_to_flash=self._lm.device.type == "cuda",
        )
        ends = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=self._lm.pad_token)
        if not getattr(self._lm.model, "_supports_attention_backend", False):
            # transformers would only warn, and go on with answers that do not see what came before.
            raise _cannot_batch("its attention cannot be told where each answer is kept")
        try:
            manager = self._lm.model.init_continuous_batching(ends, config)
            manager.logit_processor = self._sampler
            processor = manager._create_batch_processor()
        except (torch.OutOfMemoryError, MemoryError) as error:
            raise EngineError(
                f"{self._lm.device} has no room for a cache of {pages * _PAGE:,} tokens; lower kv_cache_tokens, "
                "max_num_seqs or max_model_len"
            ) from error
        except (ValueError, NotImplementedError) as error:
            raise _cannot_batch(str(error).strip().splitlines()[0]) from error
        if self._lm.device.type == "cpu":
            use_ragged_attention(self._lm.model, processor.cache)
        return manager, processor

    def describe(self) -> Mapping[str, object]:
        """Model digest and every parameter that changes an answer."""
        return {"engine": "generation", **self._lm.describe()}

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[TokenizedRequest] | Exception]:
        """Each request in tokens; a RecordError where it cannot be answered."""
        return self._lm.prepare(inputs)

    def span(self, record: TokenizedRequest | _Resumed) -> tuple[float, float]:
        """Tokens: the prompt's with the first of the answer, and with the longest answer allowed."""
        ask = record.ask if isinstance(record, _Resumed) else record
        return len(ask.prompt) + 1, len(ask.prompt) + ask.sampling.max_tokens

    def follow(self, payload: TokenizedRequest, listener: Callable[[str], None]) -> TokenizedRequest:
        """The same request, whose answer is told to `listener` while it grows."""
        return replace(payload, listener=listener)

    def add(self, key: int, record: TokenizedRequest | _Resumed) -> None:
        """Let a request join the next step."""
        if isinstance(record, _Resumed):
            answer = _Answer(record.ask, record.draw, record.generated)
        else:
            answer = _Answer(record, self._lm.draw(record), ())
        ends = self._lm.ends_of(answer.ask)
        self._manager.add_request(
            [*answer.ask.prompt, *answer.before],
            request_id=str(key),
            max_new_tokens=answer.ask.sampling.max_tokens - len(answer.before),
            eos_token_id=sorted(ends) or -1,
        )
        self._answers[key] = answer

    def step(self) -> list[tuple[int, Generation | Exception]]:
        """One token more for every answer, or a part of a prompt read.

        Raises:
            EngineOutOfMemoryError: the device has no room for so many.
            EngineDeadError: the device failed, or the engine is closed.
        """
        if self._lm.model is None:
            raise EngineDeadError("the generation engine is closed; create a new one")
        with running(self._lm.device, lambda: f"a step of {len(self._answers)} answers"):
            if self._processor.prepare_next_batch():
                self._processor._generation_step(self._lm.model)
                self._processor.update_batch()
        finished = [*self._ended(), *self._stopped()]
        self._tell()
        return finished

    def _tell(self) -> None:
        """Let those who follow an answer know how far it is."""
        for key, answer in self._answers.items():
            if answer.ask.listener is not None:
                answer.ask.listener(self._lm.grown(answer.ask, self._generated(key)))

    def _ended(self) -> list[tuple[int, Generation | Exception]]:
        """Those that transformers itself has ended: an end token, enough tokens, or an error."""
        ended: list[tuple[int, Generation | Exception]] = []
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
                ended.append((key, EngineError(f"transformers gave the request up: {output.error}")))
            else:
                ended.append((key, self._lm.answer(answer.ask, (*answer.before, *output.generated_tokens))))

    def _stopped(self) -> list[tuple[int, Generation | Exception]]:
        """Those that have come to a stop string."""
        stopped: list[tuple[int, Generation | Exception]] = []
        for key, answer in list(self._answers.items()):
            if not answer.ask.sampling.stop:
                continue
            generated = self._generated(key)
            if self._lm.stopped(answer.ask, generated):
                stopped.append((key, self._lm.answer(answer.ask, generated)))
                self.remove(key)
        return stopped

    def needs(self, key: int) -> float:
        """Tokens of the prompt and of the answer with the next one."""
        return len(self._answers[key].ask.prompt) + self._count(key) + 1

    def remove(self, key: int) -> _Resumed | None:
        """Take a request out; what was generated is read again, not made again, when it comes back."""
        answer = self._answers.get(key)
        if answer is None:
            return None
        generated = self._generated(key)
        del self._answers[key]
        scheduler = self._processor.scheduler
        if self._state(key) is None:
            self._manager.cancel_request(str(key))  # not yet taken in: it is dropped there
        else:
            scheduler.set_request_cancellation(str(key))
            scheduler.clear_cancelled_requests()
        return _Resumed(answer.ask, answer.draw, generated)

    def close(self) -> None:
        """Free the model's memory. Safe to call twice."""
        self._answers.clear()
        self._manager = self._processor = None
        self._lm.close()

    def _state(self, key: int) -> RequestState | None:
        scheduler = self._processor.scheduler
        return scheduler.active_requests.get(str(key)) or scheduler.waiting_requests.get(str(key))

    def _generated(self, key: int) -> tuple[int, ...]:
        answer, state = self._answers[key], self._state(key)
        if state is None:
            return answer.before
        # What transformers has put at the end of the prompt after throwing the request out is part of the answer too.
        return (*state.initial_tokens[len(answer.ask.prompt) :], *state.generated_tokens)

    def _count(self, key: int) -> int:
        """How many tokens `_generated` has."""
        answer, state = self._answers[key], self._state(key)
        if state is None:
            return len(answer.before)
        return len(state.initial_tokens) + len(state.generated_tokens) - len(answer.ask.prompt)

    def _choose(self, request_id: str, scores: torch.Tensor, row: int) -> None:
        """Make the token that the request's own rule draws the likeliest, unless the likeliest is what it takes."""
        key = int(request_id)
        draw = self._answers[key].draw
        if draw.changes(self._count(key)):
            token = draw.next_token(scores[row], self._generated(key))
            scores[row] = -torch.inf
            scores[row, token] = 0.0


def _cannot_batch(reason: str) -> EngineError:
    return EngineError(f"transformers cannot batch this model continuously: {reason}; use the engine static, or vllm")


class _Sampler(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]  # transformers has no types
    """Chooses each request's next token by its own rule; the greedy ones are left to transformers."""

    def __init__(self, choose: Callable[[str, torch.Tensor, int], None]) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self._choose = choose
        self._requests: list[str] = []

    def prepare_tensor_args(
        self, requests_in_batch: list[FutureRequestState], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Note whose tokens are next, in the order of the logits."""
        self._requests = [request.state.request_id for request in requests_in_batch if request.has_new_token]
        return arg_storage

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, logits_processor_args: object) -> torch.Tensor:  # noqa: ARG002
        """Scores of shape (requests, vocabulary) in which the chosen token is the highest."""
        for row, request_id in enumerate(self._requests):
            self._choose(request_id, scores, row)
        return scores
