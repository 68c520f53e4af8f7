"""Outputs.

- `targets.find_target`: finds an output by name
- `callback_sink.CallbackWriter`: passes results to a Python function
"""
