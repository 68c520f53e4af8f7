"""A server that takes a request and never answers is named while a job waits for it."""

from __future__ import annotations

import asyncio
import socket

import pytest

from headrace.engines.remote import endpoint
from headrace.engines.remote.options import EndpointEmbedding


def test_what_a_job_waits_for_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(endpoint, "SILENCE_S", 0.05)
    address = asyncio.run(ask_in_vain())
    [line] = caplog.messages
    assert line.startswith(f"headrace: no answer to a request for /v1/embeddings from {address} after 0.05 s; there")
    assert "there are up to 6 attempts of 600 s" in line
    assert "(engine_timeout_s limits a request" in line


async def ask_in_vain() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:  # the system connects, and nobody reads
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        engine = endpoint.embed(EndpointEmbedding(endpoints=[address]))
        payloads = [one.payload for one in engine.prepare(["a", "b"]) if not isinstance(one, Exception)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await asyncio.gather(*map(engine.infer, payloads))
        engine.close()
    return address
