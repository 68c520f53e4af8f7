from __future__ import annotations

from typing import Any

import pytest

from headrace.openai_protocol import embeddings, error_body, error_message, usage


@pytest.mark.parametrize("status", [400, 418, 429, 500, 503])
def test_an_error_is_read_as_it_is_written(status: int) -> None:
    body = error_body(status, "no such model", "model_not_found", "model")
    assert error_message(body) == "no such model"
    assert body["error"].keys() == {"message", "type", "param", "code"}


@pytest.mark.parametrize("body", [None, [], "busy", {}, {"error": "busy"}, {"error": {"detail": "busy"}}])
def test_another_shape_has_no_message(body: Any) -> None:
    assert error_message(body) is None


def test_the_type_of_an_error_follows_its_status() -> None:
    types = {status: error_body(status, "x")["error"]["type"] for status in (401, 418, 429, 500)}
    assert types == {
        401: "authentication_error",
        418: "invalid_request_error",
        429: "rate_limit_error",
        500: "server_error",
    }


def test_inputs_that_were_cut_are_marked_and_counted() -> None:
    body = embeddings(iter([[1.0], [2.0]]), tokens=7, truncated=(1,))
    assert [entry.get("truncated", False) for entry in body["data"]] == [False, True]
    assert body["usage"] == {"prompt_tokens": 7, "total_tokens": 7, "truncated_inputs": 1}


def test_tokens_of_several_answers_add_up() -> None:
    answers = [{"prompt_tokens": 3, "completion_tokens": 2}, {"prompt_tokens": 4, "completion_tokens": 5}]
    total = {"prompt_tokens": 7, "completion_tokens": 7, "total_tokens": 14}
    assert usage(answers) == total
    cached = [answer | {"cached_tokens": 2} for answer in answers]
    assert usage(cached) == total | {"prompt_tokens_details": {"cached_tokens": 4}}
