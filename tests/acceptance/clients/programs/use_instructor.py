"""Instructor: answers as objects, by tools, its default, and as JSON in Markdown."""

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel

_, generate, _, json_server, *_ = sys.argv[1:]


class Sum(BaseModel):
    """What the model is asked for."""

    total: int


def ask(url: str, **options: object) -> Sum:
    """An answer as an object."""
    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"), **options)
    messages = [{"role": "user", "content": "What is 2 plus 3?"}]
    return client.chat.completions.create(model="json", messages=messages, response_model=Sum, max_retries=0)


in_markdown = ask(json_server, mode=instructor.Mode.MD_JSON)
print(json.dumps({"total": ask(json_server).total, "in_markdown": in_markdown.total}))
