"""Triton's client over HTTP, with binary tensors, as is its default, and with JSON."""

import json
import sys

import numpy as np
from tritonclient.http import InferenceServerClient, InferInput, InferRequestedOutput

embed, generate, *_ = sys.argv[1:]


def asked(url, model, texts, output, **how):
    client = InferenceServerClient(url.removeprefix("http://"))
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(model)
    named = client.get_model_metadata(model)["inputs"][0]["name"]
    tensor = InferInput(named, [len(texts)], "BYTES")
    tensor.set_data_from_numpy(np.array(texts, dtype=object), binary_data=how.get("binary", True))
    wanted = [InferRequestedOutput(output, binary_data=False)] if how else None
    return client.infer(model, [tensor], outputs=wanted).as_numpy(output)


texts, prompt = ["a mill", "a canal"], "Q: 2+3\nA: "
print(
    json.dumps(
        {
            "vectors": asked(embed, "all-MiniLM-L6-v2", texts, "embedding").tolist(),
            "as_json": asked(embed, "all-MiniLM-L6-v2", texts, "embedding", binary=False).tolist(),
            "completed": asked(generate, "arithmetic", [prompt], "text")[0].decode(),
            "completed_as_json": str(asked(generate, "arithmetic", [prompt], "text", binary=False)[0]),
        }
    )
)
