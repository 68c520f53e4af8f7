"""User code and engines in processes of their own, where a crash or a hang does no harm.

- `child.ChildProcess`: one process that answers calls
- `culprits.CrashIsolation`: which record ends the process
"""
