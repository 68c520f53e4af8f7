"""Datasets on the Hugging Face Hub, and those of its library.

- `source.HUB`: a split, as an input
- `sink.HUB`: a split, as an output
"""
