"""Models on remote servers.

- `endpoint.EndpointEngine`: sends one request per record to OpenAI-compatible servers
"""
