"""Linear layers of text encoders that multiply 8-bit integers, by torchao."""

from __future__ import annotations

import importlib.util

from transformers import PreTrainedModel

from headrace.device.precision import INT8
from headrace.engines.networks.prepacking import unpack
from headrace.errors import ConfigError, EngineError, MissingExtraError


def check_quantize(quantize: object, dtype: str) -> bool:
    """Whether to quantise.

    Raises:
        ConfigError: a dtype that the activations between the layers cannot have.
        MissingExtraError: torchao is not installed.
    """
    if quantize is None:
        return False
    if dtype not in ("auto", "float32"):
        raise ConfigError(f"``quantize`` is {INT8}, and ``dtype`` {dtype}: leave one of them out")
    if importlib.util.find_spec("torchao") is None:
        raise MissingExtraError(
            f'``quantize={INT8}`` needs torchao, which is not installed: pip install "headrace[quantize]"'
        )
    return True


def to_int8(model: PreTrainedModel) -> None:
    """Quantise the encoder's linear layers in place; embeddings, norms and the head stay as they are.

    Weights have one scale for each output, and activations one for each token, so that no text depends on its batch.

    Raises:
        EngineError: torchao cannot.
    """
    unpack(model.base_model)
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    try:
        quantize_(model.base_model, Int8DynamicActivationInt8WeightConfig())
    except (RuntimeError, ValueError, TypeError, NotImplementedError, AssertionError) as error:
        raise EngineError(f"torchao cannot quantize this model: {' '.join(str(error).split())}") from error
