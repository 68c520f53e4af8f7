"""The Open Inference Protocol (KServe's V2): /v2, /v2/models/{model} and its /ready, /config and /infer."""

from __future__ import annotations

import asyncio
import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import orjson
from fastapi import APIRouter, Request, Response
from numpy.typing import NDArray
from pydantic import Field, ValidationError

from headrace.engines.declaring import Task
from headrace.records import JsonObject
from headrace.serving.errors import ApiError, invalid, told_as
from headrace.serving.http.direct import DirectRoute
from headrace.serving.protocol.requests import HEAVY_BYTES, StrictFields, check_values
from headrace.serving.protocol.responses import JsonReply, as_json
from headrace.serving.protocol.schemas import error_responses
from headrace.serving.protocols import ServerProtocol
from headrace.serving.service import RequestAnswers
from headrace.serving.state import ServerState
from headrace.wording import shown

errors = told_as("error")


class InputParameters(StrictFields):
    """What is known of a tensor of a request."""

    binary_data_size: Annotated[int | None, Field(ge=0)] = None


class OutputParameters(StrictFields):
    """How a tensor is wanted."""

    binary_data: bool | None = None


class InputTensor(StrictFields):
    """A tensor of a request."""

    name: str
    shape: list[Annotated[int, Field(ge=0)]]
    datatype: Literal["BYTES"]
    parameters: InputParameters = InputParameters()
    data: list[object] | None = None


class OutputTensor(StrictFields):
    """A tensor that a request asks for."""

    name: str
    parameters: OutputParameters = OutputParameters()


