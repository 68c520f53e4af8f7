"""Text encoders on PyTorch.

- `embedding.EmbeddingEngine`: one vector per text
- `classification.classify`: text labels
- `classification.score`: scores of text pairs
- `classification.zero_shot`: custom labels
"""
