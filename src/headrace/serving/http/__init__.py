"""The HTTP layer below the routes.

- `server.Server`: the server process and its draining
- `middleware.RequestMiddleware`: checks keys, sizes and timeouts before parsing
"""
