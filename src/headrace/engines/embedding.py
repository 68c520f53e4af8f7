"""Text embeddings: sentence-transformers folders and plain transformers encoders, one vector per text."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Transformer
from tokenizers import Encoding, Tokenizer
from transformers.utils import logging as transformers_logging

from headrace.engines.base import Prepared
from headrace.engines.local_model import digest, find_folder
from headrace.errors import ConfigError, EngineDeadError, EngineError, EngineOutOfMemoryError, RecordError

Tokens: TypeAlias = NDArray[np.int32]
"""One text for the model: row 0 the token ids, row 1 the token types where the model's are not all 0."""

Vector: TypeAlias = NDArray[np.float32]

# A padded budget of 1,024 tokens was the fastest of 256 to 8,192 on CPUs: larger batches leave the cache. A GPU needs
# far more work in flight to be busy.
_BATCH_TOKENS = {"cpu": 1_024, "cuda": 65_536}
_BATCH_SIZE = {"cpu": 256, "cuda": 2_048}
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

# Tokenizers without a limit of their own say so with an absurd number.
_NO_LIMIT = 1 << 24


class EmbeddingEngine:
    """One vector per text, as the model's own files say: pooling, dense layers, normalisation.

    Args:
        model: a local folder; None for all-MiniLM-L6-v2.
        device: "auto" (CUDA where there is one), "cpu", "cuda" or "cuda:N".
        dtype: "auto" (float32 on CPU, the weights' own on CUDA), "float32", "float16" or "bfloat16".
        max_model_len: in tokens; None for the model's own limit.
        on_too_long: cut a longer text, or fail its record.
        truncate_dim: keep the first so many components (Matryoshka models); not normalised again.

    Raises:
        ConfigError: no such folder, or a parameter the model cannot follow.
        EngineError: the files cannot be loaded.
    """

    pads = True

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        device: str = "auto",
        dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto",
        max_model_len: int | None = None,
        on_too_long: Literal["truncate", "error"] = "truncate",
        truncate_dim: int | None = None,
    ) -> None:
        if on_too_long not in ("truncate", "error"):
            raise ConfigError(f"on_too_long is {on_too_long!r}; it may be 'truncate' or 'error'")
        self._folder = find_folder(model)
        self._device = _choose_device(device)
        self._model: SentenceTransformer | None = _load(self._folder, self._device, _choose_dtype(dtype, self._device))
        self._dtype = str(next(self._model.parameters()).dtype).removeprefix("torch.")
        self.max_model_len = _choose_length(self._model, max_model_len)
        self.dimension = _choose_dimension(self._model, truncate_dim)
        self._on_too_long = on_too_long
        self.default_batch_cost = max(_BATCH_TOKENS[self._device.type], self.max_model_len)
        self.default_batch_size = _BATCH_SIZE[self._device.type]

        # A private copy: the model's own tokenizer object sets truncation and padding on each call, which two threads
        # must not do at once. This one is never changed again.
        shared = self._model.tokenizer
        self._tokenizer: Tokenizer = Tokenizer.from_str(shared.backend_tokenizer.to_str())
        self._tokenizer.enable_truncation(self.max_model_len, direction=shared.truncation_side)
        self._tokenizer.no_padding()
        self._pad_id: int = shared.pad_token_id or 0
        self._takes_types = "token_type_ids" in shared.model_input_names
        self._typed = self._takes_types and any(self._tokenizer.encode("text").type_ids)
        self._prompt: str = self._model.prompts.get(self._model.default_prompt_name) or ""
        self._prompt_length = _tokens_before_text(self._tokenizer.encode(self._prompt)) if self._prompt else 0
        # The job's workers decide how many chunks are tokenized at once; a pool of threads inside each call would take
        # cores from the model on CPU, and complains when a process forks.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def describe(self) -> Mapping[str, Any]:
        """Model digest and every parameter that changes a vector. Reads the model's files once."""
        return {
            "engine": "embedding",
            "model_digest": digest(self._folder),
            "dtype": self._dtype,
            "max_model_len": self.max_model_len,
            "on_too_long": self._on_too_long,
            "dimension": self.dimension,
        }

    def prepare(self, inputs: Sequence[Any]) -> list[Prepared[Tokens] | Exception]:
        """Tokens of each text, with their exact number as cost; a RecordError where the input is no text.

        An empty text is one: its vector is that of the special tokens alone.
        """
        errors = [_refusal(value) for value in inputs]
        texts = [self._prompt + value for value, error in zip(inputs, errors, strict=True) if error is None]
        encodings = iter(self._tokenizer.encode_batch_fast(texts))
        return [self._prepared(next(encodings)) if error is None else error for error in errors]

    def forward(self, batch: list[Tokens]) -> list[Vector]:
        """One float32 vector of `dimension` components per text: rows of one array.

        Raises:
            EngineOutOfMemoryError: the batch is too large for the device.
            EngineDeadError: the device failed, or the engine is closed.
        """
        model = self._model
        if model is None:
            raise EngineDeadError("the embedding engine is closed; create a new one")
        if not batch:
            return []
        try:
            with torch.inference_mode():
                vectors = model(self._features(batch))["sentence_embedding"][:, : self.dimension]
                array: NDArray[np.float32] = vectors.float().cpu().numpy()
        except (torch.OutOfMemoryError, MemoryError) as error:
            longest = max(tokens.shape[1] for tokens in batch)
            raise EngineOutOfMemoryError(
                f"{self._device} has no room for {len(batch)} texts of up to {longest} tokens; lower the batch cost"
            ) from error
        except torch.AcceleratorError as error:
            raise EngineDeadError(f"{self._device} failed: {error}") from error
        return list(array)

    def close(self) -> None:
        """Free the model's memory. Safe to call twice."""
        self._model = None
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _prepared(self, encoding: Encoding) -> Prepared[Tokens] | RecordError:
        truncated = bool(encoding.overflowing)
        if truncated and self._on_too_long == "error":
            return RecordError(
                f"the text is longer than the {self.max_model_len} tokens the model takes; "
                "on_too_long='truncate' would cut it"
            )
        rows = [encoding.ids, encoding.type_ids] if self._typed else [encoding.ids]
        return Prepared(np.array(rows, dtype=np.int32), cost=len(encoding.ids), truncated=truncated)

    def _features(self, batch: list[Tokens]) -> dict[str, Any]:
        """What the model takes: tensors of shape (texts, longest).

        Padded on the right whatever the tokenizer says: pooling follows the mask, and a padding on the left would move
        the positions of the text with its company.
        """
        longest = max(tokens.shape[1] for tokens in batch)
        ids = np.full((len(batch), longest), self._pad_id, dtype=np.int64)
        mask = np.zeros((len(batch), longest), dtype=np.int64)
        types = np.zeros((len(batch), longest), dtype=np.int64)
        for row, tokens in enumerate(batch):
            length = tokens.shape[1]
            ids[row, :length] = tokens[0]
            mask[row, :length] = 1
            if self._typed:
                types[row, :length] = tokens[1]
        arrays = {"input_ids": ids, "attention_mask": mask}
        if self._takes_types:
            arrays["token_type_ids"] = types
        features: dict[str, Any] = {
            name: torch.from_numpy(array).to(self._device, non_blocking=True) for name, array in arrays.items()
        }
        if self._prompt_length:
            features["prompt_length"] = self._prompt_length
        return features


