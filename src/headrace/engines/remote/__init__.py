"""Models behind another server.

- `endpoint.EndpointEngine`: one request per record to servers with OpenAI's API
"""
