"""The command line: one file for each verb, and the flags that several verbs share.

- `app.app`: all verbs together
- `engine_flags.EngineFlags`: the flags of an engine
"""
