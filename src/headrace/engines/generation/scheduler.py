"""Chooses what transformers computes in each step, with pages of the key-value cache that requests share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from transformers.generation.continuous_batching.cache import PagedAttentionCache
from transformers.generation.continuous_batching.requests import FutureRequestState, RequestState, RequestStatus
from transformers.generation.continuous_batching.scheduler import Scheduler

from headrace.engines.capabilities import PrefixCacheStats
from headrace.engines.generation.prefix_cache import PrefixCache


@dataclass(slots=True)
class _StepPlan:
    """What is left of a step's limits, and who takes part in it."""

    tokens: int
    reads: float
    """Tokens that may be read from the cache."""
    requests: int
    fast: bool
    """Whether every request computes one token, which a kernel reads from the pages."""
    parts: list[FutureRequestState] = field(default_factory=list)
    prompts: int = 0
    """Tokens of prompts that it computes."""

    @property
    def full(self) -> bool:
        return self.tokens <= 0 or self.requests <= 0


class PageScheduler(Scheduler):  # type: ignore[misc]  # transformers has no types
    """Schedules requests first come, first served; answers come before prompts.

    transformers' own schedulers compute a prefix for each request that arrives with it, never drop one page at a
    time, and do not keep the pages of a request that ends with its first token.

    A prompt waits while another request computes its next page. If no page is left, the newest request gives its pages
    back and starts again later; the batcher's budget makes that rare.

    Args:
        cache: of a model whose layers all have full attention.
        max_requests: maximum requests per step.
        share: whether requests share pages.
        indexed: whether attention reads the cache through an index, of limited length.
    """

    def __init__(self, cache: PagedAttentionCache, max_requests: int, *, share: bool, indexed: bool) -> None:
        super().__init__(cache, safety_margin=0.0, max_requests_per_batch=max_requests)
        [self._allocator] = cache.cache_allocators.values()
        index, pool = self._allocator.index, cache.pool
        while pool.num_free_sectors:
            pool.allocate_sector(index)
        pages = pool.get_free_blocks(index, pool.count_free_blocks(index))
        self.pages = PrefixCache(pages, self._allocator.tokens_per_page, share)
        self._allocator.block_table = self.pages.tables
        self._indexed = indexed
        self._last = _StepPlan(0, 0.0, 0, fast=False)
        self.on_start: Callable[[str, int], None] | None = None
        """Called with each request that becomes active and how many of its tokens are stored."""
        self._queries = self._hits = self._computed = self._generated = 0
        self._computed_s = 0.0

    def count_from(self, stats: PrefixCacheStats) -> None:
        """Continue from these counts."""
        self._queries, self._hits, self._computed = stats.queries, stats.hits, stats.computed
        self._generated, self._computed_s = stats.generated, stats.computed_s or 0.0

    @property
    def stats(self) -> PrefixCacheStats:
        """Counts of tokens so far."""
        return PrefixCacheStats(self._queries, self._hits, self._computed, self._generated, self._computed_s)

    def schedule_batch(self, token_budget: int, cache_budget: int) -> tuple[list[FutureRequestState], bool, int, int]:
        """The requests of the next step, whether it takes the fast path, its tokens, and the tokens it reads."""
        reads = cache_budget if self._indexed else float("inf")
        step = _StepPlan(token_budget, reads, self.max_requests_per_batch, self.cache.max_blocks_per_request > 0)
        active = list(self.active_requests.values())
        for state in (
            *(state for state in active if state.status == RequestStatus.DECODING),
            *(state for state in active if state.status == RequestStatus.PREFILLING),
            *(self.waiting_requests[request_id] for request_id in list(self.waiting_requests_order)),
        ):
            if step.full:
                break
            if state is self.active_requests.get(state.request_id) or self._start(state):
                self._add(state, step)
        self._last = step
        if not self._indexed:
            self._set_tables()
        return step.parts, step.fast, token_budget - step.tokens, int(reads - step.reads) if self._indexed else 0

    def _start(self, state: RequestState) -> bool:
        """Make a waiting request active, unless another one computes a part of its prompt."""
        if state is not self.waiting_requests.get(state.request_id):  # it has lost its pages in this step
            return False
        found = self.pages.start(state.request_id, state.initial_tokens)
        if found is None:
            return False
        self._queries += len(state.initial_tokens)
        self._hits += found
        if self.on_start is not None:
            self.on_start(state.request_id, found)
        del self.waiting_requests[state.request_id]
        self.waiting_requests_order.remove(state.request_id)
        self.active_requests[state.request_id] = state
        state.status = RequestStatus.PREFILLING
        state.remaining_prefill_tokens = state.initial_tokens[found:]
        state.position_offset = found
        return True

    def _add(self, state: RequestState, step: _StepPlan) -> None:
        """Add a request to a step, if its limits and the pages allow it."""
        decoding = state.status == RequestStatus.DECODING
        tokens = state.tokens_to_process if decoding else state.remaining_prefill_tokens
        length, known = min(len(tokens), step.tokens), state.position_offset
        fast = step.fast and length == 1 and known < self.cache.max_decode_fast_path_length
        if (not fast and step.reads < known) or not self._take_pages(state, known + length, step):
            return
        self._schedule_request(state, tokens, step.tokens, set())
        step.tokens -= length
        step.reads -= known
        step.requests -= 1
        step.fast = fast
        step.prompts += 0 if decoding else length
        step.parts.append(FutureRequestState(state, not state.remaining_prefill_tokens, {}, length))

    def _take_pages(self, state: RequestState, tokens: int, step: _StepPlan) -> bool:
        """Give a request pages for `tokens` tokens, at the cost of newer requests that are not in this step."""
        while not self.pages.grow(state.request_id, tokens):
            scheduled = {part.state.request_id for part in step.parts}
            newest = next(request_id for request_id in reversed(self.active_requests) if request_id not in scheduled)
            if newest == state.request_id:
                return False
            self._preempt(newest)
        return True

    def _preempt(self, request_id: str) -> None:
        """Take a request's pages; it starts again later, with what it has generated."""
        self.pages.release(request_id)
        again = self.active_requests.pop(request_id).create_equivalent_initial_request()
        self.waiting_requests[request_id] = again
        self.waiting_requests_order.appendleft(request_id)

    def _set_tables(self) -> None:
        """Tell the attention which pages each request of the step reads."""
        stride = self._allocator.block_physical_stride // self._allocator.tokens_per_page
        self.cache.page_tables = [
            torch.tensor(self.pages.tables[part.state.request_id]) * stride for part in self._last.parts
        ]

    def step_done(self, took_s: float) -> None:
        """The last step was computed: its full pages can be shared. Each token took an equal part of its time."""
        parts, prompts = self._last.parts, self._last.prompts
        tokens = sum(part.query_length for part in parts)
        self._computed += prompts
        self._computed_s += took_s * prompts / max(tokens, 1)
        self._generated += sum(part.has_new_token for part in parts)
        for part in parts:
            if part.state.request_id in self.active_requests:
                self._note_computed(part.state)
        self._last = _StepPlan(0, 0.0, 0, fast=False)

    def shared(self, request_id: str) -> int:
        """Tokens of a request in pages that others hold, and held first."""
        waiting = self.waiting_requests.get(request_id)
        return self.pages.shared(request_id) if waiting is None else self.pages.held(waiting.initial_tokens)

    def finish_request(self, request_id: str) -> None:
        """A request has its last token."""
        self._note_computed(self.active_requests.pop(request_id))
        self.pages.release(request_id)

    def clear_cancelled_requests(self) -> list[RequestState]:
        """Remove cancelled requests."""
        for request_id in self._requests_to_cancel:
            self.pages.release(request_id)
        return list(super().clear_cancelled_requests())

    def _note_computed(self, state: RequestState) -> None:
        if self.pages.completes(state.request_id, state.position_offset):
            tokens = [*state.initial_tokens, *state.generated_tokens]
            self.pages.computed(state.request_id, tokens, state.position_offset)
