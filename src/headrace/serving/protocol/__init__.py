"""Request and response schemas of the API.

- `requests.EmbeddingRequest`: a request; every field is applied or refused
- `responses.JsonReply`: a response as JSON bytes
"""
