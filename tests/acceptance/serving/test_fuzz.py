"""Whatever the server's own documents allow or forbid: never a 5xx, and every answer as they describe it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from tests.acceptance.serving.process import server
from tests.examples import examples
from tests.small_models import text_model, vision_model

CHECKS = [not_a_server_error, content_type_conformance, response_schema_conformance, status_code_conformance]
ENGINES = {
    "generate": "tests.integration.serving.engines:Talker",
    "embed": "headrace.testing:FakeEngine",
}
MODELS = {
    "score": lambda folder: text_model(folder, ("relevance",)),
    "image-classify": vision_model,
}
BOUNDED = settings(
    max_examples=examples(15),
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)


@pytest.mark.parametrize("task", [*ENGINES, *(pytest.param(task, marks=pytest.mark.thorough) for task in MODELS)])
def test_no_request_breaks_the_server(task: str, tmp_path: Path) -> None:
    if task in MODELS:
        chosen, fewest = ("--model", str(MODELS[task](tmp_path / "model"))), 6
    else:
        chosen, fewest = ("--engine", ENGINES[task], "--state-dir", "state"), 15
    with server("--task", task, *chosen, folder=tmp_path) as (process, url):
        documents = schemathesis.openapi.from_url(f"{url}/openapi.json")
        operations = [found.ok() for found in documents.get_all_operations()]
        assert len(operations) >= fewest
        for operation in operations:
            if not _is_new(operation):
                continue
            for mode in (schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE):
                _fuzz(operation, mode)
        assert process.poll() is None


_TRIED: set[str] = set()


def _is_new(operation: Any) -> bool:
    """Whether no earlier server described an operation in the same words: most routes do not depend on the task.

    Left out: the dashboard's stream, whose answer has no end.
    """
    if operation.path == "/dashboard/events":
        return False
    told = json.dumps([operation.label, operation.definition.raw, [part.definition for part in operation.body]])
    new = told not in _TRIED
    _TRIED.add(told)
    return new


def _fuzz(operation: Any, mode: schemathesis.GenerationMode) -> None:
    @BOUNDED
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=CHECKS)

    try:
        check()
    except Unsatisfiable:  # a route without parameters has no wrong ones
        pass
