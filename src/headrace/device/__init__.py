"""The accelerator.

- `placement.choose_device`: the device that a model runs on
- `placement.choose_dtype`: the dtype of its weights
"""
