"""Small real models, made on the spot: random weights of fixed seeds, real tokenizers and processors, real files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

NLI = ("contradiction", "neutral", "entailment")


def words(longest: int) -> Any:
    """The tokenizer of all-MiniLM-L6-v2, or one of its kind where that is not installed, as on a machine with a GPU."""
    from transformers import AutoTokenizer

    from headrace.engines.model_folder import find_folder
    from headrace.errors import ConfigError

    try:
        return AutoTokenizer.from_pretrained(str(find_folder(None)), model_max_length=longest)
    except ConfigError:
        from benchmarks.gpu_models import words as made

        return made(longest)


def text_model(
    folder: Path, labels: Sequence[str] = ("no", "yes"), *, seed: int = 0, head: bool = True, **config: Any
) -> Path:
    """A BERT for sequence classification with the tokenizer of all-MiniLM-L6-v2 and 128 positions.

    Without its head it is an encoder, as embedding models are.
    `config` may name another `hidden_size` than 32.
    """
    import torch
    from transformers import BertConfig, BertForSequenceClassification, BertModel

    tokenizer = words(128)
    tokenizer.save_pretrained(str(folder))
    torch.manual_seed(seed)
    settings = BertConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=128,
        id2label=dict(enumerate(labels)),
        label2id={name: index for index, name in enumerate(labels)},
        **{
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "intermediate_size": 64,
            "initializer_range": 0.5,
            **config,
        },
    )
    (BertForSequenceClassification if head else BertModel)(settings).save_pretrained(str(folder))
    return folder


def chat_model(folder: Path, template: str, added: Sequence[str] = (), special: Sequence[str] = ()) -> Path:
    """A Llama of random weights with letters for tokens, further ones, and a template for chats."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    from headrace.engines.generation.causal_lm import ARITHMETIC

    torch.manual_seed(0)
    words = AutoTokenizer.from_pretrained(str(ARITHMETIC))
    words.chat_template = template
    words.add_tokens(list(added))
    words.add_tokens(list(special), special_tokens=True)
    config = LlamaConfig(
        vocab_size=len(words), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=1200, initializer_range=0.4, eos_token_id=1, pad_token_id=0,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def vision_model(folder: Path, kind: str = "vit") -> Path:
    """A small ViT or ResNet classifier, or a CLIP, with its image processor."""
    import torch
    from transformers import (
        CLIPConfig,
        CLIPModel,
        ResNetConfig,
        ResNetForImageClassification,
        ViTConfig,
        ViTForImageClassification,
    )
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    labels = {"id2label": {0: "canal", 1: "mill", 2: "wheel"}, "label2id": {"canal": 0, "mill": 1, "wheel": 2}}
    model: Any
    if kind == "vit":
        model = ViTForImageClassification(
            ViTConfig(image_size=32, patch_size=8, initializer_range=0.2, **sizes, **labels)
        )
        ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(str(folder))
    elif kind == "resnet":
        model = ResNetForImageClassification(
            ResNetConfig(embedding_size=16, hidden_sizes=[16, 32], depths=[1, 1], layer_type="basic", **labels)
        )
        crop = {"height": 32, "width": 32}
        CLIPImageProcessorPil(size={"shortest_edge": 40}, crop_size=crop).save_pretrained(str(folder))
    else:
        text = {**sizes, "vocab_size": 100, "max_position_embeddings": 16}
        vision = {**sizes, "image_size": 32, "patch_size": 8}
        model = CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24))
        crop = {"height": 32, "width": 32}
        CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size=crop).save_pretrained(str(folder))
    model.save_pretrained(str(folder))
    return folder


def picture(width: int = 40, height: int = 30, *, seed: int = 0, mode: str = "RGB") -> Image.Image:
    """Smooth random colours: resizing and compressing them changes little."""
    coarse = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()
