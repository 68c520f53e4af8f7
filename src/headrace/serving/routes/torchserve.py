"""TorchServe's inference API: /predictions/{model}, for one record of any type of body."""

from __future__ import annotations

import json
from email.parser import BytesParser
from email.policy import HTTP
from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response

from headrace.engines.declaring import Task
from headrace.records import JsonObject
from headrace.serving.errors import ApiError
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.requests import HEAVY_BYTES, check_values
from headrace.serving.protocol.responses import JsonReply
from headrace.serving.protocol.schemas import error_responses
from headrace.serving.protocols import ServerProtocol
from headrace.serving.state import ServerState, chars_in, guess
from headrace.wording import shown

_FIELDS = ("data", "body")
"""Names of the form's part, or of the JSON object's field, that hold the record."""
_TYPES = {404: "ModelNotFoundException", 429: "ServiceUnavailableException", 503: "ServiceUnavailableException"}


def errors(error: ApiError) -> tuple[int, JsonObject]:
    """The status and body of an error."""
    usual = "BadRequestException" if error.status_code < 500 else "InternalServerException"
    kind = _TYPES.get(error.status_code, usual)
    return error.status_code, {"code": error.status_code, "type": kind, "message": error.message}


def _routers(state: ServerState, task: Task) -> list[APIRouter]:
    router = APIRouter(tags=["TorchServe"], responses=error_responses(errors), route_class=DirectRoute)

    @router.post("/predictions/{model}/{version}")
    @router.post("/predictions/{model}")
    async def predict(body: bytes, request: Request) -> Response:
        """Run the model on one record."""
        name = state.check_model(request.path_params["model"])
        record = _record(body, request.headers.get("content-type", ""), task)
        if task.images:
            size = 1
        elif isinstance(record, str):
            size = state.check_texts([record], "data")
        else:
            chars = chars_in(list(record) if isinstance(record, tuple) else record)
            state.check_length(chars, "data")
            size = min(guess(chars), state.service.most_cost)
        records = state.service.model.given(name, [record])
        answers = await state.service.infer(records, size, state.call(request, None, "data"))
        [output] = answers.outputs
        return JsonReply(output["text"] if task.outputs == "text" else output)

    return [router]


def _record(body: bytes, content_type: str, task: Task) -> object:
    kind = content_type.partition(";")[0].strip().lower()
    if kind == "application/json":
        return _checked(_from_json(body), task)
    if kind == "multipart/form-data":
        body = _part(body, content_type)
    elif kind == "application/x-www-form-urlencoded" and body.startswith(tuple(f"{one}=".encode() for one in _FIELDS)):
        fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
        return _checked(next(fields[name][0] for name in _FIELDS if name in fields), task)
    if task.images:
        return body
    try:
        return _checked(body.decode(), task)
    except UnicodeDecodeError:
        raise _wrong("the body is not a text in UTF-8") from None


def _from_json(body: bytes) -> object:
    if len(body) > HEAVY_BYTES:
        check_values(body)
    try:
        content: object = json.loads(body)
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON", code="json_invalid") from None
    if isinstance(content, dict) and len(content) == 1:
        return next((content[name] for name in _FIELDS if name in content), content)
    return content


def _part(body: bytes, content_type: str) -> bytes:
    """The content of the form's part with the record."""
    head = f"Content-Type: {content_type}\r\n\r\n".encode("latin-1")
    for part in BytesParser(policy=HTTP).parsebytes(head + body).iter_parts():
        if part.get_param("name", header="content-disposition") in _FIELDS:
            content = part.get_payload(decode=True)
            return content if isinstance(content, bytes) else b""
    raise _wrong(f"the form has no part {' or '.join(_FIELDS)}")


def _checked(record: object, task: Task) -> object:
    """The record as the task takes it."""
    if task.pairs == "always":
        if not isinstance(record, list) or len(record) != 2 or not all(isinstance(one, str) for one in record):
            raise _wrong(f"{shown(record, 80)}: it must be a JSON list of two texts")
        return tuple(record)
    if task.images or (task.text_only and not isinstance(record, str)):
        raise _wrong(f"{shown(record, 80)}: it must be {'the bytes of an image' if task.images else 'a text'}")
    return record


def _wrong(why: str) -> ApiError:
    return ApiError(400, f"data: {why}", code="invalid_value", param="data")


PROTOCOL = ServerProtocol(name="torchserve", routers=_routers, errors=errors, paths=("/predictions",), order=17)
