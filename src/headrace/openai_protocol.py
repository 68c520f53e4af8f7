"""Request and response bodies of OpenAI's API, shared by the server, the Batch API, batch files and the client."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NotRequired, TypedDict, cast

_ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
    507: "insufficient_storage_error",
}


class GeneratorAnswer(TypedDict):
    """A generator's answer."""

    text: str
    finish_reason: str | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: NotRequired[int]
    logprobs: NotRequired[Sequence[Mapping[str, Any]]]
    reasoning: NotRequired[str]
    tool_calls: NotRequired[Sequence[Mapping[str, Any]]]
    tool_errors: NotRequired[Sequence[str]]


def error_body(status: int, message: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """The body of an error response."""
    kind = _ERROR_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_message(body: object) -> str | None:
    """The message of an error response; None if the body has another shape."""
    error = body.get("error") if isinstance(body, dict) else None
    return str(error["message"]) if isinstance(error, dict) and "message" in error else None


def batch_error(code: str, message: str, line: int | None = None, param: str | None = None) -> dict[str, object]:
    """An error of a batch, or of a line of its input file."""
    return {"code": code, "message": message, "line": line, "param": param}


def embeddings(vectors: Iterable[object], tokens: int, truncated: Sequence[int] = ()) -> dict[str, object]:
    """The body of an embedding response.

    Args:
        vectors: one per input, in their final form.
        tokens: total of all inputs.
        truncated: indices of truncated inputs, marked in their entries and the usage.
    """
    data: list[dict[str, object]] = [
        {"object": "embedding", "index": index, "embedding": vector} for index, vector in enumerate(vectors)
    ]
    for index in truncated:
        data[index]["truncated"] = True
    return {"object": "list", "data": data, "usage": input_usage(tokens, truncated)}


def input_usage(tokens: int, truncated: Sequence[int] = ()) -> dict[str, int]:
    """The usage of a request without output tokens, with the number of truncated inputs, if any."""
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {**usage, "truncated_inputs": len(truncated)} if truncated else usage


def completion(answers: Sequence[GeneratorAnswer], n: int = 1) -> dict[str, object]:
    """The body of a completion response: one choice per answer, `n` in a row for each prompt."""
    choices = [
        choice(index, text=answer["text"], finish=answer["finish_reason"], logprobs=completion_logprobs(answer))
        for index, answer in enumerate(answers)
    ]
    return {"object": "text_completion", "choices": choices, "usage": usage(answers, n)}


def chat_completion(answers: Sequence[GeneratorAnswer]) -> dict[str, object]:
    """The body of a chat completion response: one choice per answer."""
    choices = [
        choice(index, message=_message(answer), finish=answer["finish_reason"], logprobs=chat_logprobs(answer))
        for index, answer in enumerate(answers)
    ]
    return {"object": "chat.completion", "choices": choices, "usage": usage(answers, len(answers))}


def _message(answer: GeneratorAnswer) -> dict[str, object]:
    """The message of a chat's answer. `tool_errors` is no field of OpenAI's."""
    calls = answer.get("tool_calls")
    message: dict[str, object] = {"role": "assistant", "content": answer["text"] or (None if calls else "")}
    if reasoning := answer.get("reasoning"):
        message |= reasoning_fields(reasoning)
    more = {"tool_calls": calls, "tool_errors": answer.get("tool_errors")}
    return message | {name: list(value) for name, value in more.items() if value}


def reasoning_fields(text: str) -> dict[str, object]:
    """Reasoning under both names that clients read."""
    return {"reasoning_content": text, "reasoning": text}


def choice(index: int, *, finish: str | None, logprobs: object = None, **content: object) -> dict[str, object]:
    """One choice of a response or a streamed chunk; `content` is its text, message or delta."""
    return {"index": index, **content, "finish_reason": finish, "logprobs": logprobs}


def chat_logprobs(answer: GeneratorAnswer) -> dict[str, object] | None:
    """The log probabilities of a chat's answer."""
    return {"content": answer["logprobs"], "refusal": None} if "logprobs" in answer else None


def completion_logprobs(answer: GeneratorAnswer) -> dict[str, object] | None:
    """The log probabilities of a completion, in the older format of its API."""
    found = answer.get("logprobs")
    if found is None:
        return None
    lengths = [len(one["token"]) for one in found]
    return {
        "tokens": [one["token"] for one in found],
        "token_logprobs": [one["logprob"] for one in found],
        "top_logprobs": [{other["token"]: other["logprob"] for other in one["top_logprobs"]} for one in found],
        "text_offset": [sum(lengths[:place]) for place in range(len(found))],
    }


def usage(answers: Sequence[GeneratorAnswer] | Sequence[Mapping[str, Any]], n: int = 1) -> dict[str, object]:
    """The total tokens of all answers, `n` in a row for each prompt. A prompt counts once.

    If the engine has a prefix cache, it also says how many tokens of the prompts were in it.
    """
    prompt = sum(answer["prompt_tokens"] for answer in answers[::n])
    generated = sum(answer["completion_tokens"] for answer in answers)
    total: dict[str, object] = {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
    }
    cached: list[int] = [cast("Mapping[str, Any]", answer).get("cached_tokens", -1) for answer in answers[::n]]
    if any(tokens >= 0 for tokens in cached):
        total["prompt_tokens_details"] = {"cached_tokens": sum(max(tokens, 0) for tokens in cached)}
    return total
