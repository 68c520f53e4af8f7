"""The HTTP layer below the routes.

- `server.DrainingServer`: the server process and its draining
- `middleware.RequestMiddleware`: checks keys, sizes and timeouts before parsing
"""
