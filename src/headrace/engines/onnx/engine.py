"""Text and image tasks with ONNX models on onnxruntime, without PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from onnxruntime.capi import onnxruntime_pybind11_state as failures

from headrace.device.forward import ForwardMeter
from headrace.device.pipeline import Arrays, OutputRows
from headrace.engines.capabilities import BesideLane, Sleeper
from headrace.engines.library_settings import with_own_settings
from headrace.engines.model_config import ModelConfig
from headrace.engines.model_folder import ONNX_WEIGHTS, digest, find_folder
from headrace.engines.networks.base import BATCH_TOKENS, TextBatch
from headrace.engines.networks.files import load_config, load_tokenizer
from headrace.engines.networks.heads import VectorHead, check_columns, label_names
from headrace.engines.onnx.options import (
    OnnxClassification,
    OnnxEmbedding,
    OnnxImageClassification,
    OnnxImageEmbedding,
    OnnxScoring,
    OnnxZeroShot,
)
from headrace.engines.text.engine import TextEngine
from headrace.engines.text.exported_pooling import Pooling, pooling_of
from headrace.engines.text.sequence_classifiers import Candidates, ZeroShotEngine, classifier, scorer
from headrace.engines.text.splitting import LongTexts
from headrace.engines.text.tokenizing import Takes, TextTokens, tokens_for
from headrace.engines.vision.images import ImageInputs, images_for
from headrace.engines.vision.tasks import ImageEngine, image_classifier, image_embedder
from headrace.errors import (
    ConfigError,
    EngineDeadError,
    EngineError,
    ModelCodeError,
    RecordError,
    first_line,
    model_code,
)

# In a folder with several models, prefer the plain export to optimised and quantised ones.
_NAMES = ("model.onnx", "onnx/model.onnx")
_LOADING = (
    failures.Fail,
    failures.InvalidProtobuf,
    failures.InvalidGraph,
    failures.NoSuchFile,
    failures.NotImplemented,
)
_DTYPES = {"tensor(float16)": np.float16, "tensor(int32)": np.int32}
"""The dtypes of inputs that may differ from Headrace's arrays."""
# Outputs that are vectors; without one of these, token states are pooled as the folder's files specify.
_STATES = ("last_hidden_state", "token_embeddings")
_VECTORS = ("sentence_embedding", "image_embeds", "pooler_output")
_EXPORT = "export the model with it, as an output named sentence_embedding"


class OnnxNetwork:
    """An ONNX model in an onnxruntime session.

    Args:
        providers: execution providers, such as `CUDAExecutionProvider`; empty for all available ones.
        outputs: output names to look for, in order; the model's first output if none matches.
        pooling: converts token states of shape (rows, tokens, components) to vectors.

    Raises:
        ConfigError: a provider is not available.
        EngineError: the file cannot be loaded.
    """

    def __init__(
        self, folder: Path, providers: Sequence[str], outputs: Sequence[str], pooling: Pooling | None = None
    ) -> None:
        self._folder = folder
        self._file = _model_file(folder)
        available = onnxruntime.get_available_providers()
        if unknown := [name for name in providers if name not in available]:
            raise ConfigError(
                f"onnxruntime has no execution provider {unknown[0]!r}; available: {', '.join(available)}"
            )
        try:
            session = onnxruntime.InferenceSession(self._file, providers=list(providers) or available)
        except _LOADING as error:
            raise EngineError(f"the model {self._file} cannot be loaded: {first_line(error)}") from error
        self._session: onnxruntime.InferenceSession | None = session
        self.inputs = frozenset(one.name for one in session.get_inputs())
        self._dtypes = {one.name: _DTYPES[one.type] for one in session.get_inputs() if one.type in _DTYPES}
        # Quantised models scale values by the whole batch, and a file does not tell whether it is quantised.
        self.tolerance = 3e-2
        self.by_length = self.overlaps = False
        self.beside: BesideLane | None = None
        self.no_packing = "a file's attention is its own"
        self.sleeper: Sleeper | None = None
        self.meter: ForwardMeter | None = None  # onnxruntime does not tell which time is its own
        names = [one.name for one in session.get_outputs()]
        self._output = next((name for name in outputs if name in names), names[0])
        if self._output in (_VECTORS + _STATES if "logits" in outputs else ("logits",)):
            raise EngineError(
                f"the model {self._file} has the outputs {', '.join(names)}, not {' or '.join(outputs)}: it was "
                "exported for another task"
            )
        self._pooling = None if self._output in outputs else pooling
        self._providers = session.get_providers()
        self.kind = "cuda" if any("CUDA" in name or "Tensorrt" in name for name in self._providers) else "cpu"
        self.batch_tokens = BATCH_TOKENS[self.kind]

    def describe(self) -> Mapping[str, object]:
        """The digest of the model's files, each of which is read, the output used and its pooling."""
        beside = [self._file, *sorted(self._file.parent.glob(self._file.name + ".*"))]  # external weights
        facts = {"runtime": "onnx", "model_digest": digest(self._folder, beside), "output": self._output}
        return facts | ({"pooling": self._pooling.describe()} if self._pooling else {})

    def hardware(self) -> Mapping[str, object]:
        return {"providers": self._providers, "onnxruntime": onnxruntime.__version__}

    def dtype_speeds(self) -> Mapping[str, float]:
        """None: the file fixes the dtype."""
        return {}

    def run(self, arrays: Arrays) -> OutputRows:
        """One float32 output row per input row. A failure of the device, which has no error type, fails the batch."""
        session = self._session
        if session is None:
            raise EngineDeadError("the engine is closed; create a new one")
        given = {name: array.astype(self._dtypes.get(name, array.dtype), copy=False) for name, array in arrays.items()}
        rows: OutputRows = session.run([self._output], given)[0].astype(np.float32, copy=False)
        if self._pooling:
            return _pooled(self._pooling, rows, np.asarray(arrays["attention_mask"]))
        return rows

    def run_texts(self, batch: TextBatch, packed: bool) -> OutputRows:  # noqa: ARG002  # see `no_packing`
        return self.run(batch.padded())

    def close(self) -> None:
        self._session = None


