"""Choose the next token of every answer in one call: greedy, or sampled with each request's own parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.generation.logits_process import LogitsProcessorList

from headrace.device.streams import to_device
from headrace.engines.generation.grammars import TokenGuide
from headrace.engines.requests.generation import Sampling

Ids: TypeAlias = Sequence[int]

_COLDEST = 1e-6
"""Minimum temperature. A lower one equals greedy decoding, and would overflow logits."""
_HIGHEST = 1e30
"""Maximum logit after penalties: with it and `_COLDEST`, all values stay within float32."""
_BITS = 52
"""Bits of a random number: with one less than float64 has, its product with a sum is below the sum."""


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """The log probability of a generated token, by the model's own distribution: without temperature and penalties."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most likely tokens with theirs, best first."""


@dataclass
class TokenSampler:
    """How the tokens of one request are chosen, independently of other requests in the batch."""

    sampling: Sampling
    prompt: Ids
    seed: int
    ends: frozenset[int]
    logprobs: int | None = None
    """How many alternatives to note for each token; None to note nothing."""
    rules: LogitsProcessorList | None = None
    guide: TokenGuide | None = None
    """Says which tokens the answer may have; None for all."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """What is added to the scores of tokens."""
    found: list[TokenLogprob] = field(default_factory=list)
    """One per token, if the request asks for log probabilities."""
    given: Ids | None = None
    """The answer of a trial, whose scores are noted; None for one that is chosen."""
    scores: list[torch.Tensor] = field(default_factory=list)

    @cached_property
    def seen(self) -> torch.Tensor:
        """The tokens of the prompt."""
        return torch.tensor(sorted(set(self.prompt)), dtype=torch.long)

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens change the scores."""
        own = self.sampling
        return own.repetition_penalty != 1 or own.presence_penalty != 0 or own.frequency_penalty != 0

    def forced(self, generated: int) -> Ids:
        """The tokens that must follow those generated, but for the last that the answer may have."""
        return () if self.guide is None else self.guide.forced[: max(self.sampling.max_tokens - generated - 1, 0)]

    def changes(self, generated: int) -> bool:
        """Whether the next token may differ from greedy decoding, or is noted."""
        own = self.sampling
        asked = (self.rules, self.guide, self.logprobs, self.given)
        ruled = any(one is not None for one in asked) or bool(self.bias)
        return own.temperature > 0 or generated < own.min_tokens or ruled or self.penalises


@torch.inference_mode()  # type: ignore[untyped-decorator]
def choose(logits: torch.Tensor, samplers: Sequence[TokenSampler], generated: Sequence[Ids]) -> list[int]:
    """The next token of each answer.

    All is computed on the device of the logits; the host reads one number for each answer, and the log probabilities
    that are asked for. No row depends on another one: the same seed gives the same text whatever the company.

    Args:
        logits: of shape (answers, vocabulary).
        generated: the tokens of each answer so far.
    """
    tokens = logits.argmax(-1)
    rows = [row for row, sampler in enumerate(samplers) if sampler.changes(len(generated[row]))]
    if rows:
        own = _SampledRows(logits, [samplers[row] for row in rows], [generated[row] for row in rows], rows)
        tokens[own.places] = own.chosen()
        own.note(tokens[own.places])
    chosen = list(map(int, tokens.tolist()))
    for row in rows:
        sampler = samplers[row]
        if sampler.guide is not None:
            sampler.guide.chosen(chosen[row])
        if sampler.given is not None:
            sampler.scores.append(logits[row].to("cpu", torch.float32, copy=True))
            chosen[row] = sampler.given[len(generated[row])]
    return chosen


def uniform(seed: int, position: int) -> float:
    """The random number below 1 for the token at this position of an answer: it depends on nothing else."""
    digest = hashlib.blake2b(b"%d %d" % (seed, position), digest_size=8).digest()
    return float((int.from_bytes(digest, "little") >> (64 - _BITS)) / (1 << _BITS))


def only(tokens: Ids, scores: torch.Tensor) -> torch.Tensor:
    """Scores of the same shape, whose highest in each row is that of this token."""
    places = torch.tensor(tokens, device=scores.device)[:, None]
    return torch.full_like(scores, -torch.inf).scatter_(-1, places, 0.0)


