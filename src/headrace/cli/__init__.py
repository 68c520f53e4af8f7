"""The command line: one file for each verb, and the flags that several verbs share.

- `app.app`: all verbs together
- `flags.with_settings`: flags from declared settings
"""
