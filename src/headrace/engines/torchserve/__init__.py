"""TorchServe handlers without TorchServe.

- `engine.TorchServeEngine`: a handler as an engine
"""
