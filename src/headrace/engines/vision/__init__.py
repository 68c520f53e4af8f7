"""Image models on PyTorch.

- `engine.image_classify`: image labels
- `engine.image_embed`: one vector per image
"""
