"""The Grafana dashboard and the alert rules load, and name only metrics that a real server has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.serving.running import running

from headrace.app.servers.server import ServerSettings
from headrace.engines.choosing.config import EngineConfig

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
NAME = re.compile(r"\b(?:headrace|process)_[a-z0-9_]+")
LABEL = re.compile(r"(\w+)\s*(?:=~|!~|!=|=)\s*\"")


@pytest.fixture(scope="module")
def samples() -> dict[str, set[str]]:
    """The labels of each sample of a server that has answered some requests, by the sample's name."""
    with running(ServerSettings(EngineConfig(task="embed", engine="headrace.testing:FakeEngine"))) as server:
        for _ in range(3):
            server.post("/v1/embeddings", {"input": ["a", "b"]})
        found: dict[str, set[str]] = {}
        for family in text_string_to_metric_families(server.client.get("/metrics").text):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


def check(expression: str, samples: dict[str, set[str]]) -> None:
    names = NAME.findall(expression)
    assert names, expression
    for name in names:
        assert name in samples, f"{name} in {expression}"
    for inside in re.findall(r"(\w+)\{([^}]*)\}", expression):
        labels = set(LABEL.findall(inside[1])) - {"instance"}
        assert labels <= samples[inside[0]], expression
    assert expression.count("(") == expression.count(")")


def test_the_grafana_dashboard(samples: dict[str, set[str]]) -> None:
    board: dict[str, Any] = json.loads((DEPLOY / "grafana-dashboard.json").read_text())
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"]) >= 10
    boxes = [panel["gridPos"] for panel in board["panels"]]
    assert len({(box["x"], box["y"]) for box in boxes}) == len(boxes)
    assert all(box["x"] + box["w"] <= 24 for box in boxes)
    for panel in board["panels"]:
        for target in panel["targets"]:
            check(target["expr"], samples)
    assert {entry["name"] for entry in board["templating"]["list"]} == {"datasource", "instance"}


def test_the_alert_rules(samples: dict[str, set[str]]) -> None:
    (group,) = yaml.safe_load((DEPLOY / "prometheus-alerts.yaml").read_text())["groups"]
    assert len({rule["alert"] for rule in group["rules"]}) == len(group["rules"]) >= 5
    for rule in group["rules"]:
        check(rule["expr"], samples)
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description"}
        assert re.fullmatch(r"\d+[smh]", rule.get("for", "1m"))
