"""Headrace's tasks, and tasks by name."""

from __future__ import annotations

import difflib

from headrace.engines.declaring import Task
from headrace.errors import ConfigError, nearest
from headrace.plugins import known, load, working

_TEXT_LABELS = frozenset({"classifier", "cross-encoder"})

EMBED = Task(
    name="embed",
    output="embedding",
    outputs="vector",
    aliases=("embedding", "embeddings", "encode", "feature-extraction", "sentence-similarity", "vectorize"),
    suits=frozenset({"dense", "static", "masked", "bare", "decoder", "encoder-decoder"}),
    endpoints=("/v1/embeddings",),
    operation="embeddings",
    order=0,
)
SPARSE_EMBED = Task(
    name="sparse-embed",
    output="sparse_embedding",
    outputs="sparse vector",
    aliases=("sparse", "sparse-embedding", "sparse-embeddings", "sparse-encode", "splade"),
    suits=frozenset({"sparse", "masked"}),
    order=1,
)
MULTI_VECTOR_EMBED = Task(
    name="multi-vector-embed",
    output="multi_vector_embedding",
    outputs="vectors",
    aliases=("multi-vector", "multi-embed", "late-interaction", "colbert", "token-embed", "pylate"),
    suits=frozenset({"multi-vector"}),
    order=2,
)
CLASSIFY = Task(
    name="classify",
    output="classification",
    outputs="labels",
    pairs="perhaps",
    aliases=("classification", "text-classification", "sentiment", "sentiment-analysis", "moderation"),
    suits=_TEXT_LABELS,
    included="docstrings",
    endpoints=("/classify",),
    order=3,
)
SCORE = Task(
    name="score",
    output="score",
    outputs="score",
    pairs="always",
    aliases=("rerank", "reranker", "reranking", "text-ranking", "cross-encoder", "similarity", "nli"),
    suits=_TEXT_LABELS,
    endpoints=("/v1/score", "/v1/rerank"),
    order=4,
)
ZERO_SHOT = Task(
    name="zero-shot",
    output="classification",
    outputs="labels",
    aliases=("zero-shot-classification", "zeroshot"),
    suits=_TEXT_LABELS,
    endpoints=("/classify",),
    order=5,
)
IMAGE_CLASSIFY = Task(
    name="image-classify",
    output="classification",
    outputs="labels",
    input="image",
    images=True,
    text_only=False,
    aliases=("image-classification", "zero-shot-image-classification"),
    suits=frozenset({"image classifier"}),
    included="digits",
    order=6,
)
IMAGE_EMBED = Task(
    name="image-embed",
    output="embedding",
    outputs="vector",
    input="image",
    images=True,
    text_only=False,
    aliases=("image-embedding", "image-embeddings", "image-feature-extraction", "clip"),
    suits=frozenset({"image classifier", "vision"}),
    order=7,
)
GENERATE = Task(
    name="generate",
    output="generation",
    outputs="text",
    text_only=False,  # a prompt, a chat or a whole request
    requests=True,
    aliases=("chat", "completion", "completions", "complete", "generation", "text-generation", "text2text"),
    suits=frozenset({"decoder", "bare"}),
    endpoints=("/v1/completions", "/v1/chat/completions"),
    operation="text_completion",
    order=8,
)
CUSTOM = Task(name="custom", output="output", text_only=False, pairs="perhaps", order=9)

_PROMPTED = ("summarize", "summarization", "summary", "translate", "translation", "qa", "question-answering", "extract")
_UNSUPPORTED: tuple[str, ...] = (
    "ner", "token-classification", "pos", "fill-mask", "asr", "transcribe", "speech-recognition", "object-detection",
    "ocr", "caption", "image-to-text", "segment", "image-segmentation", "audio-classification", "depth-estimation",
)  # fmt: skip


def known_tasks() -> tuple[str, ...]:
    """The names of all registered tasks, also of those that cannot be imported, which come last."""
    order = {task.name: task.order for task in all_tasks()}
    return tuple(sorted(known("tasks"), key=lambda name: order.get(name, 1000)))


def all_tasks() -> tuple[Task, ...]:
    """All registered tasks that can be used, in their order."""
    usable = [task for name, task in working("tasks", Task).items() if task.name == name]
    return tuple(sorted(usable, key=lambda task: task.order))


def task_named(name: str | None) -> Task:
    """The task with this name. Raises ConfigError: there is none, or the package that registers it is broken."""
    if name is None or name not in known("tasks"):
        raise _unknown_task(name or "")
    task = load("tasks", name, Task)
    if task.name != name:
        raise ConfigError(f"{known('tasks')[name]} is called {task.name!r} itself; its package must register that name")
    return task


def tasks_for(endpoint: str) -> tuple[str, ...]:
    """The tasks that answer an endpoint of OpenAI's Batch API, the usual one first."""
    return tuple(task.name for task in all_tasks() if endpoint in task.endpoints)


def _unknown_task(name: str) -> ConfigError:
    names, tasks = known_tasks(), all_tasks()
    word = name.lower().replace("_", "-").strip()
    use, close = _use(word, tasks), ""
    if not use and not (close := nearest(word, names)):
        others = (*(alias for task in tasks for alias in task.aliases), *_PROMPTED, *_UNSUPPORTED)
        use = next((_use(one, tasks) for one in difflib.get_close_matches(word, others, 1, 0.75)), "")
    return ConfigError(f"unknown task {name!r}{use}; known: {', '.join(names)}{close}")


def _use(word: str, tasks: tuple[Task, ...]) -> str:
    """What to use for a word that another library has for a task; empty for other words."""
    for task in tasks:
        if word == task.name or word in task.aliases:
            more = ", with the second text in ``text_pair_column``" if task.pairs == "always" else ""
            return f": use {task.name!r}{more}"
    if word in _PROMPTED:
        return ": use 'generate' with an instruction in ``prompt_template``"
    if word in _UNSUPPORTED:
        return ": use a custom engine, ``task=custom, engine=module:function`` (docs/engines.md)"
    return ""
