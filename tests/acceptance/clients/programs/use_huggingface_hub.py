"""Hugging Face's InferenceClient: chats, and embeddings as from Text Embeddings Inference."""

import json
import sys

from huggingface_hub import InferenceClient

embed, generate, _, _ = sys.argv[1:]
messages = [{"role": "user", "content": "What is 2 plus 3?"}]
texts, chat = InferenceClient(base_url=embed), InferenceClient(base_url=generate)
print(
    json.dumps(
        {
            "vectors": [texts.feature_extraction(text)[0].tolist() for text in ("a mill", "a canal")],
            "answer": chat.chat_completion(messages).choices[0].message.content,
            "streamed": "".join(
                chunk.choices[0].delta.content or "" for chunk in chat.chat_completion(messages, stream=True)
            ),
        }
    )
)
