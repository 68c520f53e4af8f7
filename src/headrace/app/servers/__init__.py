"""Servers from settings: of one model or several, with Batch API and dashboard.

- `server.build_app`: a FastAPI app that serves a model
- `settings.ServerSettings`: settings of a server
"""
