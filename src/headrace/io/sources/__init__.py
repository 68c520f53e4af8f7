"""Where records come from.

- `opening.open_source`: an input by its name, or from a Python object
- `selection.Selection`: which rows of it are taken
"""
