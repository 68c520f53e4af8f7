"""Pydantic AI: an agent's answers, whole and streamed."""

import json
import os
import sys

os.environ["PYDANTIC_DISABLE_PLUGINS"] = "true"

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

_, generate, *_ = sys.argv[1:]
agent = Agent(OpenAIChatModel("arithmetic", provider=OpenAIProvider(base_url=f"{generate}/v1", api_key="none")))
question = "What is 2 plus 3?"
streamed = agent.run_stream_sync(question)
print(
    json.dumps(
        {
            "answer": agent.run_sync(question).output,
            "streamed": "".join(streamed.stream_text(delta=True)),
        }
    )
)
