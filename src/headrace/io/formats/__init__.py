"""Row formats, one file for each.

- `jsonl.JsonlWriter`: writes JSON Lines
- `parquet.ParquetWriter`: writes Parquet
"""
