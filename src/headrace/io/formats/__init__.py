"""File formats.

- `known.Format`: declares one
- `jsonl.JSONL`: JSON Lines, read and written
"""
