"""The routes, one file for each kind of input.

- `text.embedding_router`: vectors of texts
- `generation.router`: OpenAI's completions and chats
- `pairs.router`: scores of pairs, and rankings
- `images.classify_router`: labels of images
"""