class InferRequest(StrictFields):
    """POST /v2/models/{model}/infer, without binary data."""

    id: str | None = None
    inputs: Annotated[list[InputTensor], Field(min_length=1)]
    outputs: list[OutputTensor] | None = None
    parameters: JsonObject = Field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of an answer."""

    name: str
    values: NDArray[np.float32] | NDArray[np.object_]
    """Numbers of 32 bits, or texts as objects."""

    @property
    def datatype(self) -> str:
        """Its name in the protocol."""
        return "BYTES" if self.values.dtype == object else "FP32"

    def as_bytes(self) -> bytes:
        """Its binary form."""
        if self.values.dtype != object:
            return self.values.astype("<f4", copy=False).tobytes()
        texts = [str(text).encode() for text in self.values.ravel()]
        return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def parse(raw: bytes, header_bytes: int | None) -> tuple[InferRequest, list[list[str]]]:
    """The request, and the texts of each of its inputs.

    Args:
        raw: the body: JSON, then the binary tensors.
        header_bytes: the length of the JSON; None if there is nothing else.

    Raises:
        ApiError: 400 for a body that is malformed, named by its field.
    """
    size = len(raw) if header_bytes is None else header_bytes
    if size > len(raw):
        message = f"Inference-Header-Content-Length is {size}, more than the {len(raw)} bytes of the body"
        raise ApiError(400, message, code="bad_length")
    if size > HEAVY_BYTES:
        check_values(raw[:size])
    try:
        request = InferRequest.model_validate(_loaded(raw[:size]))
    except ValidationError as error:
        raise invalid(error) from None
    except (ValueError, RecursionError):
        raise ApiError(400, "the body is not valid JSON", code="json_invalid") from None
    rest = memoryview(raw)[size:]
    texts = []
    for at, tensor in enumerate(request.inputs):
        found, rest = _texts(tensor, rest, f"inputs.{at}")
        count = math.prod(tensor.shape)
        if len(found) != count:
            where = f"inputs.{at}.shape"
            message = f"{where} is {tensor.shape}, which is {count} texts, but {len(found)} are given"
            raise ApiError(400, message, code="bad_shape", param=where)
        texts.append(found)
    if len(rest):
        raise ApiError(400, f"inputs: {len(rest)} bytes after the last tensor", code="bad_length", param="inputs")
    return request, texts


def _loaded(raw: bytes) -> object:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:  # it takes fewer kinds of numbers and texts
        return json.loads(raw)


def _texts(tensor: InputTensor, rest: memoryview, place: str) -> tuple[list[str], memoryview]:
    size = tensor.parameters.binary_data_size
    if size is None:
        found: list[str] = []
        todo: list[object] = [tensor.data]
        while todo:
            one = todo.pop()
            if isinstance(one, list):
                todo += reversed(one)
            elif isinstance(one, str):
                found.append(one)
            else:
                where = f"{place}.data"
                raise ApiError(400, f"{where} holds {shown(one)}: it must hold texts", code="not_text", param=where)
        return found, rest
    where = f"{place}.parameters.binary_data_size"
    if size > len(rest):
        message = f"{where} is {size}: {len(rest)} bytes follow"
        raise ApiError(400, message, code="bad_length", param=where)
    return _unpacked(rest[:size], place), rest[size:]


def _unpacked(data: memoryview, place: str) -> list[str]:
    texts, at = [], 0
    try:
        while at < len(data):
            (length,) = struct.unpack_from("<I", data, at)
            at += 4
            if length > len(data) - at:
                raise ValueError
            texts.append(str(data[at : at + length], "utf-8"))
            at += length
    except (struct.error, ValueError):
        message = f"{place}: the binary data is not texts in UTF-8, each after its length in 4 bytes"
        raise ApiError(400, message, code="not_text", param=place) from None
    return texts


def answer(request: InferRequest, tensors: Sequence[Tensor], head: JsonObject) -> tuple[bytes, int | None]:
    """The body of an answer, and the length of its JSON if binary tensors follow.

    Raises:
        ApiError: 400 for an output that there is not.
    """
    by_name = {tensor.name: tensor for tensor in tensors}
    binary = request.parameters.get("binary_data_output") is True
    wanted = dict.fromkeys(by_name, binary)
    if request.outputs is not None:
        given = {one.name: one.parameters.binary_data for one in request.outputs}
        wanted = {name: binary if packed is None else packed for name, packed in given.items()}
    outputs: list[JsonObject] = []
    parts: list[bytes] = []
    for at, (name, packed) in enumerate(wanted.items()):
        if name not in by_name:
            message = f"there is no output {shown(name)}; the model has {', '.join(by_name)}"
            raise ApiError(400, message, code="unknown_output", param=f"outputs.{at}.name")
        tensor = by_name[name]
        entry: JsonObject = {"name": name, "datatype": tensor.datatype, "shape": list(tensor.values.shape)}
        if packed:
            parts.append(tensor.as_bytes())
            entry["parameters"] = {"binary_data_size": len(parts[-1])}
        else:
            flat = tensor.values.ravel()
            entry["data"] = flat.tolist() if flat.dtype == object else flat
        outputs.append(entry)
    identity = {} if request.id is None else {"id": request.id}
    body = orjson.dumps({**head, **identity, "outputs": outputs}, option=orjson.OPT_SERIALIZE_NUMPY)
    return b"".join([body, *parts]), len(body) if parts else None


_LENGTH = b"inference-header-content-length"
_VERSION = "1"
_OUTPUTS: dict[str, list[tuple[str, str, list[int]]]] = {
    "vector": [("embedding", "FP32", [-1, -1])],
    "labels": [("label", "BYTES", [-1]), ("score", "FP32", [-1])],
    "score": [("score", "FP32", [-1])],
    "text": [("text", "BYTES", [-1])],
}
"""Name, type and shape of the tensors of each kind of output; others are texts of JSON."""


def _router(state: ServerState, task: Task) -> APIRouter:
    router = APIRouter(tags=["Open Inference Protocol"], responses=error_responses(errors), route_class=DirectRoute)
    inputs = ["query", "text"] if task.pairs == "always" else ["text"]
    outputs = _OUTPUTS.get(task.outputs, [("output", "BYTES", [-1])])

    def check(request: Request) -> str:
        """The name of the model in the answer."""
        name = state.check_model(request.path_params["model"])
        if (version := request.path_params.get("version", _VERSION)) != _VERSION:
            raise ApiError(404, f"the model has no version {version!r}, only {_VERSION!r}", code="no_such_version")
        return name

    async def server(request: Request) -> Response:
        """Describe the server."""
        return JsonReply({"name": "headrace", "version": request.app.version, "extensions": ["binary_tensor_data"]})

    async def metadata(request: Request) -> Response:
        """Describe the model's tensors."""
        return JsonReply({
            "name": check(request),
            "versions": [_VERSION],
            "platform": f"headrace_{task.name}",
            "inputs": [{"name": name, "datatype": "BYTES", "shape": [-1]} for name in inputs],
            "outputs": [{"name": name, "datatype": kind, "shape": shape} for name, kind, shape in outputs],
        })  # fmt: skip

    async def ready(request: Request) -> Response:
        """Whether the model takes requests."""
        return JsonReply({"name": check(request), "ready": True})

    async def infer(body: bytes, request: Request) -> Response:
        """Run the model on a tensor of texts."""
        name = check(request)
        size = _header_bytes(request)
        if len(body) > HEAVY_BYTES:
            asked, texts = await asyncio.to_thread(parse, body, size)
        else:
            asked, texts = parse(body, size)
        del body  # it may be long, and the answer may take long
        records, cost, timeout_s = _records(state, task, asked, texts)
        records = state.service.model.given(name, records)
        answers = await state.service.infer(records, cost, state.call(request, timeout_s, "inputs"))
        head: JsonObject = {"model_name": name, "model_version": _VERSION}
        content, header = answer(asked, _tensors(task, answers), head)
        if header is None:
            return Response(content, media_type="application/json")
        return Response(content, 200, {_LENGTH.decode(): str(header)}, "application/octet-stream")

    router.get("/v2")(server)
    for path in ("/v2/models/{model:path}/versions/{version}", "/v2/models/{model:path}"):  # a name may have slashes
        router.get(f"{path}/ready")(ready)
        router.post(f"{path}/infer")(infer)
        router.get(path)(metadata)
    return router


