"""Requests and answers as the API spells them.

- `requests.EmbeddingRequest`: a request, each field obeyed or refused
- `responses.JsonReply`: an answer as bytes
"""
