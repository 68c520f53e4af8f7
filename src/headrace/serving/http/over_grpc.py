"""The Open Inference Protocol over gRPC. Each call becomes the request of the same name over HTTP, to the same app.

So keys, limits, deadlines, models, batches and metrics are those of HTTP. The messages are those of `tritonclient`.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self
from urllib.parse import unquote

import grpc
import orjson
from google.protobuf.json_format import ParseDict
from google.protobuf.message import Message as Protobuf
from starlette.types import ASGIApp, Message
from tritonclient.grpc import service_pb2 as messages

from headrace.errors import ConfigError
from headrace.records import JsonObject
from headrace.serving.protocol.requests import MOST_TIMEOUT_S

SERVICE = "inference.GRPCInferenceService"
_LENGTH = b"inference-header-content-length"
_STATUS = {
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.UNAVAILABLE,  # as gRPC's own table has it: clients try again
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_TRAILING = (b"retry-after", b"x-request-id")
"""Headers of an answer that go with an error."""
_STREAMED = 32
"""The most requests of a stream that are answered at the same time."""


@dataclass(frozen=True, slots=True)
class GrpcAddress:
    """Where gRPC is served."""

    host: str
    port: int
    certificate: Path | None = None
    """With `key`: for TLS."""
    key: Path | None = None
    authorities: Path | None = None
    """Must have signed the certificates of clients."""


class GrpcServer:
    """Serves an app over gRPC, on the event loop that runs it.

    Args:
        app: the app, with its middleware.
        most_bytes: the longest message.
    """

    def __init__(self, app: ASGIApp, address: GrpcAddress, most_bytes: int) -> None:
        self._app = app
        self._address = address
        self._most_bytes = most_bytes
        self._server: grpc.aio.Server | None = None

    async def start(self) -> str:
        """Start to listen; returns the address. Raises ConfigError: the address or a file of TLS cannot be used."""
        options = [
            ("grpc.max_receive_message_length", self._most_bytes),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        ]
        self._server = server = grpc.aio.server(options=options)
        server.add_generic_rpc_handlers((_handlers(self._app),))
        host = f"[{self._address.host}]" if ":" in self._address.host else self._address.host
        try:
            port = self._listen(server, f"{host}:{self._address.port}")
        except (RuntimeError, OSError) as error:
            message = f"cannot serve gRPC on {host} port {self._address.port}: {error}; choose another ``grpc_port``"
            raise ConfigError(message) from error
        await server.start()
        return f"grpc{'s' if self._address.certificate else ''}://{host}:{port}"

    def _listen(self, server: grpc.aio.Server, address: str) -> int:
        given = self._address
        if given.certificate is None or given.key is None:
            return int(server.add_insecure_port(address))
        authorities = None if given.authorities is None else given.authorities.read_bytes()
        pair = (given.key.read_bytes(), given.certificate.read_bytes())
        credentials = grpc.ssl_server_credentials([pair], authorities, authorities is not None)
        return int(server.add_secure_port(address, credentials))

    async def stop(self, grace_s: float) -> None:
        """Refuse further calls, and wait so long for those under way."""
        if self._server is not None:
            await self._server.stop(grace_s)


def _handlers(app: ASGIApp) -> grpc.GenericRpcHandler:
    calls = Calls(app)
    unary = {
        "ServerLive": calls.live,
        "ServerReady": calls.ready,
        "ServerMetadata": calls.server,
        "ModelReady": calls.model_ready,
        "ModelMetadata": calls.model,
        "ModelInfer": calls.infer,
    }
    table = {
        name: grpc.unary_unary_rpc_method_handler(
            call, getattr(messages, f"{name}Request").FromString, getattr(messages, f"{name}Response").SerializeToString
        )
        for name, call in unary.items()
    }
    table["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(
        calls.stream, messages.ModelInferRequest.FromString, messages.ModelStreamInferResponse.SerializeToString
    )
    return grpc.method_handlers_generic_handler(SERVICE, table)


class Calls:
    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def live(self, _: Protobuf, context: grpc.aio.ServicerContext) -> Protobuf:
        return messages.ServerLiveResponse(live=await self._probed("/v2/health/live", context))

    async def ready(self, _: Protobuf, context: grpc.aio.ServicerContext) -> Protobuf:
        return messages.ServerReadyResponse(ready=await self._probed("/v2/health/ready", context))

    async def _probed(self, path: str, context: grpc.aio.ServicerContext) -> bool:
        return (await _Exchange("GET", path).run(self._app, context)).status == 200

    async def server(self, _: Protobuf, context: grpc.aio.ServicerContext) -> Protobuf:
        return await self._described("/v2", messages.ServerMetadataResponse(), context)

    async def model(self, request: Protobuf, context: grpc.aio.ServicerContext) -> Protobuf:
        return await self._described(_path(request.name, request.version), messages.ModelMetadataResponse(), context)

    async def model_ready(self, request: Protobuf, context: grpc.aio.ServicerContext) -> Protobuf:
        path = f"{_path(request.name, request.version)}/ready"
        return await self._described(path, messages.ModelReadyResponse(), context)

    async def _described(self, path: str, told: Protobuf, context: grpc.aio.ServicerContext) -> Protobuf:
        exchange = await _Exchange("GET", path).run(self._app, context)
        if exchange.status != 200:
            await exchange.refuse(context)
        return ParseDict(orjson.loads(exchange.answer), told, ignore_unknown_fields=True)

    async def infer(self, request: Protobuf, context: grpc.aio.ServicerContext) -> Protobuf:
        exchange = await _infer(request).run(self._app, context)
        if exchange.status != 200:
            await exchange.refuse(context)
        return exchange.tensors()

    async def stream(
        self, requests: AsyncIterator[Protobuf], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[Protobuf]:
        """Answer the requests of a stream in their order. An error is the answer to one of them."""
        asked: asyncio.Queue[asyncio.Task[_Exchange] | None] = asyncio.Queue(_STREAMED)

        async def read() -> None:
            try:
                async for request in requests:
                    await asked.put(asyncio.create_task(_infer(request).run(self._app, context)))
            finally:  # a stream that breaks ends the answers too
                await asked.put(None)

        reading = asyncio.create_task(read(), name="headrace-grpc-stream")
        try:
            while (task := await asked.get()) is not None:
                exchange = await task
                if exchange.status == 200:
                    yield messages.ModelStreamInferResponse(infer_response=exchange.tensors())
                else:
                    yield messages.ModelStreamInferResponse(error_message=exchange.error)
            await reading
        finally:
            reading.cancel()
            while not asked.empty():
                if (task := asked.get_nowait()) is not None:
                    task.cancel()


def _path(model: str, version: str) -> str:
    return f"/v2/models/{model}/versions/{version}" if version else f"/v2/models/{model}"


def _infer(request: Protobuf) -> _Exchange:
    """The request to run a model, as over HTTP."""
    tensors = list(request.raw_input_contents)
    tensors += [_packed(one.contents.bytes_contents) for one in request.inputs if one.HasField("contents")]
    given = [_parameters(one.parameters) for one in request.inputs]
    for parameters, tensor in zip(given, tensors, strict=False):
        parameters["binary_data_size"] = len(tensor)
    inputs = [
        {"name": one.name, "datatype": one.datatype, "shape": [*one.shape], "parameters": parameters}
        for one, parameters in zip(request.inputs, given, strict=True)
    ]
    head: JsonObject = {"inputs": inputs, "parameters": {**_parameters(request.parameters), "binary_data_output": True}}
    if request.id:
        head["id"] = request.id
    if request.outputs:
        head["outputs"] = [{"name": one.name, "parameters": _parameters(one.parameters)} for one in request.outputs]
    encoded = orjson.dumps(head)
    headers = [(_LENGTH, str(len(encoded)).encode()), (b"content-type", b"application/octet-stream")]
    path = f"{_path(request.model_name, request.model_version)}/infer"
    return _Exchange("POST", path, b"".join([encoded, *tensors]), headers)


def _packed(texts: Sequence[bytes]) -> bytes:
    return b"".join(struct.pack("<I", len(text)) + text for text in texts)


def _parameters(given: Mapping[str, Protobuf]) -> JsonObject:
    if not given:
        return {}
    return {name: getattr(one, one.WhichOneof("parameter_choice") or "", None) for name, one in given.items()}


class _Exchange:
    def __init__(self, method: str, path: str, body: bytes = b"", headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self._method = method
        self._path = path
        self._coming = [body]
        self._headers = [*headers, (b"content-length", str(len(body)).encode())]
        self._answered: dict[bytes, bytes] = {}
        self._parts: list[bytes] = []
        self.status = 499  # unless it is answered

    async def run(self, app: ASGIApp, context: grpc.aio.ServicerContext) -> Self:
        left_s = context.time_remaining()
        metadata = context.invocation_metadata() or ()
        headers = [(name.encode(), value.encode()) for name, value in metadata if isinstance(value, str)]
        if left_s is not None:
            headers.append((b"x-request-timeout", f"{min(max(left_s, 0.001), MOST_TIMEOUT_S):.3f}".encode()))
        address, _, port = context.peer().removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "2",
            "method": self._method,
            "scheme": "http",
            "path": self._path,
            "raw_path": self._path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": self._headers + headers,
            "client": (unquote(address).strip("[]"), int(port) if port.isdigit() else 0),
            "server": None,
        }
        await app(scope, self._receive, self._send)
        return self

    async def _receive(self) -> Message:
        if self._coming:
            return {"type": "http.request", "body": self._coming.pop(), "more_body": False}
        await asyncio.Event().wait()  # a client that leaves cancels the call
        raise AssertionError

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self._answered = dict(message["headers"])
        else:
            self._parts.append(message.get("body", b""))

    @property
    def answer(self) -> bytes:
        return b"".join(self._parts)

    def tensors(self) -> Protobuf:
        """The answer with the outputs of a model."""
        raw = memoryview(self.answer)
        size = int(self._answered.get(_LENGTH, len(raw)))
        told = orjson.loads(raw[:size])
        found = messages.ModelInferResponse(
            model_name=told["model_name"], model_version=told["model_version"], id=told.get("id", "")
        )
        at = size
        for one in told["outputs"]:
            found.outputs.add(name=one["name"], datatype=one["datatype"], shape=one["shape"])
            end = at + one["parameters"]["binary_data_size"]
            found.raw_output_contents.append(bytes(raw[at:end]))
            at = end
        return found

    @property
    def error(self) -> str:
        try:
            told = orjson.loads(self.answer)["error"]
        except (ValueError, KeyError, TypeError):
            return f"HTTP status {self.status}"
        return str(told["message"] if isinstance(told, dict) else told)

    async def refuse(self, context: grpc.aio.ServicerContext) -> None:
        other = grpc.StatusCode.INVALID_ARGUMENT if self.status < 500 else grpc.StatusCode.INTERNAL
        passed = [(name.decode(), self._answered[name].decode()) for name in _TRAILING if name in self._answered]
        await context.abort(_STATUS.get(self.status, other), self.error, tuple(passed))
