"""Encoders of texts that PyTorch runs.

- `embedding.EmbeddingEngine`: one vector per text
- `classification.classify`: labels of texts
- `classification.score`: scores of pairs
- `classification.zero_shot`: labels of the user's own
"""
