"""Vectors of texts, labels of texts and scores of pairs with vLLM's pooling runner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path

from headrace.engines.vllm.core import VllmCore, deciding  # before vLLM: it sets vLLM's log level

# isort: split
import numpy as np
import vllm
from transformers import PreTrainedTokenizerBase
from vllm import PoolingParams
from vllm.config.pooler import PoolerConfig
from vllm.inputs.engine import tokens_input
from vllm.tasks import PoolingTask
from vllm.v1.engine.async_llm import AsyncLLM

from headrace.device.pipeline import OutputRows
from headrace.engines.capabilities import Sleeper
from headrace.engines.library_settings import with_own_settings
from headrace.engines.model_config import ModelConfig
from headrace.engines.model_folder import digest, find_folder
from headrace.engines.networks.files import load_config, load_tokenizer
from headrace.engines.networks.heads import Head, VectorHead, matryoshka_dimensions
from headrace.engines.networks.quantizing import length_of
from headrace.engines.profile import EngineProfile
from headrace.engines.requests.vocabulary import TokenizedEngine
from headrace.engines.text.exported_pooling import Pooling, check_pooled_prompts, pooling_of, prompts_in
from headrace.engines.text.sequence_classifiers import label_head, score_head
from headrace.engines.text.splitting import LongTexts
from headrace.engines.text.token_rows import Tokens
from headrace.engines.text.tokenizing import TextTokens, tokens_for
from headrace.engines.vllm.options import VllmClassification, VllmEmbedding, VllmPooling, VllmScoring
from headrace.errors import ConfigError, EngineError, HeadraceError, RecordError

_MODES = ("mean", "cls", "last")
_LAYERS = frozenset({"Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid"})
"""Activations of dense layers that vLLM has. With another one, it would leave the layers out."""


class PoolingEngine(TokenizedEngine):
    """One row of numbers per text or pair, from vLLM's asynchronous engine; satisfies `StreamEngine`.

    Raises:
        EngineError: vLLM fails at a short text.
    """

    tokens: TextTokens

    def __init__(
        self,
        folder: Path,
        core: VllmCore,
        kind: PoolingTask,
        tokens: TextTokens,
        head: Head,
        facts: Mapping[str, object],
    ) -> None:
        self.tokens = tokens
        self._folder = folder
        self._core = core
        self._kind: PoolingTask = kind
        self._head = head
        self._facts = facts
        self.profile = EngineProfile(
            batching="own", max_in_flight=core.max_in_flight, max_model_len=tokens.max_model_len, tokenizes=True
        )
        self._try()  # some attentions load, and fail at the first text

    def _try(self) -> None:
        try:
            self._core.run_now(partial(self._row, self.tokens.samples()[-1]))
        except HeadraceError as error:
            self._core.close()
            raise EngineError(
                f"vLLM cannot run the model in {self._folder}: it fails at the first text: {error}"
            ) from error

    def describe(self) -> Mapping[str, object]:
        """The vLLM version, the model digest and all options that affect an output."""
        return {
            **self._facts,
            "runtime": "vllm",
            "version": vllm.__version__,
            "model": digest(self._folder),
            "max_model_len": self.tokens.max_model_len,
            "on_too_long": self.tokens.long_texts.on_too_long,
        }

    async def infer(self, payload: Tokens) -> object:
        """The output for one text or pair.

        Raises:
            RecordError: vLLM refuses the text, or its vector cannot be quantized.
            EngineError: vLLM failed at this text, but is still running.
            EngineDeadError: vLLM's core process ended, or the engine is closed.
        """
        row = await self._core.run(partial(self._row, payload))
        (output,) = self._head(row[None])
        if isinstance(output, RecordError):
            raise output
        return output

    async def _row(self, payload: Tokens, engine: AsyncLLM, number: str) -> OutputRows:
        # Logits and vectors as the network gives them: the head converts them as it does those of other engines.
        params = PoolingParams(task=self._kind, use_activation=False, extra_kwargs=_types(payload))
        async with aclosing(engine.encode(tokens_input(payload[0].tolist()), params, number)) as outputs:
            async for output in outputs:
                if output.finished:
                    row: OutputRows = output.outputs.data.float().numpy().reshape(-1)
                    return row
        raise EngineError("vLLM ended the request without an answer")

    @property
    def sleeper(self) -> Sleeper | None:
        """Moves the model to host memory; None if nothing is gained, as on a CPU."""
        return self._core.sleeper

    def close(self) -> None:
        """End vLLM's processes. Safe to call twice."""
        self._core.close()


