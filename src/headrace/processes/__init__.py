"""Runs user code and engines in separate processes, so that a crash or hang does not affect this one.

- `child.ChildProcess`: a process that answers calls
- `crash_isolation.CrashIsolation`: finds the records that crash the process
"""
