"""Text generation with static batching, for models without continuous batching and as a baseline."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal, TypeAlias

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList

from headrace.device.placement import naming_device_errors
from headrace.engines.capabilities import Sleeper
from headrace.engines.generation.batch_invariance import Trial, switches_at
from headrace.engines.generation.causal_lm import CausalLM, TokenizedRequest
from headrace.engines.generation.options import StaticGeneration
from headrace.engines.generation.sampling import TokenSampler, choose, only
from headrace.engines.networks.base import in_groups
from headrace.engines.profile import EngineProfile
from headrace.engines.requests.generation import GeneratedText
from headrace.engines.requests.vocabulary import TokenizedEngine
from headrace.errors import EngineDeadError, EngineError, ModelCodeError, RecordError, model_code

PromptPadding: TypeAlias = Literal["left", "equal lengths", "one at a time"]
"""Or no padding, because a batch holds prompts of one length, or one prompt."""

logger = logging.getLogger("headrace")

_TRIED: tuple[PromptPadding, ...] = ("left", "equal lengths")
_SLOWER = {
    "equal lengths": "this model's answer to a prompt depends on the padding beside it; "
    "prompts run only with prompts of the same length, which is slower",
    "one at a time": "this model's answer to a prompt depends on the other prompts of its batch; "
    "prompts run one at a time, which is slower",
}


class StaticGenerationEngine(TokenizedEngine):
    """Answers padded batches of prompts, each until its last answer is done; satisfies `BatchEngine`.

    Raises:
        ConfigError: no such folder, or a parameter out of range.
        EngineError: the files cannot be loaded.
    """

    def __init__(self, options: StaticGeneration) -> None:
        self.tokens = self._lm = CausalLM(options)
        self._switch = switches_at(self._lm.model.config)
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            self._padding = self._choose_padding()
            failed.pop_all()
        if self._padding in _SLOWER:
            logger.warning(_SLOWER[self._padding])
        self.profile = EngineProfile(
            batching="batches",
            pads=True,
            batch_cost=1 << 20,
            batch_size=options.max_num_seqs,
            max_model_len=self._lm.max_model_len,
            tokenizes=True,
            holds_forms=True,
            draws=True,
        )

    def describe(self) -> Mapping[str, object]:
        """The model digest and all parameters that affect an answer."""
        return {"engine": "static_generation", **self._lm.describe()}

    def forward(self, batch: list[TokenizedRequest]) -> list[GeneratedText | RecordError]:
        """Answer the batch.

        Raises:
            EngineOutOfMemoryError: the batch does not fit on the device.
            EngineDeadError: the device failed, or the engine is closed.
        """
        lm = self._lm
        if lm.model is None:
            raise EngineDeadError("the generation engine is closed; create a new one")
        if not batch:
            return []
        samplers = [lm.sampler(ask) for ask in batch]
        answers = zip(batch, self._run(batch, samplers, self._padding), samplers, strict=True)
        return [lm.answer(ask, generated, sampler) for ask, generated, sampler in answers]

    def _run(
        self, batch: Sequence[TokenizedRequest], samplers: Sequence[TokenSampler], padding: PromptPadding
    ) -> list[tuple[int, ...]]:
        width = max(len(ask.prompt) for ask in batch)
        end = width + max(ask.sampling.max_tokens for ask in batch)
        if padding == "left" and self._switch is not None and end > self._switch:
            padding = "equal lengths"

        def group(place: int) -> int:
            return {"left": 0, "equal lengths": len(batch[place].prompt), "one at a time": place}[padding]

        def run(places: Sequence[int]) -> list[tuple[int, ...]]:
            return generate(self._lm, [batch[place] for place in places], [samplers[place] for place in places])

        return in_groups(range(len(batch)), group, run)

    def _choose_padding(self) -> PromptPadding:
        """The first that changes no answer. Raises EngineError: the model cannot answer a prompt at all."""
        trial = trial_of(self._lm)
        return next((padding for padding in _TRIED if self._agrees(trial, padding)), "one at a time")

    def _agrees(self, trial: Trial, padding: PromptPadding) -> bool:
        try:
            with model_code():
                return trial.agrees(partial(self._run, padding=padding))
        except ModelCodeError:  # it refuses a padded batch
            return False

    @property
    def sleeper(self) -> Sleeper | None:
        """Moves the model to host memory; None if nothing is gained, as on a CPU."""
        return self._lm if self._lm.can_sleep else None

    def close(self) -> None:
        """Free the model's memory. Safe to call twice."""
        self._lm.close()


def trial_of(lm: CausalLM) -> Trial:
    """What a model answers alone. Raises EngineError: it cannot answer a prompt at all."""
    try:
        with model_code():
            return Trial(lm, partial(generate, lm))
    except ModelCodeError as error:
        raise EngineError(f"the model fails at a short prompt: {error}") from error


def generate(
    lm: CausalLM, batch: Sequence[TokenizedRequest], samplers: Sequence[TokenSampler]
) -> list[tuple[int, ...]]:
    """The tokens of each answer. Prompts are padded on the left, so that all answers start at the same position.

    Raises:
        EngineOutOfMemoryError: the batch does not fit on the device.
        EngineDeadError: the device failed.
    """
    width = max(len(ask.prompt) for ask in batch)
    ids = torch.full((len(batch), width), lm.pad_token)
    mask = torch.zeros_like(ids)
    for row, ask in enumerate(batch):
        ids[row, width - len(ask.prompt) :] = torch.tensor(ask.prompt)
        mask[row, width - len(ask.prompt) :] = 1
    rows = _BatchAnswers(lm, batch, samplers)
    config = GenerationConfig(
        do_sample=False,
        max_new_tokens=max(ask.sampling.max_tokens for ask in batch),
        eos_token_id=None,  # `rows` decides when an answer is done
        pad_token_id=lm.pad_token,
    )
    with naming_device_errors(lm.device, lambda: f"{len(batch)} answers to prompts of up to {width} tokens"):
        lm.model.generate(
            ids.to(lm.device),
            attention_mask=mask.to(lm.device),
            generation_config=config,
            logits_processor=LogitsProcessorList([rows.choose_tokens]),
            stopping_criteria=StoppingCriteriaList([rows.finished]),
        )
    return rows.generated


class _BatchAnswers:
    def __init__(self, lm: CausalLM, batch: Sequence[TokenizedRequest], samplers: Sequence[TokenSampler]) -> None:
        self._lm, self._batch, self._samplers = lm, batch, samplers
        self.generated: list[tuple[int, ...]] = [() for _ in batch]
        self._done = [False] * len(batch)

    def choose_tokens(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores of the next tokens, of shape (answers, vocabulary): the highest is that of the chosen token."""
        rows = [row for row, done in enumerate(self._done) if not done]
        own = scores[rows]
        tokens = choose(own, [self._samplers[row] for row in rows], [self.generated[row] for row in rows])
        scores[rows] = only(tokens, own)
        for row, token in zip(rows, tokens, strict=True):
            ask = self._batch[row]
            generated = self.generated[row] = (*self.generated[row], token)
            self._done[row] = self._lm.ended(ask, generated)
        return scores

    def finished(self, ids: torch.Tensor, *_: object, **__: object) -> torch.Tensor:
        return torch.tensor(self._done, device=ids.device)
