"""Cohere's own clients: rankings, vectors, chats."""

import json
import sys

import cohere

embed, generate, rank, *_ = sys.argv[1:]
asked = {"model": "ranker", "query": "canal", "documents": ["a mill", "a canal"], "top_n": 1}
texts = {"model": "all-MiniLM-L6-v2", "texts": ["a mill", "a canal"], "input_type": "search_document"}
chat = {"model": "arithmetic", "messages": [{"role": "user", "content": "What is 2 plus 3?"}]}
client = cohere.ClientV2("none", base_url=generate)
print(
    json.dumps(
        {
            "ranking": [one.index for one in cohere.ClientV2("none", base_url=rank).rerank(**asked).results],
            "ranking_v1": [one.index for one in cohere.Client("none", base_url=rank).rerank(**asked).results],
            "vectors": cohere.ClientV2("none", base_url=embed)
            .embed(**texts, embedding_types=["float"])
            .embeddings.float_,
            "vectors_v1": cohere.Client("none", base_url=embed).embed(**texts).embeddings,
            "answer": client.chat(**chat).message.content[0].text,
            "streamed": "".join(
                one.delta.message.content.text for one in client.chat_stream(**chat) if one.type == "content-delta"
            ),
        }
    )
)
