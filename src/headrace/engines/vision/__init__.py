"""Models of images that PyTorch runs.

- `engine.image_classify`: labels of images
- `engine.image_embed`: one vector per image
"""
