"""LangChain: chats, completions, embeddings and a reranker."""

import importlib.util
import json
import os
import sys
from pathlib import Path

embed, generate, rank, *_ = sys.argv[1:]
# LangChain makes OpenAI's token ids with a file that it would download; LlamaIndex ships with it.
[index] = importlib.util.find_spec("llama_index.core").submodule_search_locations
os.environ["TIKTOKEN_CACHE_DIR"] = str(Path(index) / "_static" / "tiktoken_cache")

from langchain_cohere import CohereRerank
from langchain_core.documents import Document
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings

texts = OpenAIEmbeddings(base_url=f"{embed}/v1", api_key="none")
chat = ChatOpenAI(base_url=f"{generate}/v1", api_key="none", model="arithmetic")
completions = OpenAI(base_url=f"{generate}/v1", api_key="none", model="arithmetic", temperature=0)  # else it samples
question = [("human", "What is 2 plus 3?")]
ranker = CohereRerank(base_url=rank, cohere_api_key="none", model="ranker", top_n=1)
print(
    json.dumps(
        {
            "vectors": texts.embed_documents(["a mill", "a canal"]),
            "answer": chat.invoke(question).content,
            "streamed": "".join(part.content for part in chat.stream(question)),
            "completed": completions.invoke("Q: 2+3\nA: "),
            "ranking": [
                place["index"]
                for place in ranker.rerank([Document(page_content=text) for text in ("a mill", "a canal")], "canal")
            ],
        }
    )
)