_POOLING = ("mean", "cls", "max")


def _pooled(
    pooling: Pooling, states: OutputRows, mask: np.ndarray[tuple[int, ...], np.dtype[np.generic]]
) -> OutputRows:
    """Vectors of shape (texts, components)."""
    real = mask[..., None].astype(np.float32)
    if pooling.mode == "cls":
        vectors = states[:, 0]
    elif pooling.mode == "max":
        vectors = np.where(real > 0, states, -np.inf).max(axis=1)
    else:
        vectors = (states * real).sum(axis=1) / np.maximum(real.sum(axis=1), 1e-9)
    if pooling.normalize:
        vectors = vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)
    return np.asarray(vectors, dtype=np.float32)


def embed(options: OnnxEmbedding) -> TextEngine:
    """Embed texts: the model's output `sentence_embedding`, else its pooled token states."""
    folder = find_folder(options.model, ONNX_WEIGHTS)
    pooling = pooling_of(folder, _POOLING, "the engine onnx", way_out=_EXPORT)
    network = OnnxNetwork(folder, options.providers, _VECTORS[:1], pooling)
    tokens = tokens_for(load_tokenizer(folder), _config(folder), "text", options.max_model_len, LongTexts.of(options))
    output_dtype = options.output_dtype
    facts = {"engine": "embedding"} | ({} if output_dtype == "float32" else {"output_dtype": output_dtype})
    return TextEngine(network, tokens, VectorHead(None, output_dtype=output_dtype), facts)


def classify(options: OnnxClassification) -> TextEngine:
    return classifier(*_with_logits(options, "either", LongTexts.of(options)), options.top_labels)


def score(options: OnnxScoring) -> TextEngine:
    return scorer(*_with_logits(options, "pair", LongTexts.of(options)))


def zero_shot(options: OnnxZeroShot) -> ZeroShotEngine:
    candidates = Candidates(options)
    network, tokens, config = _with_logits(options, "premise", LongTexts(options.on_too_long))
    return ZeroShotEngine(network, tokens, candidates, config)


def _with_logits(
    options: OnnxClassification | OnnxScoring | OnnxZeroShot, takes: Takes, long_texts: LongTexts
) -> tuple[OnnxNetwork, TextTokens, ModelConfig]:
    folder = find_folder(options.model, ONNX_WEIGHTS)
    network, config = OnnxNetwork(folder, options.providers, ["logits"]), _config(folder)
    return network, tokens_for(load_tokenizer(folder), config, takes, options.max_model_len, long_texts), config


def image_classify(options: OnnxImageClassification) -> ImageEngine:
    folder = find_folder(options.model, ONNX_WEIGHTS)
    config, images = _config(folder), images_for(folder, options.max_pixels, options.pixels)
    network = _ImageNetwork(folder, options.providers, ["logits"])
    engine = image_classifier(network, images, config, options.top_labels)
    check_columns(network.width(images), label_names(config))
    return engine


def image_embed(options: OnnxImageEmbedding) -> ImageEngine:
    """Embed images: the output `image_embeds` or `pooler_output`, else the first."""
    folder = find_folder(options.model, ONNX_WEIGHTS)
    images = images_for(folder, options.max_pixels, options.pixels)
    network = _ImageNetwork(folder, options.providers, _VECTORS)
    network.width(images)
    return image_embedder(network, images)


class _ImageNetwork(OnnxNetwork):
    """A model of images. An output that is not a vector is made one as the PyTorch engine does."""

    def run(self, arrays: Arrays) -> OutputRows:
        rows = super().run(arrays)
        if rows.ndim == 4:  # of places
            return np.asarray(rows.mean(axis=(2, 3)), dtype=np.float32)
        return rows[:, 0] if rows.ndim == 3 else rows  # of tokens, the first of which stands for the image

    def width(self, images: ImageInputs) -> int | None:
        """How many numbers the model gives for an image; None if none may be as large as its own.

        Raises:
            EngineError: it does not run on one.
        """
        try:
            with model_code():
                return int(self.run({"pixel_values": images.sample()[None]}).shape[1])
        except RecordError:
            return None
        except ModelCodeError as error:
            raise EngineError(
                f"the model in {self._folder} takes {', '.join(sorted(self.inputs))} and fails on the pixel_values of "
                f"an image: {error}"
            ) from error


def _model_file(folder: Path) -> Path:
    for name in _NAMES:
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.rglob("*.onnx"))
    if len(found) > 1:
        names = ", ".join(str(path.relative_to(folder)) for path in found)
        raise ConfigError(
            f"the model in {folder} has several ONNX files ({names}); rename the one to use to model.onnx"
        )
    return found[0]


def _config(folder: Path) -> ModelConfig:
    return with_own_settings(folder, load_config(folder).to_dict())
