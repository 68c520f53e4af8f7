"""Hugging Face's InferenceClient, for servers as of Text Generation Inference and Text Embeddings Inference."""

import json
import sys

from huggingface_hub import InferenceClient

embed, generate, _, _, classify, *_ = sys.argv[1:]
messages = [{"role": "user", "content": "What is 2 plus 3?"}]
texts, chat, labels = (InferenceClient(base_url=url) for url in (embed, generate, classify))
print(
    json.dumps(
        {
            "vectors": [texts.feature_extraction(text)[0].tolist() for text in ("a mill", "a canal")],
            "similarities": texts.sentence_similarity("a mill", other_sentences=["a mill", "a canal"]),
            "label": labels.text_classification("a mill")[0].label,
            "answer": chat.chat_completion(messages).choices[0].message.content,
            "streamed": "".join(
                chunk.choices[0].delta.content or "" for chunk in chat.chat_completion(messages, stream=True)
            ),
            "completed": chat.text_generation("Q: 2+3\nA: "),
            "completed_in_pieces": "".join(chat.text_generation("Q: 2+3\nA: ", stream=True)),
            "tokens": chat.text_generation("Q: 2+3\nA: ", details=True).details.generated_tokens,
        }
    )
)
