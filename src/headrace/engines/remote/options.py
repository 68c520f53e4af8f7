"""Engines of models on other servers, declared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from headrace.engines.declaring import EngineOptions
from headrace.engines.options import PANEL, ChatOptions, SamplingOptions
from headrace.options import option


class EndpointOptions(EngineOptions):
    """Options of all of them; `model` is the model's name in requests, None for the server's default."""

    engine = "endpoint"
    extra = "client"
    remote = True
    runs_batches = False
    implied_by = "endpoints"
    order = 3

    endpoints: Sequence[str] = option(
        dataclasses.MISSING,
        "Address of an OpenAI-compatible server to use; repeatable. Default: run the model here.",
        flags=("--endpoint",),
        panel=PANEL,
    )
    concurrency: int = option(64, "Maximum requests in flight.", minimum=1)
    attempts: int = option(6, "How often a request is sent at most.", minimum=1)
    requests_per_minute: float | None = option(
        None,
        "Maximum requests a minute to each endpoint, spread evenly. Default: what its answers say "
        "(x-ratelimit headers, 429).",
        panel=PANEL,
        above=0,
    )
    tokens_per_minute: float | None = option(
        None,
        "Maximum tokens a minute to each endpoint, answers included. Default: what its answers say.",
        panel=PANEL,
        above=0,
    )
    extra_body: Mapping[str, object] | None = option(
        None, "Fields of each request that does not have them, as a JSON object. Default: none."
    )
    api_key: str | None = option(None, "Default: the environment variable OPENAI_API_KEY, if it is set.")


class EndpointEmbedding(EndpointOptions):
    """Vectors from /v1/embeddings."""

    task = "embed"
    factory = "headrace.engines.remote.endpoint:embed"


class EndpointClassification(EndpointOptions):
    """Labels from /classify."""

    task = "classify"
    factory = "headrace.engines.remote.endpoint:classify"


class Endpoint(ChatOptions, SamplingOptions, EndpointOptions):
    """Answers from /v1/chat/completions, or for prompts to continue from /v1/completions."""

    task = "generate"
    factory = "headrace.engines.remote.endpoint:generate"

    chat: bool = option(
        True, "Whether a plain text is a user's message (/v1/chat/completions), or a prompt to continue."
    )
    seed: int | None = option(None, "Seed of sampled answers.")

    def given_sampling(self) -> dict[str, object]:
        """The sampling parameters that are given, with the seed, which here is a parameter of each request."""
        return super().given_sampling() | ({} if self.seed is None else {"seed": self.seed})
