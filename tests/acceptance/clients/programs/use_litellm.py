"""LiteLLM, which routes to OpenAI-compatible servers and to vLLM's."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it looks for prices on the network

import litellm

embed, generate, rank, *_ = sys.argv[1:]
messages = [{"role": "user", "content": "What is 2 plus 3?"}]
chat = {"messages": messages, "api_base": f"{generate}/v1", "api_key": "none"}
texts = {"input": ["a mill", "a canal"], "api_base": f"{embed}/v1", "api_key": "none"}


def said(model: str, url: str) -> str:
    """An answer through another API."""
    return litellm.completion(model=model, messages=messages, api_base=url, api_key="none").choices[0].message.content


ranked = litellm.rerank(
    model="hosted_vllm/ranker", query="canal", documents=["a mill", "a canal"], top_n=1, api_base=rank, api_key="none"
)
stream = litellm.completion(model="openai/arithmetic", stream=True, **chat)
print(
    json.dumps(
        {
            "vectors": [
                entry["embedding"] for entry in litellm.embedding(model="openai/all-MiniLM-L6-v2", **texts).data
            ],
            "by_vllm": [
                entry["embedding"] for entry in litellm.embedding(model="hosted_vllm/all-MiniLM-L6-v2", **texts).data
            ],
            "answer": litellm.completion(model="openai/arithmetic", **chat).choices[0].message.content,
            "answer_by_vllm": litellm.completion(model="hosted_vllm/arithmetic", **chat).choices[0].message.content,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in stream),
            "by_anthropic": said("anthropic/arithmetic", generate),
            "by_ollama": said("ollama_chat/arithmetic", generate),
            "by_cohere": said("cohere_chat/arithmetic", f"{generate}/v2/chat"),
            "ranking": [result["index"] for result in ranked.results],
        }
    )
)
