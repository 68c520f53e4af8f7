"""Suggestions for unknown task names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from headrace.errors import ConfigError, nearest

_ALIASES: dict[str, tuple[str, ...]] = {
    "embed": ("embedding", "embeddings", "encode", "feature-extraction", "sentence-similarity", "vectorize"),
    "sparse-embed": ("sparse", "sparse-embedding", "sparse-embeddings", "sparse-encode", "splade"),
    "multi-vector-embed": ("multi-vector", "multi-embed", "late-interaction", "colbert", "token-embed", "pylate"),
    "classify": ("classification", "text-classification", "sentiment", "sentiment-analysis", "moderation"),
    "score": ("rerank", "reranker", "reranking", "text-ranking", "cross-encoder", "similarity", "nli"),
    "zero-shot": ("zero-shot-classification", "zeroshot"),
    "generate": ("chat", "completion", "completions", "complete", "generation", "text-generation", "text2text"),
    "image-classify": ("image-classification", "zero-shot-image-classification"),
    "image-embed": ("image-embedding", "image-embeddings", "image-feature-extraction", "clip"),
}
_PROMPTED = ("summarize", "summarization", "summary", "translate", "translation", "qa", "question-answering", "extract")
_UNSUPPORTED: tuple[str, ...] = (
    "ner",
    "token-classification",
    "pos",
    "fill-mask",
    "asr",
    "transcribe",
    "speech-recognition",
    "object-detection",
)
_UNSUPPORTED += (
    "ocr",
    "caption",
    "image-to-text",
    "segment",
    "image-segmentation",
    "audio-classification",
    "depth-estimation",
)


def unknown_task(name: str, known: Iterable[str]) -> ConfigError:
    """The error for an unknown task, with a suggestion if there is one."""
    known = tuple(known)
    word = name.lower().replace("_", "-").strip()
    use, close = _use(word), ""
    if not use and not (close := nearest(word, known)):
        others = (*(alias for aliases in _ALIASES.values() for alias in aliases), *_PROMPTED, *_UNSUPPORTED)
        use = next(map(_use, difflib.get_close_matches(word, others, 1)), "")
    return ConfigError(f"unknown task {name!r}{use}; known: {', '.join(known)}{close}")


def _use(word: str) -> str:
    """What to use for a word that another library has for a task; empty for other words."""
    for task, names in _ALIASES.items():
        if word == task or word in names:
            more = ", with the second text in ``text_pair_column``" if task == "score" else ""
            return f": use {task!r}{more}"
    if word in _PROMPTED:
        return ": use 'generate' with an instruction in ``prompt_template``"
    if word in _UNSUPPORTED:
        return ": use a custom engine, ``task=custom, engine=module:function`` (docs/engines.md)"
    return ""
