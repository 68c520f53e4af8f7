"""The routes, one file for each API or kind of input. Those with a `PROTOCOL` are registered as plugins.

- `openai.PROTOCOL`: vectors, completions and chats
- `tei.PROTOCOL`: vectors as Text Embeddings Inference gives them
- `pairs.PROTOCOL`: scores and rankings of pairs
- `text.PROTOCOL`: Headrace's own
"""
