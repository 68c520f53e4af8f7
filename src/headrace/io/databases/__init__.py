"""Tables in databases, data lakes and vector stores: plugins that nothing else in Headrace names.

- `qdrant.QDRANT`: collections of vectors, as outputs
- `lance.LANCEDB`: tables in a folder, as outputs
- `versioned_tables.DELTA`: tables of data lakes, as inputs
"""
