"""Cohere's own clients, for rankings."""

import json
import sys

import cohere

_, _, rank, *_ = sys.argv[1:]
asked = {"model": "ranker", "query": "canal", "documents": ["a mill", "a canal"], "top_n": 1}
print(
    json.dumps(
        {
            "ranking": [one.index for one in cohere.ClientV2("none", base_url=rank).rerank(**asked).results],
            "ranking_v1": [one.index for one in cohere.Client("none", base_url=rank).rerank(**asked).results],
        }
    )
)
