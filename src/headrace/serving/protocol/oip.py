"""Requests, answers and errors of the Open Inference Protocol: tensors of texts in, tensors out, as JSON or binary."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from headrace.records import JsonObject
from headrace.serving.errors import ApiError, invalid
from headrace.serving.protocol.requests import HEAVY_BYTES, check_values
from headrace.wording import shown


def errors(error: ApiError) -> tuple[int, JsonObject]:
    return error.status_code, {"error": error.message}


class InputParameters(BaseModel):
    """What is known of a tensor of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    binary_data_size: Annotated[int | None, Field(ge=0)] = None


class OutputParameters(BaseModel):
    """How a tensor is wanted."""

    model_config = ConfigDict(extra="forbid", strict=True)

    binary_data: bool | None = None


class InputTensor(BaseModel):
    """A tensor of a request."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    shape: list[Annotated[int, Field(ge=0)]]
    datatype: Literal["BYTES"]
    parameters: InputParameters = InputParameters()
    data: list[object] | None = None


class OutputTensor(BaseModel):
    """A tensor that a request asks for."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str
    parameters: OutputParameters = OutputParameters()


class InferRequest(BaseModel):
    """POST /v2/models/{model}/infer, without binary data."""

    model_config = ConfigDict(extra="forbid", strict=True)

    id: str | None = None
    inputs: Annotated[list[InputTensor], Field(min_length=1)]
    outputs: list[OutputTensor] | None = None
    parameters: JsonObject = {}


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
