"""Haystack: embedders and a chat generator."""

import json
import os
import sys

os.environ |= {"OPENAI_API_KEY": "none", "HAYSTACK_TELEMETRY_ENABLED": "False"}

from haystack import Document
from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage

embed, generate, rank, *_ = sys.argv[1:]
documents = [Document(content=text) for text in ("a mill", "a canal")]
pieces = []
chat = OpenAIChatGenerator(model="arithmetic", api_base_url=f"{generate}/v1")
streamed = OpenAIChatGenerator(
    model="arithmetic", api_base_url=f"{generate}/v1", streaming_callback=lambda chunk: pieces.append(chunk.content)
)
question = [ChatMessage.from_user("What is 2 plus 3?")]
streamed.run(question)
print(
    json.dumps(
        {
            "vectors": [
                document.embedding
                for document in OpenAIDocumentEmbedder(api_base_url=f"{embed}/v1", progress_bar=False).run(documents)[
                    "documents"
                ]
            ],
            "vector": OpenAITextEmbedder(api_base_url=f"{embed}/v1").run("a mill")["embedding"],
            "answer": chat.run(question)["replies"][0].text,
            "streamed": "".join(pieces),
        }
    )
)
