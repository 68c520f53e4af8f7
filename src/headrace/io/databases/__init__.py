"""Tables in databases and vector stores.

- `names.parse_table`: the table that an address names
- `sql.SqlTable`, `qdrant.Collection`, `lance.LanceTable`: stores that keep the contract of `base.TableStore`
"""
