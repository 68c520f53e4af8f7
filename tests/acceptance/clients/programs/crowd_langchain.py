"""LangChain's embeddings, several callers at once: the address, how many, and the texts and words of each."""

import asyncio
import json
import sys

from langchain_openai import OpenAIEmbeddings

url, *numbers = sys.argv[1:]
callers, texts, words = map(int, numbers)


async def ask(number: int) -> str:
    """What became of one caller."""
    given = [f"{number} {place} " + "вода " * (words - 2) for place in range(texts)]
    embeddings = OpenAIEmbeddings(base_url=f"{url}/v1", api_key="none", model="m", check_embedding_ctx_length=False)
    try:
        found = await embeddings.aembed_documents(given)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        return f"{type(error).__name__}: {error}"
    return "answered" if len(found) == texts else f"{len(found)} vectors"


async def main() -> None:
    """Ask all at once."""
    print(json.dumps(await asyncio.gather(*map(ask, range(callers)))))


asyncio.run(main())
