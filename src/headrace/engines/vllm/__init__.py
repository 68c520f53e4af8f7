"""Language models that vLLM runs.

- `engine.VllmEngine`: vLLM as an engine that batches by itself
"""
