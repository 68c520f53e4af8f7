"""Choose the next token: greedy, or sampled with each request's own parameters and random numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessorList
from transformers.generation.logits_process import LogitsProcessorList

from headrace.engines.generation.tensor_parallel import agreed, is_follower
from headrace.engines.requests.generation import Sampling

if TYPE_CHECKING:
    from transformers.generation.continuous_batching.requests import FutureRequestState

Ids: TypeAlias = Sequence[int]

_COLDEST = 1e-6
"""Minimum temperature. A lower one equals greedy decoding, and would overflow logits."""
_HIGHEST = 1e30
"""Maximum logit after penalties: with it and `_COLDEST`, all values stay within float32."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of a generated token, by the model's own distribution: without temperature and penalties."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most likely tokens with theirs, best first."""


class TokenSampler:
    """Chooses the tokens of one request, independently of other requests in the batch."""

    def __init__(
        self,
        sampling: Sampling,
        prompt: Ids,
        seed: int,
        ends: frozenset[int],
        logprobs: int | None = None,
        rules: LogitsProcessorList | None = None,
    ) -> None:
        self._sampling = sampling
        self._logprobs = logprobs
        self.found: list[TokenLogprob] = []
        """One per token, if the request asks for log probabilities."""
        self._ends = sorted(ends)
        self._rules = rules
        self._ids = prompt if rules is not None else ()
        self._prompt = torch.tensor(sorted(set(prompt)), dtype=torch.long)
        self._penalises = (
            sampling.repetition_penalty != 1 or sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
        )
        self._random: torch.Generator | None = None
        if sampling.temperature > 0:
            self._random = torch.Generator()  # on the CPU, for the same numbers on every device
            self._random.manual_seed(seed)

    def changes(self, generated: int) -> bool:
        """Whether the next token may differ from greedy decoding."""
        wanted = self._random is not None or self._penalises or self._logprobs is not None or self._rules is not None
        return wanted or generated < self._sampling.min_tokens

    def next_token(self, logits: torch.Tensor, generated: Ids) -> int:
        """The next token for logits of shape (vocabulary,), after the tokens generated so far."""
        own = logits.float().cpu()
        token = self._chosen(own.clone(), generated)
        if self._logprobs is not None:
            del self.found[len(generated) :]  # of a step that was interrupted
            self.found.append(_measured(own, token, self._logprobs))
        return token

    def _chosen(self, scores: torch.Tensor, generated: Ids) -> int:
        if self._penalises:
            self._penalise(scores, generated)
        if len(generated) < self._sampling.min_tokens:
            scores[self._ends] = -torch.inf
        if self._rules is not None:
            scores = self._rules(torch.tensor([[*self._ids, *generated]]), scores[None])[0]
        if self._random is None:
            return int(scores.argmax())
        probabilities = (scores / max(self._sampling.temperature, _COLDEST)).softmax(-1)
        probabilities = self._restrict(probabilities)
        return int(torch.multinomial(probabilities, 1, generator=self._random))

    def _penalise(self, scores: torch.Tensor, generated: Ids) -> None:
        """Apply penalties: presence and frequency (generated tokens) as defined by OpenAI, repetition (all tokens) by
        Keskar et al., 2019."""
        sampling = self._sampling
        made, counts = torch.tensor(list(generated), dtype=torch.long).unique(return_counts=True)
        seen = torch.cat([self._prompt, made]).unique()
        factor = sampling.repetition_penalty
        scores[seen] = torch.where(scores[seen] > 0, scores[seen] / factor, scores[seen] * factor)
        scores[made] -= sampling.presence_penalty + sampling.frequency_penalty * counts
        scores.clamp_(-_HIGHEST, _HIGHEST)

    def _restrict(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Set the probabilities that top_k, min_p and top_p exclude to zero."""
        sampling = self._sampling
        if 0 < sampling.top_k < len(probabilities):
            least = probabilities.topk(sampling.top_k).values[-1]
            probabilities = probabilities.where(probabilities >= least, 0.0)
        if sampling.min_p > 0:
            probabilities = probabilities.where(probabilities >= sampling.min_p * probabilities.max(), 0.0)
        if sampling.top_p < 1:
            ordered, places = (probabilities / probabilities.sum()).sort(descending=True)
            beyond = ordered.cumsum(0) - ordered >= sampling.top_p
            beyond[0] = False  # keep one token if top_p underflows in float32
            probabilities = probabilities.clone()
            probabilities[places[beyond]] = 0.0
        return probabilities


class BatchSampler(ContinuousBatchingLogitsProcessorList):  # type: ignore[misc]  # transformers has no types
    """Chooses each request's next token with its own sampling parameters; transformers does greedy decoding.

    In a model that is split, rank 0 chooses for all ranks.
    """

    def __init__(self, choose: Callable[[str, torch.Tensor, int], None], *, is_split: bool) -> None:
        super().__init__(LogitsProcessorList())
        self.do_processing = True
        self._choose = choose
        self._is_split = is_split
        self._requests: list[str] = []

    def prepare_tensor_args(
        self, requests_in_batch: list[FutureRequestState], arg_storage: torch.Tensor
    ) -> torch.Tensor:
        """Store the ids of the requests with a next token, in the order of the logits."""
        self._requests = [request.state.request_id for request in requests_in_batch if request.has_new_token]
        return arg_storage

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, logits_processor_args: object) -> torch.Tensor:  # noqa: ARG002
        """Scores of shape (requests, vocabulary), highest for the chosen tokens."""
        if not (self._is_split and is_follower()):
            for row, request_id in enumerate(self._requests):
                self._choose(request_id, scores, row)
        return scores if not self._is_split else agreed(scores)


def _measured(logits: torch.Tensor, token: int, count: int) -> TokenLogprob:
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(count, len(logprobs)))
    return TokenLogprob(
        token, float(logprobs[token]), tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    )