def embed(options: VllmEmbedding) -> PoolingEngine:
    """One vector per text, as `EmbeddingEngine` makes it.

    Raises:
        ConfigError: no such folder, a parameter that the model does not support, or vLLM refuses an option.
        EngineError: vLLM cannot start, or lacks a part of the model.
    """
    truncate_dim, normalize, output_dtype = options.truncate_dim, options.normalize, options.output_dtype
    args = options.engine_args()
    folder = _folder(options, args)
    pooling = pooling_of(folder, _MODES, "vLLM", dense=True)
    _check_dense(folder, pooling)
    prompts = prompts_in(folder, options.prompt_name, options.prompt)
    check_pooled_prompts(pooling, prompts, "vLLM")
    config, tokenizer = _files(folder, options)
    config = with_own_settings(folder, config, prompted=True)
    tokens = tokens_for(tokenizer, config, "text", options.max_model_len, LongTexts(options.on_too_long), prompts)
    pooler = PoolerConfig(seq_pooling_type=_TYPES[pooling.mode], use_activation=False)
    core = _start(folder, tokens, {"convert": "embed", "pooler_config": pooler, **args})
    full = int(core.config.model_config.embedding_size)
    if truncate_dim is not None and not 1 <= truncate_dim <= full:
        core.close()
        raise ConfigError(f"``truncate_dim`` is {truncate_dim}; this model's vectors have {full} components")
    dimension = truncate_dim or full
    facts: dict[str, object] = {
        "engine": "embedding", "pooling": pooling.describe(), "dimension": dimension, "normalize": normalize,
        "output_dtype": output_dtype, "prompt": prompts.default, "options": deciding(args),
    }  # fmt: skip
    head = _Normalized(pooling.normalize, VectorHead(dimension, normalize=normalize, output_dtype=output_dtype))
    embedder = PoolingEngine(folder, core, "embed", tokens, head, facts)
    embedder.profile = replace(
        embedder.profile,
        dimension=length_of(dimension, output_dtype),
        matryoshka=matryoshka_dimensions(config, dimension) if output_dtype == "float32" else (),
        prompt_names=tuple(prompts.named),
    )
    return embedder


def classify(options: VllmClassification) -> PoolingEngine:
    """Labels of texts or pairs. Errors as `embed`."""
    args = options.engine_args()
    folder = _folder(options, args)
    config, tokenizer = _files(folder, options)
    config = with_own_settings(folder, config)
    head, facts = label_head(config, options.top_labels)
    tokens = tokens_for(tokenizer, config, "either", options.max_model_len, LongTexts(options.on_too_long))
    core = _start(folder, tokens, args)
    return PoolingEngine(folder, core, "classify", tokens, head, {**facts, "options": deciding(args)})


def score(options: VllmScoring) -> PoolingEngine:
    """A cross-encoder: one score per pair. Errors as `embed`."""
    args = options.engine_args()
    folder = _folder(options, args)
    config, tokenizer = _files(folder, options)
    config = with_own_settings(folder, config)
    head, facts = score_head(config)
    tokens = tokens_for(tokenizer, config, "pair", options.max_model_len, LongTexts(options.on_too_long))
    core = _start(folder, tokens, args)
    return PoolingEngine(folder, core, "classify", tokens, head, {**facts, "options": deciding(args)})


class _Normalized:
    """A head for the vectors of a model that scales them to length 1, which vLLM does not do here.

    OutputRows before the normalisation keep all their digits.
    """

    def __init__(self, on: bool, head: Head) -> None:
        self._on = on
        self._head = head

    def __call__(self, rows: OutputRows) -> Sequence[object]:
        if self._on:
            rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        return self._head(rows)


def _types(payload: Tokens) -> dict[str, int] | None:
    """The place of the first token of the second text, if the model tells two texts apart."""
    if len(payload) < 2 or not payload[1].any():
        return None
    return {"compressed_token_type_ids": int(payload[1].argmax())}


_TYPES: Mapping[str, str] = {"mean": "MEAN", "cls": "CLS", "last": "LAST"}


def _folder(options: VllmPooling, args: Mapping[str, object]) -> Path:
    """The model's folder. Raises ConfigError: it does not exist, or an option is one that the task sets."""
    if taken := sorted({"runner", "convert", "pooler_config"} & args.keys()):
        raise ConfigError(f"{taken[0]} is set by the task; leave it out")
    return find_folder(options.model)


def _files(folder: Path, options: VllmPooling) -> tuple[ModelConfig, PreTrainedTokenizerBase]:
    """The model's config.json and its tokenizer. Raises EngineError: they cannot be loaded."""
    trusted = bool(options.trust_remote_code)
    config = load_config(folder, trust_remote_code=trusted)
    tokenizer = load_tokenizer(folder, options.tokenizer, trust_remote_code=trusted)
    return config.to_dict(), tokenizer


def _check_dense(folder: Path, pooling: Pooling) -> None:
    for layer in pooling.dense:
        name = str(layer.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
        if name not in _LAYERS:
            raise EngineError(f"the model in {folder} has a dense layer with {name}, which vLLM does not compute")


def _start(folder: Path, tokens: TextTokens, args: Mapping[str, object]) -> VllmCore:
    core = VllmCore(folder, {"runner": "pooling", "max_model_len": tokens.max_model_len, **args})
    if core.max_model_len < tokens.max_model_len:
        core.close()
        raise ConfigError(f"``max_model_len`` is {tokens.max_model_len}; vLLM takes {core.max_model_len} tokens")
    return core
