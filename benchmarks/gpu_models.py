"""The models of `benchmarks.gpu`: three real architectures with random weights, their inputs and work."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from tokenizers import BertWordPieceTokenizer
from transformers import (
    AutoTokenizer,
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from examples.docstrings import collect
from headrace.engines.generation.causal_lm import ARITHMETIC

SMALL: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 128,
}


def words(longest: int) -> PreTrainedTokenizerFast:
    """A tokenizer of BERT's kind and size, made from docstrings: no model's files are needed."""
    made = BertWordPieceTokenizer()
    made.train_from_iterator(collect().values(), vocab_size=30_522, show_progress=False)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(
        tokenizer_object=made._tokenizer, model_max_length=longest, mask_token="[MASK]", **special
    )


def bert(folder: Path, tiny: bool) -> Path:
    """BERT-base, 110 million parameters."""
    torch.manual_seed(0)
    words(512).save_pretrained(folder)
    BertModel(BertConfig(**(SMALL if tiny else {}))).save_pretrained(folder)
    return folder


def vit(folder: Path, tiny: bool) -> Path:
    """ViT-B/16, 86 million parameters, images of 224 × 224."""
    torch.manual_seed(0)
    ViTForImageClassification(ViTConfig(**(SMALL if tiny else {}), num_labels=1000)).save_pretrained(folder)
    ViTImageProcessorPil(size={"height": 224, "width": 224}).save_pretrained(folder)
    return folder


def qwen(folder: Path, setting: Any) -> Path:
    """Qwen2.5-7B, 7.6 billion parameters; its texts are characters, which makes no difference to its speed."""
    sizes = {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "intermediate_size": 18944}
    config = Qwen2Config(
        **(SMALL if setting.tiny else sizes),
        vocab_size=1024 if setting.tiny else 152_064,
        num_key_value_heads=2 if setting.tiny else 4,
        max_position_embeddings=32_768,
        eos_token_id=1,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, setting.dtype))
    try:
        with torch.device(setting.device):
            model = Qwen2ForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    del model  # the engine loads its own from the files
    torch.cuda.empty_cache()
    AutoTokenizer.from_pretrained(str(ARITHMETIC), model_max_length=32_768).save_pretrained(folder)
    return folder


def texts(tiny: bool) -> list[str]:
    """Docstrings of the standard library, a gross of times over on a GPU: some 600,000."""
    if tiny:
        return ["canal " * (number % 40 + 1) for number in range(64)]
    return list(collect().values()) * 144


def prompts(tiny: bool) -> list[dict[str, Any]]:
    """Prompts of 20 to 400 characters; answers of 8 to 512 tokens, half of them of less than 90."""
    rng = random.Random(0)
    count, longest = (12, 24) if tiny else (512, 512)
    return [
        {
            "prompt": "".join(rng.choices("abcdefghij +=0123456789", k=rng.randint(20, 400))),
            "max_tokens": min(max(round(rng.lognormvariate(4.5, 1.0)), 8), longest),
            "ignore_eos": True,
        }
        for _ in range(count)
    ]


def photographs(folder: Path, tiny: bool) -> list[str]:
    """JPEG files of a quarter to a half of a megapixel, smooth random colours."""
    rng = random.Random(0)
    files = []
    for number in range(24 if tiny else 2_000):
        coarse = Image.frombytes("RGB", (16, 12), rng.randbytes(16 * 12 * 3))
        size = (480 + 8 * (number % 40), 360 + 8 * (number % 30))
        files.append(str(folder / f"{number}.jpg"))
        coarse.resize(size, Image.Resampling.BICUBIC).save(files[-1], quality=90)
    return files


def _encoder(model: Any, lengths: Sequence[int]) -> float:
    """Two operations per parameter and token, and those of attention: 4 × tokens² × width in each layer."""
    config = model.config
    weights = sum(parameter.numel() for parameter in model.encoder.parameters())
    attention = 4 * config.hidden_size * config.num_hidden_layers
    return float(sum(2 * weights * length + attention * length**2 for length in lengths))


def _vit(model: Any, images: Sequence[int]) -> float:
    """The same, for the patches of an image and the class token."""
    tokens = (model.config.image_size // model.config.patch_size) ** 2 + 1
    weights = sum(parameter.numel() for parameter in model.parameters())
    attention = 4 * model.config.hidden_size * model.config.num_hidden_layers
    return float(len(images) * (2 * weights * tokens + attention * tokens**2))


def _decoder(model: Any, lengths: Sequence[int]) -> float:
    """The same, of which a token sees half of the others; the embedding is a look-up."""
    config = model.config
    weights = sum(parameter.numel() for parameter in model.parameters()) - model.get_input_embeddings().weight.numel()
    attention = 2 * config.hidden_size * config.num_hidden_layers
    return float(sum(2 * weights * length + attention * length**2 for length in lengths))


FLOPS: Mapping[str, Callable[[Any, Sequence[int]], float]] = {"bert": _encoder, "vit": _vit, "qwen": _decoder}
"""Floating-point operations of a model for inputs of these lengths in tokens."""
