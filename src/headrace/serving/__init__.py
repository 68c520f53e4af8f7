"""The HTTP server.

- `app.create_app`: the FastAPI app around a model
- `service.Service`: one model behind one batcher
- `limits.ServeLimits`: the limits of a server
- `auth.read_keys`: API keys
"""
