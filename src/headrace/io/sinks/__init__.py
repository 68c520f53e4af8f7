"""Outputs of jobs: files, tables of databases, and Python functions.

- `targets.find_target`: finds an output by name
- `tables.TableSink`: declares a table of a database as an output; its `TableStore` is the contract
- `callback_sink.CallbackWriter`: passes results to a Python function
"""
