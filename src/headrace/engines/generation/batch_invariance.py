"""Batch invariance: whether a model answers a prompt the same in a batch as alone, tried when it is loaded."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from transformers import PretrainedConfig

from headrace.engines.generation.causal_lm import CausalLM, TokenizedRequest
from headrace.engines.generation.sampling import TokenSampler
from headrace.engines.model_config import ropes_by_length
from headrace.engines.requests.generation import Sampling

_STEPS = 3
_SHORT, _LONG = 4, 36
"""Tokens of the prompts. The long one is longer than a page of the cache."""
_MOST = 1_024
"""Tokens of the long prompt if the model computes longer ones otherwise."""
OPERATIONS = 2e11
"""What a longer prompt may cost: a second or two of a CPU."""
_ROOM = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 0.15}
"""How far scores may be apart by rounding, as a share of their length. Small models that differ are 0.17 to 1.4 apart,
others less than 1e-6 in float32; in 16 bits, rounding adds up over layers, and experts may be chosen otherwise."""
_WINDOWS = ("sliding_window", "attention_chunk_size", "local_attention", "attention_window", "window_size")


AnswerAll: TypeAlias = Callable[[list[TokenizedRequest], Sequence[TokenSampler]], object]
"""Answers requests with these samplers."""


class Trial:
    """Short and long prompts beside each other: two short ones of one length, and a long one twice.

    Args:
        alone: answers one request.
    """

    def __init__(self, lm: CausalLM, alone: AnswerAll) -> None:
        numbers = random.Random(0)
        steps = min(_STEPS, lm.max_model_len - 1)
        room = lm.max_model_len - steps
        short = min(_SHORT, room)
        long = min(_long_prompt(lm), room)
        words = range(lm.model.get_input_embeddings().num_embeddings)
        sampling = Sampling(max_tokens=steps, ignore_eos=True)
        prompts = [tuple(numbers.choices(words, k=length)) for length in (short, long, short)]
        self._asks = [TokenizedRequest(prompt, sampling) for prompt in (*prompts, prompts[1])]
        self._tokens = [numbers.choices(words, k=steps) for _ in prompts]
        self._tokens.append(self._tokens[1])
        self._room = _ROOM.get(lm.model.dtype, 1e-3)
        found = [self._scores(alone, [place]) for place in range(len(prompts))]
        self._alone = torch.stack([scores for [scores] in (*found, found[1])])

    def agrees(self, together: AnswerAll) -> bool:
        """Whether the scores of each step are the same, up to rounding, if all are answered together."""
        scores = torch.stack(self._scores(together, range(len(self._asks))))
        known = torch.isfinite(self._alone)
        if not torch.equal(known, torch.isfinite(scores)):
            return False
        own, other = self._alone.where(known, 0.0), scores.where(known, 0.0)
        apart = (own - other).norm(dim=-1)
        return bool((apart <= self._room * own.norm(dim=-1)).all())

    def _scores(self, run: AnswerAll, places: Sequence[int]) -> list[torch.Tensor]:
        """The scores of each of these requests, of shape (steps, vocabulary)."""
        noted = [TokenSampler(Sampling(), (), 0, frozenset(), given=self._tokens[place]) for place in places]
        run([self._asks[place] for place in places], noted)
        return [torch.stack(one.scores) for one in noted]


def _long_prompt(lm: CausalLM) -> int:
    """The length of the long prompt: beyond the lengths at which the model changes, as far as it costs little."""
    parameters = sum(one.numel() for one in lm.model.parameters())
    affordable = min(_MOST, int(OPERATIONS / (2 * parameters)))
    text = lm.model.config.get_text_config()
    windows = [value for name in _WINDOWS if isinstance(value := getattr(text, name, None), int)]
    changes = [*windows, *([switch] if (switch := switches_at(lm.model.config)) else [])]
    return max([_LONG, *(length + _SHORT for length in changes if length + _SHORT <= affordable)])


def switches_at(config: PretrainedConfig) -> int | None:
    """The length beyond which a model computes all positions of a batch otherwise; None for a model that does not."""
    text = config.get_text_config()
    lengths = [
        int(length)
        for rope in ropes_by_length(getattr(text, "rope_parameters", None))
        if (
            length := rope.get("original_max_position_embeddings")
            or getattr(text, "original_max_position_embeddings", None)
            or getattr(text, "max_position_embeddings", None)
        )
    ]
    return min(lengths, default=None)
