"""Text generation in static batches: simple, for models that cannot be batched continuously, and the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessor, LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteria, StoppingCriteriaList

from headrace.batching.options import whole
from headrace.device.placement import running
from headrace.engines.base import Prepared
from headrace.engines.generation.causal_lm import CausalLM, PromptSettings, TokenizedRequest
from headrace.engines.profile import EngineProfile
from headrace.engines.requests import Generation, default_sampling
from headrace.errors import EngineDeadError


class StaticGenerationEngine:
    """Answers a batch of prompts together, padded to the longest, until the last answer is done. A `BatchEngine`.

    Args:
        model: a local folder; None for the arithmetic model that comes with Headrace.
        max_num_seqs: prompts of a batch.
        device, dtype, max_model_len, chat, system_prompt, seed, sampling: as of `GenerationEngine`.

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
        max_num_seqs: int = 16,
        chat: bool = False,
        system_prompt: str | None = None,
        seed: int = 0,
        **sampling: object,
    ) -> None:
        prompting = PromptSettings(default_sampling(sampling), system_prompt, chat, seed)
        self._lm = CausalLM(model, prompting, device, dtype, max_model_len)
        # Where a call leaves something open, transformers looks here: a record's parameters must not depend on it.
        self._lm.model.generation_config = GenerationConfig()
        self.profile = EngineProfile(
            batching="batches",
            pads=True,
            batch_cost=1 << 20,
            batch_size=whole("max_num_seqs", max_num_seqs, 1),
            max_model_len=self._lm.max_model_len,
        )

    def describe(self) -> Mapping[str, object]:
        """Model digest and every parameter that changes an answer."""
        return {"engine": "static_generation", **self._lm.describe()}

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[TokenizedRequest] | Exception]:
        """Each request in tokens; a RecordError where it cannot be answered."""
        return self._lm.prepare(inputs)

    def forward(self, batch: list[TokenizedRequest]) -> list[Generation]:
        """Every answer of the batch, padded on the left so that all of them go on from the same place.

        Raises:
            EngineOutOfMemoryError: the device has no room for the batch.
            EngineDeadError: the device failed, or the engine is closed.
        """
        lm = self._lm
        if lm.model is None:
            raise EngineDeadError("the generation engine is closed; create a new one")
        if not batch:
            return []
        width = max(len(ask.prompt) for ask in batch)
        ids = torch.full((len(batch), width), lm.pad_token)
        mask = torch.zeros_like(ids)
        for row, ask in enumerate(batch):
            ids[row, width - len(ask.prompt) :] = torch.tensor(ask.prompt)
            mask[row, width - len(ask.prompt) :] = 1
        rows = _Rows(lm, batch, width)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max(ask.sampling.max_tokens for ask in batch),
            eos_token_id=None,  # whether an answer is done is asked of `rows`
            pad_token_id=lm.pad_token,
        )
        with running(lm.device, lambda: f"{len(batch)} answers to prompts of up to {width} tokens"):
            lm.model.generate(
                ids.to(lm.device),
                attention_mask=mask.to(lm.device),
                generation_config=config,
                logits_processor=LogitsProcessorList([_Choose(rows)]),
                stopping_criteria=StoppingCriteriaList([_Finished(rows)]),
            )
        return [lm.answer(ask, generated) for ask, generated in zip(batch, rows.generated, strict=True)]

    def close(self) -> None:
        """Free the model's memory. Safe to call twice."""
        self._lm.close()


class _Rows:
    """What each answer of a running batch has come to."""

    def __init__(self, lm: CausalLM, batch: Sequence[TokenizedRequest], width: int) -> None:
        self.lm = lm
        self.batch = batch
        self.draws = [lm.draw(ask) for ask in batch]
        self.generated: list[tuple[int, ...]] = [() for _ in batch]
        self.done = [False] * len(batch)
        self._width = width

    def update(self, ids: torch.Tensor) -> None:
        """Take in the last token of `ids`, of shape (answers, prompt and answer so far)."""
        if ids.shape[1] == self._width:
            return
        for row, token in enumerate(ids[:, -1].tolist()):
            if self.done[row]:
                continue
            ask = self.batch[row]
            generated = self.generated[row] = (*self.generated[row], token)
            self.done[row] = (
                token in self.lm.ends_of(ask)
                or len(generated) == ask.sampling.max_tokens
                or self.lm.stopped(ask, generated)
            )


class _Choose(LogitsProcessor):  # type: ignore[misc]  # transformers has no types
    """Makes the token that each answer's own rule draws the likeliest."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Scores of shape (answers, vocabulary)."""
        for row, (draw, generated) in enumerate(zip(self._rows.draws, self._rows.generated, strict=True)):
            if not self._rows.done[row] and draw.changes(len(generated)):
                token = draw.next_token(scores[row], generated)
                scores[row] = -torch.inf
                scores[row, token] = 0.0
        return scores


class _Finished(StoppingCriteria):  # type: ignore[misc]  # transformers has no types
    """Which answers are done."""

    def __init__(self, rows: _Rows) -> None:
        self._rows = rows

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:  # noqa: ARG002
        """One bool for each answer."""
        self._rows.update(input_ids)
        return torch.tensor(self._rows.done, device=input_ids.device)
