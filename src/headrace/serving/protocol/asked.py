"""What a request asks of the model, whether it comes over HTTP or is a line of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from headrace.io.formats.openai_batch import CHAT, CLASSIFY, COMPLETIONS, EMBEDDINGS, RERANK, SCORE
from headrace.serving.protocol.bodies import MakeBody, labels_body, ranking_body, score_body
from headrace.serving.protocol.pairs import RerankRequest, ScoreRequest
from headrace.serving.protocol.requests import (
    BaseRequest,
    ChatRequest,
    ClassifyRequest,
    CompletionRequest,
    EmbeddingRequest,
    texts_of,
    texts_or_ids,
)
from headrace.serving.protocol.vectors import VectorNumbers, as_it_is, vector_format
from headrace.serving.state import ServerState


@dataclass(slots=True)  # made for each request, and a frozen one takes four times as long
class Asked:
    """The records of a request, checked, and how its answer is written."""

    values: Sequence[object]
    size: int
    """Their estimated total cost."""
    param: str
    """The field that holds them."""
    may_cut: bool = True
    """Whether they may be truncated."""
    format_output: Callable[[VectorNumbers], object] = as_it_is
    """Formats each output."""
    n: int = 1
    """Records in a row for each prompt."""
    make_body: MakeBody | None = None
    """Makes one body of all outputs."""


def embedding(state: ServerState, body: EmbeddingRequest, param: str) -> Asked:
    """Texts to embed. Blocks if the request `holds_ids`."""
    written = vector_format(body, state.service)
    texts = body.inputs(state.service.profile.prompt_names)
    return Asked(texts, state.check_texts(texts, param), param, body.may_cut(state.service.longest), written)


def generation(state: ServerState, body: CompletionRequest | ChatRequest, param: str) -> Asked:
    """Prompts to complete, or a chat to continue, of any protocol."""
    if isinstance(body, ChatRequest):
        state.check_choices(1, body.choices)
        size = state.check_messages(body.messages, param) + state.answer_cost(body.most_tokens)
        records = body.records(messages=body.messages)
    else:
        prompts = texts_or_ids(body.prompt)
        state.check_choices(len(prompts), body.choices)
        size = state.check_prompts(prompts, param) + len(prompts) * state.answer_cost(body.most_tokens)
        records = [record for prompt in prompts for record in body.records(prompt=prompt)]
    return Asked(state.service.model.given(body.model, records), size * body.choices, param, n=body.choices)


def score(state: ServerState, body: ScoreRequest, param: str) -> Asked:
    """Pairs of texts to score."""
    pairs = body.pairs()
    size = state.check_pairs(pairs, "text_1", param)
    return Asked(pairs, size, param, body.may_cut(state.service.longest), make_body=score_body)


def rerank(state: ServerState, body: RerankRequest, param: str) -> Asked:
    """Documents to rank."""
    body.check_chunks(splits=state.service.profile.splits)
    pairs = [(body.query, text) for text in body.listed()]
    size = state.check_pairs(pairs, "query", param)
    return Asked(pairs, size, param, body.may_cut(state.service.longest), make_body=partial(ranking_body, body))


def classify(state: ServerState, body: ClassifyRequest, param: str) -> Asked:
    """Texts to classify."""
    texts = texts_of(body.input)
    size = state.check_texts(texts, param)
    return Asked(texts, size, param, body.may_cut(state.service.longest), make_body=labels_body)


ENDPOINTS: Mapping[str, tuple[str, type[BaseRequest], Callable[..., Asked]]] = {
    EMBEDDINGS: ("input", EmbeddingRequest, embedding),
    COMPLETIONS: ("prompt", CompletionRequest, generation),
    CHAT: ("messages", ChatRequest, generation),
    SCORE: ("text_2", ScoreRequest, score),
    RERANK: ("documents", RerankRequest, rerank),
    CLASSIFY: ("input", ClassifyRequest, classify),
}
"""The field of the records, the body and its reader, of each endpoint that batches may have."""
