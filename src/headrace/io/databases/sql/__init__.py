"""SQL databases.

- `source.SQL`: the rows of a query, as an input
- `sink.SQL`: a table of PostgreSQL or SQLite, as an output
"""
