"""Six mistakes in names and types; each line that has one says so."""

from __future__ import annotations

import headrace


def lengths(texts: list[str]) -> list[int]:
    return [len(text) for text in texts]


async def fetch(url: str) -> bytes:
    return url.encode()


headrace.run("in.jsonl", sink="out.jsonl", task="embed", batch_sizee=32)  # mistake: the name
headrace.build_app("classify", "my-model", max_model_len="512")  # mistake: the type
headrace.DynamicBatcher(lengths, max_batch_sise=64)  # mistake: the name
headrace.TokenBatcher(lengths, target_batch_tokens="8k")  # mistake: the type
headrace.map_concurrent(fetch, ["a"], concurency=20)  # mistake: the name


@headrace.reusable(idle_timeout_s="300")  # mistake: the type
def shared() -> headrace.DynamicBatcher[str, int]:
    return headrace.DynamicBatcher(lengths)
