"""What else people call the tasks, and what there is for those names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from headrace.errors import ConfigError

_CALLED: dict[str, tuple[str, ...]] = {
    "embed": ("embedding", "embeddings", "encode", "feature-extraction", "sentence-similarity", "vectorize"),
    "classify": ("classification", "text-classification", "sentiment", "sentiment-analysis", "moderation"),
    "score": ("rerank", "reranker", "reranking", "text-ranking", "cross-encoder", "similarity", "nli"),
    "zero-shot": ("zero-shot-classification", "zeroshot"),
    "generate": ("chat", "completion", "completions", "complete", "generation", "text-generation", "text2text"),
    "image-classify": ("image-classification", "zero-shot-image-classification"),
    "image-embed": ("image-embedding", "image-embeddings", "image-feature-extraction", "clip"),
}
_PROMPTED = ("summarize", "summarization", "summary", "translate", "translation", "qa", "question-answering", "extract")
_OWN: tuple[str, ...] = (
    "ner",
    "token-classification",
    "pos",
    "fill-mask",
    "asr",
    "transcribe",
    "speech-recognition",
    "object-detection",
)
_OWN += ("ocr", "caption", "image-to-text", "segment", "image-segmentation", "audio-classification", "depth-estimation")


def unknown_task(name: str, known: Iterable[str]) -> ConfigError:
    """What to say about a task that there is not."""
    known = tuple(known)
    return ConfigError(f"unknown task {name!r}{_hint(name, known)}; known: {', '.join(known)}")


def _hint(name: str, known: tuple[str, ...]) -> str:
    word = name.lower().replace("_", "-").strip()
    for task, names in _CALLED.items():
        if word == task or word in names:
            more = ", with the second text in --text-pair-column" if task == "score" else ""
            return f": take {task!r}{more}"
    if word in _PROMPTED:
        return ": take 'generate', and say in --prompt-template what is to be done with the text"
    if word in _OWN:
        return ": a model of your own does it, with --task custom --engine module:function (docs/engines.md)"
    every = [*known, *(name for names in _CALLED.values() for name in names), *_PROMPTED, *_OWN]
    close = difflib.get_close_matches(word, every, 1)
    return _hint(close[0], known) if close else ""
