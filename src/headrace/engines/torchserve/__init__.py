"""Run TorchServe handlers without TorchServe.

- `engine.TorchServeEngine`: runs a handler as an engine
"""
