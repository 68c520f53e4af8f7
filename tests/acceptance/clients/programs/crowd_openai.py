"""OpenAI's client, several callers at once: the address, how many, and the texts and words of each."""

import asyncio
import json
import sys

from openai import AsyncOpenAI

url, *numbers = sys.argv[1:]
callers, texts, words = map(int, numbers)


async def ask(number: int) -> str:
    """What became of one caller."""
    given = [f"{number} {place} " + "word " * (words - 2) for place in range(texts)]
    try:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            found = await client.embeddings.create(model="m", input=given)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is told
        return f"{type(error).__name__}: {error}"
    return "answered" if len(found.data) == texts else f"{len(found.data)} vectors"


async def main() -> None:
    """Ask all at once."""
    print(json.dumps(await asyncio.gather(*map(ask, range(callers)))))


asyncio.run(main())
