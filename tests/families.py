"""Tiny text models of many families, with random weights and tokenizers of their own kinds, made on the spot."""

from __future__ import annotations

import json
import string
from collections.abc import Iterable
from pathlib import Path
from typing import Any

TRAINED_ON = ["the canal feeds the mill and its wheel turns " * 4, "so that it never runs dry in 1987, naïve 水車"] * 5
_WIDE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
_GPT = {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}
_T5 = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Bert": ("wordpiece", _WIDE | {"max_position_embeddings": 256}),
    "Roberta": ("bytes", _WIDE | {"max_position_embeddings": 258, "pad_token_id": 1}),
    "XLNet": ("unigram", {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64}),
    "FNet": ("wordpiece", {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}),
    "ConvBert": ("wordpiece", _WIDE | {"embedding_size": 32, "max_position_embeddings": 256}),
    "BigBird": ("unigram", _WIDE | {"max_position_embeddings": 1024, "block_size": 16, "num_random_blocks": 2}),
    "DebertaV2": ("wordpiece", _WIDE | {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}),
    "MPNet": ("wordpiece", _WIDE | {"max_position_embeddings": 258, "pad_token_id": 1}),
    "ModernBert": ("wordpiece", _WIDE | {"local_attention": 8, "global_attn_every_n_layers": 2, "pad_token_id": 0}),
    "Longformer": ("bytes", _WIDE | {"attention_window": 8, "max_position_embeddings": 258, "pad_token_id": 1}),
    "Albert": ("unigram", _WIDE | {"embedding_size": 16, "max_position_embeddings": 256}),
    "DistilBert": ("wordpiece", {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64}),
    "Electra": ("wordpiece", _WIDE | {"embedding_size": 16, "max_position_embeddings": 256}),
    "T5": ("unigram", _T5 | {"decoder_start_token_id": 0}),
    "GPT2": ("decoder", _GPT),
}
"""Each family's kind of tokenizer, and the sizes of its configuration. All can also classify."""

_KV = _WIDE | {"num_key_value_heads": 1, "max_position_embeddings": 256}
_HEADS = _KV | {"head_dim": 16}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_LATENT = {
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

MORE_ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "XLMRoberta": ("unigram", _WIDE | {"max_position_embeddings": 258, "pad_token_id": 1, "type_vocab_size": 2}),
    "RoFormer": ("wordpiece", _WIDE | {"embedding_size": 32, "max_position_embeddings": 256}),
    "RemBert": ("unigram", _WIDE | {"input_embedding_size": 16, "output_embedding_size": 16}),
    "MegatronBert": ("wordpiece", _WIDE | {"max_position_embeddings": 256}),
    "MobileBert": ("wordpiece", _WIDE | {"embedding_size": 16, "intra_bottleneck_size": 16}),
    "Flaubert": ("bytes", {"emb_dim": 32, "n_layers": 2, "n_heads": 2}),
    "Funnel": ("wordpiece", {"d_model": 32, "n_head": 2, "d_head": 16, "d_inner": 64, "block_sizes": [1, 1]}),
    "Ernie": ("wordpiece", _WIDE | {"max_position_embeddings": 256}),
    "EuroBert": ("bytes", _WIDE | {"max_position_embeddings": 256, "mask_token_id": 4}),
    "NomicBert": ("wordpiece", _WIDE | {"max_position_embeddings": 256}),
    "JinaEmbeddingsV3": ("unigram", _WIDE | {"max_position_embeddings": 258}),
    "CLIPText": ("bytes", _WIDE | {"max_position_embeddings": 258}),
    "Yoso": ("unigram", _WIDE | {"max_position_embeddings": 258}),
    "Nystromformer": ("unigram", _WIDE | {"segment_means_seq_len": 256, "num_landmarks": 8}),
    "Canine": ("wordpiece", _WIDE),
    "Llama": ("decoder", _KV),
    "Qwen3": ("decoder", _HEADS),
    "Gemma3Text": ("decoder", _HEADS | {"sliding_window": 8}),
    "Mamba": ("decoder", {"hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}),
}
"""More models that give vectors."""

_BART = {"d_model": 32, "decoder_layers": 2, "decoder_attention_heads": 2, "decoder_ffn_dim": 64}
_BART |= {"max_position_embeddings": 256}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2": FAMILIES["GPT2"],
    "GPTNeoX": ("decoder", _WIDE | {"max_position_embeddings": 256}),
    "GPTJ": ("decoder", _GPT | {"rotary_dim": 8}),
    "GPTBigCode": ("decoder", _GPT),
    "OPT": (
        "decoder",
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "word_embed_proj_dim": 32},
    ),
    "Bloom": ("decoder", {"hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "Mpt": ("decoder", {"d_model": 32, "n_layers": 2, "n_heads": 2, "max_seq_len": 256}),
    "Falcon": ("decoder", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}),
    "StableLm": ("decoder", _KV),
    "Llama": ("decoder", _KV),
    "Mistral": ("decoder", _KV | {"sliding_window": 8}),
    "Mixtral": ("decoder", _KV | {"num_local_experts": 4}),
    "Qwen2": ("decoder", _KV),
    "Qwen3": ("decoder", _HEADS),
    "Qwen3Moe": ("decoder", _HEADS | _EXPERTS),
    "Gemma": ("decoder", _HEADS),
    "Gemma2": ("decoder", _HEADS | {"sliding_window": 8, "query_pre_attn_scalar": 16}),
    "Phi": ("decoder", _WIDE | {"max_position_embeddings": 256}),
    "Phi3": ("decoder", _KV),
    "Olmo2": ("decoder", _KV),
    "Starcoder2": ("decoder", _KV),
    "Cohere": ("decoder", _KV),
    "Granite": ("decoder", _KV),
    "Glm": ("decoder", _HEADS),
    "DeepseekV3": ("decoder", _KV | _LATENT),
    "GptOss": ("decoder", _HEADS | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8}),
    "Lfm2": ("decoder", _KV | {"layer_types": ["conv", "full_attention"]}),
    "Mamba": MORE_ENCODERS["Mamba"],
    "Ministral3": ("decoder", _HEADS | {"sliding_window": 8}),
    "Olmo3": ("decoder", _KV | {"sliding_window": 8}),
    "SmolLM3": ("decoder", _KV),
    "Helium": ("decoder", _HEADS),
    "Nemotron": ("decoder", _KV),
    "DiffLlama": ("decoder", _WIDE | {"num_key_value_heads": 2, "max_position_embeddings": 256}),
    "Rwkv": (
        "decoder",
        {"hidden_size": 32, "num_hidden_layers": 2, "attention_hidden_size": 32, "context_length": 256},
    ),
    "XGLM": ("decoder", {"d_model": 32, "num_layers": 2, "attention_heads": 2, "ffn_dim": 64}),
    "BigBirdPegasus": ("decoder", _BART | {"attention_type": "original_full"}),
    "Blenderbot": ("decoder", _BART),
    "Git": ("decoder", _WIDE | {"max_position_embeddings": 256}),
}
"""Models that generate."""

