"""Smolagents: what its agents ask of a model."""

import json
import sys

from smolagents import ChatMessage, OpenAIServerModel

_, generate, *_ = sys.argv[1:]
model = OpenAIServerModel(model_id="arithmetic", api_base=f"{generate}/v1", api_key="none")
question = [ChatMessage(role="user", content="What is 2 plus 3?")]
print(
    json.dumps(
        {
            "answer": model(question).content,
            "streamed": "".join(piece.content or "" for piece in model.generate_stream(question)),
        }
    )
)
