"""Build jobs, servers and the Batch API from settings.

- `run.run`: run a bulk job to its end; also `headrace.run`
"""
