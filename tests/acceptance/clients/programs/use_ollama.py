"""Ollama's client: chats, prompts and vectors."""

import json
import sys

import ollama

embed, generate, *_ = sys.argv[1:]
texts, chat = ollama.Client(host=embed), ollama.Client(host=generate)
messages = [{"role": "user", "content": "What is 2 plus 3?"}]
pieces = list(chat.chat(model="arithmetic", messages=messages, stream=True))
try:
    chat.chat(model="other", messages=messages)
except ollama.ResponseError as error:
    refused = str(error)
print(
    json.dumps(
        {
            "answer": chat.chat(model="arithmetic", messages=messages).message.content,
            "streamed": "".join(one.message.content for one in pieces),
            "asked": chat.generate(model="arithmetic", prompt=messages[0]["content"]).response,
            "vectors": [
                list(one) for one in texts.embed(model="all-MiniLM-L6-v2", input=["a mill", "a canal"]).embeddings
            ],
            "models": [one.model for one in chat.list().models],
            "done": [pieces[-1].done_reason],
            "refused": refused,
        }
    )
)
