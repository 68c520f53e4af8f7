"""`/docs`: the routes and their fields on one page without scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from html import escape
from typing import TypeAlias

from fastapi.responses import HTMLResponse

from headrace.records import Json

OpenApi: TypeAlias = Mapping[str, Json]
"""An OpenAPI document, or a part of one."""
_STYLE = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "code{font-family:ui-monospace,monospace}table{border-collapse:collapse}td{padding:.1rem 1rem .1rem 0;"
    "vertical-align:top}h2{margin:2rem 0 0;font-size:1.1rem}p{margin:.2rem 0}"
)
_HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'"}


def documents_page(document: OpenApi) -> HTMLResponse:
    """The page for an OpenAPI document."""
    title = f"{document['info']['title']} {document['info']['version']}"
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{escape(title)}</title><style>{_STYLE}</style>",
        f"<h1>{escape(title)}</h1><p>{escape(document['info'].get('summary', ''))} ",
        "For tools: <a href=openapi.json><code>/openapi.json</code></a>.",
    ]
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{escape(method.upper())} {escape(path)}</code></h2>")
            parts.append(f"<p>{escape(operation.get('description', ''))}")
            fields = list(_fields(operation, document))
            if fields:
                rows = "".join(f"<tr><td><code>{name}</code><td>{kind}<td>{about}" for name, kind, about in fields)
                parts.append(f"<table>{rows}</table>")
    return HTMLResponse("\n".join(parts), headers=_HEADERS)


def _fields(operation: OpenApi, document: OpenApi) -> Iterator[tuple[str, str, str]]:
    """Name, type and description of the fields of an operation, escaped for HTML."""
    for content in operation.get("requestBody", {}).get("content", {}).values():
        body = _resolved(content["schema"], document)
        needed = body.get("required", ())
        for name, field in body.get("properties", {}).items():
            about = ["required" if name in needed else "", field.get("description", "")]
            yield escape(name), escape(_kind(field)), escape(". ".join(filter(None, about)))
    for parameter in operation.get("parameters", ()):
        place = f"in the {parameter['in']}"
        yield escape(parameter["name"]), escape(_kind(parameter["schema"])), escape(place)


def _resolved(schema: OpenApi, document: OpenApi) -> OpenApi:
    reference = schema.get("$ref")
    if reference is None:
        return schema
    found: Mapping[str, object] = document["components"]["schemas"][reference.rpartition("/")[2]]
    return found


def _kind(schema: OpenApi) -> str:
    if "enum" in schema or "const" in schema:
        return " or ".join(str(value) for value in schema.get("enum", [schema.get("const")]))
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_kind(choice) for choice in schema["anyOf"]))
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    return str(schema.get("type") or schema.get("$ref", "any").rpartition("/")[2])
