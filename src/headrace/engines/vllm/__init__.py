"""Language models on vLLM.

- `engine.VllmEngine`: vLLM as an engine that does its own batching
"""
