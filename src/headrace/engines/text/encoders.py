"""Prepacked weights and fused layers of text encoders, and what must be known of a model before texts are batched.

Both patch other libraries' models, which does not work for every model. They are tried on a few texts when a model is
loaded, and undone if they fail or the outputs differ.
"""

from __future__ import annotations

import functools

import torch
from transformers import PretrainedConfig, PreTrainedModel

from headrace.engines.model_config import ropes_by_length
from headrace.engines.networks import packing
from headrace.engines.networks.fusing import can_fuse, fuse, unfuse
from headrace.engines.networks.prepacking import UNFIT, keep_if_equal, prepack, unpack
from headrace.engines.networks.pytorch import TOLERANCE

_LEAST_WIDTH = 256
"""Minimum hidden size of models whose weights are prepacked."""

_LENGTHS = (160, 7, 3, 7, 1)
"""Token counts of the test texts; the longest exceeds usual attention windows."""


def tune(model: torch.nn.Module) -> bool:
    """Prepack a loaded model's weights in place on a CPU, or fuse its layers on a GPU, where its outputs stay the same.

    Returns whether it did.
    """
    if not isinstance(model, PreTrainedModel):
        return False  # for example an adapter around one
    base = model.base_model
    if getattr(model.config, "hidden_size", 0) < _LEAST_WIDTH or model.dtype not in TOLERANCE:
        return False
    states = functools.partial(_states, base)
    try:
        expected = states()
    except UNFIT:
        return False  # it does not take texts
    change, undo = (fuse, unfuse) if can_fuse(base) else (prepack, unpack)
    return keep_if_equal(change, undo, base, states, expected)


def takes_threads(model: torch.nn.Module) -> bool:
    """Whether a model may be called on several threads at once: transformers' own may, code in a folder may not."""
    return isinstance(model, PreTrainedModel) and type(model).__module__.startswith("transformers.")


def restore(model: PreTrainedModel) -> None:
    """Undo `tune` and `packing.use`, for tools that read a model, such as an export."""
    packing.undo(model)
    unpack(model.base_model)
    unfuse(model.base_model)


def by_length(model: torch.nn.Module) -> bool:
    """Whether a model computes long batches differently from short ones, so that lengths must not be mixed.

    BigBird does, and never switches back from full attention by itself; this patches it to switch per batch.
    """
    base = getattr(model, "base_model", model)
    config: PretrainedConfig | None = getattr(base, "config", None)
    if (
        config is not None
        and getattr(config, "attention_type", None) == "block_sparse"
        and hasattr(base, "set_attention_type")
    ):
        shortest = (5 + 2 * config.num_random_blocks) * config.block_size + 1

        forward = base.forward  # patched directly: some callers bypass module hooks

        @functools.wraps(forward)
        def as_loaded(input_ids: torch.Tensor, *args: object, **others: object) -> object:
            if input_ids.shape[1] >= shortest:
                base.set_attention_type("block_sparse")
            return forward(input_ids, *args, **others)

        base.forward = as_loaded
        return True
    return bool(ropes_by_length(getattr(config, "rope_parameters", None)))


def _states(base: PreTrainedModel) -> torch.Tensor:
    """The hidden states of all real tokens of fixed test texts; float32."""
    config = base.config
    positions = getattr(config, "max_position_embeddings", None) or max(_LENGTHS)
    lengths = torch.tensor([min(length, positions - 2) for length in _LENGTHS])
    mask = torch.arange(int(lengths.max()))[None] < lengths[:, None]
    ids = torch.arange(mask.numel()).view(mask.shape) * 7919 % config.vocab_size
    ids[ids == config.pad_token_id] += 1
    ids[~mask] = config.pad_token_id or 0
    with torch.inference_mode():
        output = base(input_ids=ids.to(base.device), attention_mask=mask.long().to(base.device))
    states: torch.Tensor = output.last_hidden_state[mask.to(base.device)].float()
    return states
