"""HTTP below the routes: connections, headers, the process.

- `server.Server`: the process that serves, and how it drains
- `middleware.RequestMiddleware`: keys, sizes and times, checked before anything is parsed
"""