def _header_bytes(request: Request) -> int | None:
    for name, value in request.scope["headers"]:
        if name == _LENGTH:
            if not value.isdigit():
                message = f"Inference-Header-Content-Length is {value.decode('latin-1')!r:.60}: it must be a number"
                raise ApiError(400, message, code="bad_length")
            return int(value)
    return None


def _records(
    state: ServerState, task: Task, asked: InferRequest, texts: Sequence[list[str]]
) -> tuple[Sequence[object], int, float | None]:
    """The records of a request, their estimated cost, and its time limit in seconds.

    Raises:
        ApiError: 400 for a wrong number of tensors or texts, or a parameter that is not known.
    """
    wanted = 2 if task.pairs == "always" else 1
    if len(texts) != wanted:
        message = f"inputs holds {len(texts)} tensors; the model takes {wanted}"
        raise ApiError(400, message, code="bad_shape", param="inputs")
    given = {name: value for name, value in asked.parameters.items() if name not in ("binary_data_output", "priority")}
    timeout = given.pop("timeout", None)
    if timeout is not None and (type(timeout) is not int or timeout <= 0):
        raise ApiError(400, "timeout must be microseconds > 0", code="invalid_value", param="parameters.timeout")
    timeout_s = None if timeout is None else timeout / 1e6
    if given and not task.requests:
        name = next(iter(given))
        raise ApiError(400, f"the model takes no parameter {name!r}", code="unknown_field", param=f"parameters.{name}")
    if wanted == 1:
        cost = state.check_texts(texts[0], "inputs")
        return [{**given, "prompt": text} for text in texts[0]] if task.requests else texts[0], cost, timeout_s
    queries, others = texts
    if len(queries) == 1:
        queries = queries * len(others)
    if len(queries) != len(others):
        message = f"inputs holds {len(queries)} and {len(others)} texts: give one and several, or as many of both"
        raise ApiError(400, message, code="bad_shape", param="inputs")
    pairs = list(zip(queries, others, strict=True))
    return pairs, state.check_pairs(pairs, "inputs.0", "inputs.1"), timeout_s


def _tensors(task: Task, answers: RequestAnswers) -> list[Tensor]:
    outputs = answers.outputs
    if task.outputs == "vector":
        return [Tensor("embedding", np.asarray(outputs, np.float32))]
    if task.outputs == "score":
        return [Tensor("score", np.asarray(outputs, np.float32))]
    if task.outputs == "labels":
        scores = np.asarray([one["score"] for one in outputs], np.float32)
        return [Tensor("label", _objects([one["label"] for one in outputs])), Tensor("score", scores)]
    if task.outputs == "text":
        return [Tensor("text", _objects([one["text"] for one in outputs]))]
    return [Tensor("output", _objects([as_json(one).decode() for one in outputs]))]


def _objects(texts: list[str]) -> NDArray[np.object_]:
    return np.array([str(text) for text in texts], dtype=object)


PROTOCOL = ServerProtocol(
    name="oip",
    routers=lambda state, task: [] if task.images else [_router(state, task)],
    errors=errors,
    paths=("/v2",),
    order=16,
)
