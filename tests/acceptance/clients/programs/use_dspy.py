"""DSPy, by LiteLLM."""

import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # or it looks for prices on the network

import dspy

embed, generate, *_ = sys.argv[1:]
chat = dspy.LM("openai/arithmetic", api_base=f"{generate}/v1", api_key="none", cache=False)
texts = dspy.Embedder("openai/all-MiniLM-L6-v2", api_base=f"{embed}/v1", api_key="none", caching=False)
print(
    json.dumps(
        {
            "answer": chat("What is 2 plus 3?")[0],
            "vectors": texts(["a mill", "a canal"]).tolist(),
        }
    )
)
