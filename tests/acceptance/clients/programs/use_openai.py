"""OpenAI's Python client."""

import json
import sys

from openai import OpenAI

embed, generate, rank, *_ = sys.argv[1:]
messages = [{"role": "user", "content": "What is 2 plus 3?"}]
texts, chat = OpenAI(base_url=f"{embed}/v1", api_key="none"), OpenAI(base_url=f"{generate}/v1", api_key="none")
stream = chat.chat.completions.create(model="arithmetic", messages=messages, stream=True)
print(
    json.dumps(
        {
            "vectors": [
                entry.embedding
                for entry in texts.embeddings.create(model="all-MiniLM-L6-v2", input=["a mill", "a canal"]).data
            ],
            "answer": chat.chat.completions.create(model="arithmetic", messages=messages).choices[0].message.content,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
            "responded": chat.responses.create(model="arithmetic", input=messages[0]["content"]).output_text,
            "responded_in_pieces": "".join(
                one.delta
                for one in chat.responses.create(model="arithmetic", input=messages, stream=True)
                if one.type == "response.output_text.delta"
            ),
            "choices": len(chat.chat.completions.create(model="arithmetic", messages=messages, n=2).choices),
            "models": [model.id for model in texts.models.list()],
        }
    )
)
