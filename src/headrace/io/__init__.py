"""Reads records and writes results.

- `base.Source`: the interface of an input
- `base.PartWriter`: the interface of an output format
"""
