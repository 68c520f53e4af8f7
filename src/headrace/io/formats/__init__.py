"""How rows are written down, one file for each format.

- `jsonl.JsonlWriter`: JSON Lines out
- `parquet.ParquetWriter`: Parquet out
"""
