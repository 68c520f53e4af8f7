"""Voyage's client: vectors and rankings."""

import json
import sys

import voyageai

embed, _, rank, *_ = sys.argv[1:]
texts, documents = (voyageai.Client(api_key="none", base_url=f"{url}/v1") for url in (embed, rank))
ranking = documents.rerank("canal", ["a mill", "a canal"], model="ranker", top_k=1)
print(
    json.dumps(
        {
            "vectors": texts.embed(["a mill", "a canal"], model="all-MiniLM-L6-v2").embeddings,
            "ranking": [one.index for one in ranking.results],
        }
    )
)
