"""Models on vLLM, which does its own batching.

- `engine.VllmEngine`: language models
- `pooling.embed`, `pooling.classify`, `pooling.score`: vectors, labels and scores
"""
