"""What a language model is asked.

- `generation.Request`: prompt or chat, with its sampling parameters
- `chat.checked_messages`: checks chat messages
"""
