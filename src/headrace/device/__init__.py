"""The device that a model runs on: memory, streams, graphs, precision and batch budget.

- `placement.choose_device`: the device that a model runs on
- `placement.choose_dtype`: the dtype of its weights
"""
