"""LangChain's packages for other APIs: Anthropic and Ollama."""

import json
import sys

from langchain_anthropic import ChatAnthropic
from langchain_ollama import ChatOllama, OllamaEmbeddings

embed, generate, *_ = sys.argv[1:]
question = [("human", "What is 2 plus 3?")]
claude = ChatAnthropic(model="arithmetic", base_url=generate, api_key="none")
llama = ChatOllama(model="arithmetic", base_url=generate)
texts = ["a mill", "a canal"]
print(
    json.dumps(
        {
            "answer": claude.invoke(question).content,
            "streamed": "".join(part.content for part in claude.stream(question) if part.content),
            "by_ollama": llama.invoke(question).content,
            "ollama_streamed": "".join(part.content for part in llama.stream(question)),
            "vectors": OllamaEmbeddings(model="all-MiniLM-L6-v2", base_url=embed).embed_documents(texts),
        }
    )
)
