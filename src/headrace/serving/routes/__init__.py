"""The routes, one file for each kind of input.

- `text.embedding_router`: vectors of texts
- `generation.router`: completions and chat completions
- `pairs.router`: scores and rankings of pairs
- `images.classify_router`: labels of images
"""
