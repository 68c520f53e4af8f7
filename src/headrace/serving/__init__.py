"""Requests over HTTP.

- `app.create_app`: the FastAPI app around a model
- `service.Service`: one model behind one batcher
- `limits.ServeLimits`: what a server takes on
- `auth.read_keys`: API keys
"""
