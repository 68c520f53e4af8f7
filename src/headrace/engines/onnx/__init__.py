"""Models that onnxruntime runs; PyTorch is not needed.

- `engine.embed`: one vector per text
- `engine.classify`: labels of texts
- `engine.score`: scores of pairs
"""