KNOWN = FAMILIES | MORE_ENCODERS | DECODERS

_SPECIAL = ["<pad>", "<unk>", "<s>", "</s>", "<mask>"]


def tokenizer(kind: str, vocab_size: int = 400) -> Any:
    """A tokenizer of transformers, trained on a few sentences: "wordpiece", "bytes", "unigram" or "decoder".

    It states no longest text, and the decoder's adds no special tokens.
    """
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "wordpiece":
        inner = Tokenizer(models.WordPiece(unk_token="<unk>"))
        inner.normalizer = normalizers.BertNormalizer()
        inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=vocab_size, special_tokens=_SPECIAL)
    elif kind == "unigram":
        inner = Tokenizer(models.Unigram())
        inner.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" +", " ")])
        inner.pre_tokenizer = pre_tokenizers.Metaspace()
        trainer = trainers.UnigramTrainer(vocab_size=vocab_size, special_tokens=_SPECIAL, unk_token="<unk>")
    else:
        inner = Tokenizer(models.BPE())
        inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        trainer = trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=_SPECIAL, initial_alphabet=alphabet)
    inner.train_from_iterator(TRAINED_ON, trainer)
    if kind != "decoder":
        ends = [(name, inner.token_to_id(name)) for name in ("<s>", "</s>")]
        inner.post_processor = processors.TemplateProcessing("<s> $A </s>", "<s> $A </s> $B:1 </s>:1", ends)
    names = dict(zip(("pad_token", "unk_token", "bos_token", "eos_token", "mask_token"), _SPECIAL, strict=True))
    return PreTrainedTokenizerFast(tokenizer_object=inner, **names)


def family_model(
    folder: Path, family: str, kind: str = "Model", labels: Iterable[str] = ("no", "yes"), **more: Any
) -> Path:
    """A model of a family: `kind` is how its class ends, such as "ForSequenceClassification".

    Embeddings are pooled by their mean.
    """
    import torch
    import transformers

    words = tokenizer(KNOWN[family][0])
    names = dict(enumerate(labels))
    sizes = {"pad_token_id": words.pad_token_id, "bos_token_id": 2, "eos_token_id": 3, **KNOWN[family][1], **more}
    if family in ("Roberta", "MPNet", "Longformer", "XLMRoberta"):  # whose padding is number 1
        words.pad_token = "<unk>"
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(words), id2label=names, label2id={name: number for number, name in names.items()}, **sizes
    )
    module = getattr(transformers, f"{family}{kind}")(config)
    with torch.no_grad():  # as weights are that have learnt something: outputs differ from text to text
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)
    module.save_pretrained(str(folder))
    words.save_pretrained(str(folder))
    return folder


COLBERT_PROMPTS = {"query": "[unused0] ", "document": "the mill: "}


def colbert(folder: Path, *, attend: bool = False, strategy: str = "fixed") -> Path:
    """A late-interaction encoder with 8 components a vector, queries of 12 tokens and documents of 40 at most."""
    import torch
    from sentence_transformers import MultiVectorEncoder
    from sentence_transformers.base.modules import Dense, Normalize
    from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
    from sentence_transformers.sentence_transformer.modules import Transformer

    plain = family_model(folder.parent / f"{folder.name}-plain", "Bert")
    expansion = {"strategy": strategy, "attend": attend, "length": 12}
    encoder = Transformer(str(plain), query_expansion=expansion, document_length=40, max_seq_length=64)
    torch.manual_seed(1)
    identity = torch.nn.Identity()
    projection = Dense(32, 8, bias=False, activation_function=identity, module_input_name="token_embeddings")
    mask = MultiVectorMask(skiplist_words=list(string.punctuation))
    modules = [encoder, projection, mask, Normalize(module_input_name="token_embeddings")]
    MultiVectorEncoder(modules=modules, prompts=COLBERT_PROMPTS, device="cpu").save(str(folder))
    return folder


def change(folder: Path, name: str = "config.json", **values: Any) -> None:
    """Write other values into one of a folder's JSON files."""
    path = folder / name
    before = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(before | values))