def _refusal(value: Any) -> RecordError | None:
    if not isinstance(value, str):
        return RecordError(f"expected text, got {'null' if value is None else type(value).__name__}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            return RecordError(f"the text is not valid Unicode: {error.reason} at character {error.start}")
    return None


def _tokens_before_text(prompt: Encoding) -> int:
    """How many tokens a prompt takes at the front of a text, which some models leave out of the pooling."""
    return len(prompt.ids) - (1 if prompt.special_tokens_mask[-1] else 0)


def _choose_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} is unknown; it may be auto, cpu, cuda or cuda:N") from error
    if chosen.type not in _BATCH_TOKENS:
        raise ConfigError(f"device {device!r} is not supported; it may be auto, cpu, cuda or cuda:N")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device {device!r}: PyTorch sees {torch.cuda.device_count()} CUDA devices; use device=cpu")
    return chosen


def _choose_dtype(dtype: str, device: torch.device) -> torch.dtype | Literal["auto"]:
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    if dtype not in _DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown; it may be auto, {', '.join(_DTYPES)}")
    return _DTYPES[dtype]


def _load(folder: Path, device: torch.device, dtype: torch.dtype | Literal["auto"]) -> SentenceTransformer:
    try:
        with _no_progress_bar():
            model = SentenceTransformer(
                str(folder), device=str(device), local_files_only=True, model_kwargs={"dtype": dtype}
            )
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise EngineError(f"the model in {folder} cannot be loaded: {reason}") from error
    first = model[0]
    if not isinstance(first, Transformer) or not getattr(model.tokenizer, "is_fast", False):
        raise EngineError(f"the model in {folder} is not a transformer with a fast tokenizer (tokenizer.json)")
    return model.eval()


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Loading prints a bar of its own, which would run into the job's."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()


def _choose_length(model: SentenceTransformer, wanted: int | None) -> int:
    positions = getattr(model[0].config, "max_position_embeddings", None)
    own = [limit for limit in (model.max_seq_length, positions) if limit is not None and 0 < limit < _NO_LIMIT]
    if wanted is None:
        if not own:
            raise ConfigError("the model states no maximum length; set max_model_len")
        return int(min(own))
    smallest = model.tokenizer.num_special_tokens_to_add() + 1
    largest = positions or _NO_LIMIT
    if not smallest <= wanted <= largest:
        raise ConfigError(f"max_model_len is {wanted}; this model takes {smallest} to {largest} tokens")
    return wanted


def _choose_dimension(model: SentenceTransformer, wanted: int | None) -> int:
    dimension = int(model.get_embedding_dimension())
    if wanted is None:
        return dimension
    if not 1 <= wanted <= dimension:
        raise ConfigError(f"truncate_dim is {wanted}; this model's vectors have {dimension} components")
    return wanted
