"""Build jobs, servers and the Batch API from settings.

- `run.run`: run a bulk job to its end; also `headrace.run`
- `job.execute`: the same from a `JobSettings`
- `server.build_app`: a FastAPI app that serves a model
- `server.ServerSettings`: settings of a server
"""
