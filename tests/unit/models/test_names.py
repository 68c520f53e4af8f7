"""Which names mean a model that must be downloaded."""

from __future__ import annotations

import pytest

from headrace.errors import ConfigError
from headrace.models.hub import HubModel
from headrace.models.names import remote_model
from headrace.models.stores import StoredModel


@pytest.mark.parametrize(
    ("typed", "name", "revision"),
    [
        ("BAAI/bge-small-en-v1.5", "BAAI/bge-small-en-v1.5", None),
        ("org/name@v1.0", "org/name", "v1.0"),
        ("org/name@refs/pr/3", "org/name", "refs/pr/3"),
        ("hf://org/name", "org/name", None),
        ("hf://org/name@main", "org/name", "main"),
        ("hf://models/org/name", "org/name", None),
        ("o-r_g.x/n", "o-r_g.x/n", None),
    ],
)
def test_a_name_on_the_hub(typed: str, name: str, revision: str | None) -> None:
    assert remote_model(typed) == HubModel(typed, name, revision)


@pytest.mark.parametrize(
    "typed",
    [
        "./org/name",
        "../name",
        "/org/name",
        "~/name",
        "name",
        "a/b/c",
        "org/",
        "org/name/",
        "a\\b",
        "org/name@",
        "org/a--b",
        "org/a..b",
        "C:/model",
        "a/b@c@d",
    ],
)
def test_a_local_path(typed: str) -> None:
    assert remote_model(typed) is None


@pytest.mark.parametrize("typed", ["hf://", "hf://name", "hf://a/b/c", "hf://datasets/a/b", "hf://spaces/a/b"])
def test_an_address_that_is_no_model_is_refused(typed: str) -> None:
    with pytest.raises(ConfigError, match="write hf://org/name"):
        remote_model(typed)


@pytest.mark.parametrize("typed", ["s3://bucket/models/mini", "s3://bucket/models/mini/", "gs://bucket/mini"])
def test_a_folder_in_a_store(typed: str) -> None:
    found = remote_model(typed)
    assert found == StoredModel(typed)
    assert found.name == "mini"
