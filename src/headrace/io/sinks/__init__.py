"""Where results go.

- `targets.find_target`: an output by its name
- `callback_sink.CallbackWriter`: results handed to a Python function
"""
