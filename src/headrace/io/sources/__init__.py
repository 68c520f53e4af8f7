"""Inputs of jobs: files, folders, tables and Python objects.

- `opening.open_source`: opens an input by name or from a Python object
- `selection.Selection`: selects rows of an input
"""
