"""Triton's client over gRPC."""

import json
import sys

import numpy as np
from tritonclient.grpc import InferenceServerClient, InferInput

*_, over_grpc = sys.argv[1:]
client = InferenceServerClient(over_grpc.removeprefix("grpc://"))
model = "all-MiniLM-L6-v2"
assert client.is_server_live() and client.is_server_ready() and client.is_model_ready(model)
tensor = InferInput(client.get_model_metadata(model).inputs[0].name, [2], "BYTES")
tensor.set_data_from_numpy(np.array(["a mill", "a canal"], dtype=object))
print(json.dumps({"vectors": client.infer(model, [tensor]).as_numpy("embedding").tolist()}))
