"""Chroma: a collection whose vectors come from the server, and a query."""

import json
import os
import sys

os.environ |= {"ANONYMIZED_TELEMETRY": "False", "OPENAI_API_KEY": "none"}

import chromadb
from chromadb.utils.embedding_functions import OpenAIEmbeddingFunction

embed, _, _, *_ = sys.argv[1:]
collection = chromadb.EphemeralClient().create_collection(
    "texts", embedding_function=OpenAIEmbeddingFunction(api_base=f"{embed}/v1")
)
collection.add(ids=["0", "1"], documents=["a mill", "a canal"])
print(
    json.dumps(
        {
            "vectors": collection.get(include=["embeddings"])["embeddings"].tolist(),
            "nearest": collection.query(query_texts=["a waterway"], n_results=1)["ids"][0],
        }
    )
)
