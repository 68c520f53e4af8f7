"""ONNX models on onnxruntime, without PyTorch.

- `engine.embed`: one vector per text
- `engine.classify`: text labels
- `engine.score`: scores of text pairs
"""