class _SampledRows:
    """Answers whose tokens are not simply those of the highest logits.

    Args:
        logits: of these answers and others.
        samplers: of these answers.
        generated: their tokens so far.
        places: their rows in `logits`.
    """

    def __init__(
        self, logits: torch.Tensor, samplers: Sequence[TokenSampler], generated: Sequence[Ids], places: Ids
    ) -> None:
        self._device = logits.device
        self._samplers, self._generated = samplers, generated
        self.places = self._tensor(places, torch.long)
        self._logits = logits[self.places].float()

    def chosen(self) -> torch.Tensor:
        scores = self._logits.clone()
        for change in (self._penalise, self._add_biases, self._hold_back_ends, self._obey_rules, self._mask):
            change(scores)
        tokens = scores.argmax(-1)
        drawn = self._those(lambda sampler: sampler.sampling.temperature > 0)
        if drawn:
            tokens[self._tensor(drawn, torch.long)] = self._draw(scores, drawn)
        return tokens

    def note(self, tokens: torch.Tensor) -> None:
        """Note the log probabilities of the chosen tokens, of those that ask for them."""
        rows = self._those(lambda sampler: sampler.logprobs is not None)
        if not rows:
            return
        places = self._tensor(rows, torch.long)
        logprobs = self._logits[places].log_softmax(-1)
        best = logprobs.topk(min(max(self._samplers[row].logprobs or 0 for row in rows), logprobs.shape[1]))
        chosen = tokens[places]
        own = logprobs.gather(1, chosen[:, None])[:, 0]
        found = zip(rows, chosen.tolist(), own.tolist(), best.indices.tolist(), best.values.tolist(), strict=True)
        for row, token, logprob, ids, values in found:
            sampler = self._samplers[row]
            del sampler.found[len(self._generated[row]) :]  # of a step that was interrupted
            top = tuple(zip(ids, values, strict=True))[: sampler.logprobs]
            sampler.found.append(TokenLogprob(token, logprob, top))

    def _penalise(self, scores: torch.Tensor) -> None:
        """Apply penalties: presence and frequency (generated tokens) as defined by OpenAI, repetition (all tokens) by
        Keskar et al., 2019."""
        rows = self._those(lambda sampler: sampler.penalises)
        if not rows:
            return
        places = self._tensor(rows, torch.long)
        own = scores[places]
        made = self._counts([torch.tensor(self._generated[row], dtype=torch.long) for row in rows], own)
        seen = made + self._counts([self._samplers[row].seen for row in rows], own) > 0
        factor = self._column(rows, lambda sampling: sampling.repetition_penalty)
        own = own.where(~seen, torch.where(own > 0, own / factor, own * factor))
        own -= self._column(rows, lambda sampling: sampling.presence_penalty) * (made > 0)
        own -= self._column(rows, lambda sampling: sampling.frequency_penalty) * made
        scores[places] = own.clamp(-_HIGHEST, _HIGHEST)

    def _add_biases(self, scores: torch.Tensor) -> None:
        found = [(row, *pair) for row, sampler in enumerate(self._samplers) for pair in sampler.bias.items()]
        if found:
            rows, tokens, added = zip(*found, strict=True)
            scores[self._tensor(rows, torch.long), self._tensor(tokens, torch.long)] += self._tensor(
                added, torch.float32
            )

    def _hold_back_ends(self, scores: torch.Tensor) -> None:
        """Leave an end token only to who may have nothing else, before the fewest tokens that are asked for."""
        pairs = [
            (row, end)
            for row, sampler in enumerate(self._samplers)
            if len(self._generated[row]) < sampler.sampling.min_tokens
            for end in sampler.ends
        ]
        if pairs:
            rows, ends = self._tensor(pairs, torch.long).unbind(1)
            scores[rows, ends] = -_HIGHEST

    def _obey_rules(self, scores: torch.Tensor) -> None:
        for row, sampler in enumerate(self._samplers):
            if sampler.rules is not None:
                ids = self._tensor([[*sampler.prompt, *self._generated[row]]], torch.long)
                scores[row] = sampler.rules(ids, scores[row][None])[0]

    def _mask(self, scores: torch.Tensor) -> None:
        guided = [(row, guide) for row, sampler in enumerate(self._samplers) if (guide := sampler.guide) is not None]
        if guided:
            places = self._tensor([row for row, _ in guided], torch.long)
            words = to_device(torch.stack([guide.fill(self._generated[row]) for row, guide in guided]), self._device)
            bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=self._device) & 1
            refused = bits.flatten(1)[:, : scores.shape[1]] == 0
            scores[places] = scores[places].masked_fill(refused, -torch.inf)

    def _draw(self, scores: torch.Tensor, rows: Ids) -> torch.Tensor:
        """A sampled token for each of these rows: where the sum of probabilities passes its random number."""
        heat = self._column(rows, lambda sampling: max(sampling.temperature, _COLDEST))
        probabilities = (scores[self._tensor(rows, torch.long)] / heat).softmax(-1)
        self._restrict(probabilities, rows)
        sums = probabilities.cumsum(-1, dtype=torch.float64)
        numbers = [uniform(self._samplers[row].seed, len(self._generated[row])) for row in rows]
        reached = self._tensor(numbers, torch.float64)[:, None] * sums[:, -1:]
        return torch.searchsorted(sums, reached, right=True)[:, 0].clamp(max=scores.shape[1] - 1)

    def _restrict(self, probabilities: torch.Tensor, rows: Ids) -> None:
        """Set the probabilities that top_k, min_p and top_p exclude to zero; equal ones stay or go together."""
        most = probabilities.shape[1]
        few, all_ = [], []
        for place, row in enumerate(rows):
            own = self._samplers[row].sampling
            if 0 < own.top_k < most:
                few.append(place)
            elif own.top_p < 1 or own.min_p > 0:
                all_.append(place)
        for places in filter(None, (few, all_)):  # to sort the whole vocabulary takes long
            chosen = self._tensor(places, torch.long)
            own_rows = [rows[place] for place in places]
            count = max(self._samplers[row].sampling.top_k for row in own_rows) if places is few else most
            own_p = probabilities[chosen]
            ordered = own_p.topk(count).values if places is few else own_p.sort(descending=True).values
            least = self._least(ordered, own_rows)
            probabilities[chosen] = own_p.where(own_p >= least, 0.0)

    def _least(self, ordered: torch.Tensor, rows: Ids) -> torch.Tensor:
        """The lowest probability that is kept, of shape (rows, 1), for the highest ones in order."""
        width = ordered.shape[1]
        ks = [top if 0 < (top := self._samplers[row].sampling.top_k) < width else width for row in rows]
        least = ordered.gather(1, self._tensor(ks, torch.long)[:, None] - 1)
        least = least.maximum(self._column(rows, lambda sampling: sampling.min_p) * ordered[:, :1])
        kept = ordered.where(ordered >= least, 0.0)
        shares = kept / kept.sum(-1, keepdim=True)
        beyond = shares.cumsum(-1) - shares >= self._column(rows, lambda sampling: sampling.top_p)
        beyond |= kept == 0
        beyond[:, 0] = False  # keep one token if top_p underflows in float32
        return ordered.masked_fill(beyond, torch.inf).amin(-1, keepdim=True)

    def _those(self, which: Callable[[TokenSampler], bool]) -> list[int]:
        return [row for row, sampler in enumerate(self._samplers) if which(sampler)]

    def _column(self, rows: Ids, value: Callable[[Sampling], float]) -> torch.Tensor:
        return self._tensor([value(self._samplers[row].sampling) for row in rows], torch.float32)[:, None]

    def _counts(self, ids: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
        """How often each token is among the ids, of shape (rows, vocabulary)."""
        rows, width = like.shape
        counts = torch.zeros(rows, width + 1, device=self._device)
        moved = to_device(pad_sequence(ids, batch_first=True, padding_value=width), self._device)
        return counts.scatter_add_(1, moved, torch.ones_like(moved, dtype=counts.dtype))[:, :width]

    def _tensor(self, values: Sequence[object], dtype: torch.dtype) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=dtype), self._device)
