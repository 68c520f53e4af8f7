"""What a model's own generation settings ask for: obeyed, or said to be left out."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.logits_process import LogitsProcessorList

from headrace.errors import EngineError, ModelCodeError, model_code

logger = logging.getLogger("headrace")

OBEYED = frozenset({
    "bad_words_ids", "begin_suppress_tokens", "encoder_no_repeat_ngram_size", "encoder_repetition_penalty",
    "exponential_decay_length_penalty", "forced_bos_token_id", "forced_eos_token_id", "min_length",
    "no_repeat_ngram_size", "remove_invalid_values", "sequence_bias", "suppress_tokens",
})  # fmt: skip
"""What a request has no field for, and transformers applies to greedy answers too."""
IRRELEVANT = frozenset({
    # The tokens of the vocabulary: `eos_token_id` is read, and the prompt has its others.
    "bos_token_id", "decoder_start_token_id", "eos_token_id", "pad_token_id",
    # How it is computed, which changes no answer; and what is returned beside the answer.
    "cache_config", "cache_implementation", "compile_config", "continuous_batching_config", "disable_compile",
    "low_memory", "max_cache_len", "output_attentions", "output_hidden_states", "output_logits", "output_scores",
    "prefill_chunk_size", "renormalize_logits", "return_dict_in_generate", "use_cache",
    # Drafts of another model or of the prompt: greedy answers are the same without.
    "assistant_confidence_threshold", "assistant_early_exit", "assistant_ensemble_weight", "assistant_lookbehind",
    "is_assistant", "max_matching_ngram_size", "num_assistant_tokens", "num_assistant_tokens_schedule",
    "prompt_lookup_num_tokens", "speculation_type", "target_lookbehind", "use_mtp",
    # What does nothing unless another key is set, which is named then.
    "diversity_penalty", "early_stopping", "length_penalty", "num_beam_groups",
})  # fmt: skip
"""What changes no answer of this engine."""
_SAMPLED = frozenset({"epsilon_cutoff", "eta_cutoff", "min_p", "temperature", "top_h", "top_k", "top_p", "typical_p"})
"""What transformers applies only with `do_sample`."""
_FIELDS = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "stop_strings": "stop",
    **{name: name for name in ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")},
}
"""The request's own fields."""


class ModelRules:
    """The rules of a model for its tokens, from `generation_config.json` or `config.json`.

    Raises:
        EngineError: a setting is invalid.
    """

    def __init__(
        self, model: PreTrainedModel, own: GenerationConfig | None, ends: frozenset[int], longest: int
    ) -> None:
        asked = {} if own is None else _asked(own)
        self._model = model
        self._ends = torch.tensor(sorted(ends), device=model.device) if ends else None
        self._keys = {name: value for name, value in asked.items() if name in OBEYED}
        if self._keys:
            try:
                with model_code():  # transformers checks the values in many ways
                    self.processors((0,), 1)
            except ModelCodeError as error:
                raise EngineError(
                    f"transformers refuses the model's generation settings {_listed(self._keys)}: {error}"
                ) from error
        if left := _left_out(asked, longest):
            logger.warning(left)

    def processors(self, prompt: Sequence[int], max_tokens: int) -> LogitsProcessorList | None:
        """What changes the scores of an answer's tokens, of shape (1, vocabulary); None for nothing."""
        if not self._keys:
            return None
        config = GenerationConfig(**self._keys, max_length=len(prompt) + max_tokens)
        config._eos_token_tensor = self._ends
        device = self._model.device
        ids = torch.tensor([list(prompt)], device=device)
        return self._model._get_logits_processor(
            config, input_ids_seq_length=len(prompt), encoder_input_ids=ids, device=device
        )


def _asked(own: GenerationConfig) -> Mapping[str, object]:
    """The settings that are not transformers' defaults, and matter."""
    defaults = GenerationConfig._get_default_generation_params()
    found: dict[str, object] = {
        name: value
        for name, value in own.to_dict().items()
        if value is not None
        and value != defaults.get(name)
        and name not in IRRELEVANT
        and name != "transformers_version"
        and not name.startswith("_")
    }
    if not found.get("do_sample"):
        found = {name: value for name, value in found.items() if name not in _SAMPLED}
    return found


def _left_out(asked: Mapping[str, object], longest: int) -> str:
    """What to say of the settings that are not obeyed; empty if all are."""
    left = {
        name: value
        for name, value in asked.items()
        if name not in OBEYED and not (name == "max_length" and isinstance(value, int) and value >= longest)
    }
    if not left:
        return ""
    fields = [f"{_FIELDS[name]}={value}" for name, value in left.items() if name in _FIELDS]
    way_out = f"; to have them, set {', '.join(fields)}" if fields else ""
    return (
        f"the model's generation settings ask for {_listed(left)}, which is not applied: what a job or request does "
        f"not set has Headrace's own defaults{way_out}"
    )


def _listed(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value!r:.60}" for name, value in settings.items())
