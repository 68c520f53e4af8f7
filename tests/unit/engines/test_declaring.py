"""What engines declare: their options as objects, and what is read from them without loading a model."""

from __future__ import annotations

import importlib.util
import pickle

import pytest

from headrace import Embedding, Endpoint, EndpointEmbedding, Generation, VllmEmbedding, VllmGeneration
from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.registry import check_options, declared_engines
from headrace.errors import ConfigError


def test_options_of_vllm_itself_are_apart_from_the_engine_s() -> None:
    options = VllmGeneration.of("m", {"max_num_seqs": 4, "block_size": 16, "temperature": 0.5, "seed": 3, "chat": True})
    assert options.engine_args() == {"max_num_seqs": 4, "block_size": 16}
    assert options.given_sampling() == {"temperature": 0.5}
    assert options.given() == {"max_num_seqs": 4, "block_size": 16, "temperature": 0.5, "seed": 3, "chat": True}
    pooling = VllmEmbedding.of(None, {"max_model_len": 8, "dtype": "half", "prompt": "a", "runner": "x"})
    assert pooling.engine_args() == {"dtype": "half", "runner": "x"}  # the length is that of the tokens


def test_the_seed_is_sampling_only_where_the_engine_has_none() -> None:
    assert Endpoint(endpoints=["http://a"], seed=3, top_p=0.5).given_sampling() == {"top_p": 0.5, "seed": 3}
    assert Generation(seed=3, top_p=0.5).given_sampling() == {"top_p": 0.5}
    assert Generation(top_p=0.5).sampling().top_p == 0.5
    with pytest.raises(ConfigError, match="top_p is 5"):
        Generation(top_p=5).sampling()


def test_an_object_is_the_configuration_of_its_engine() -> None:
    options = Embedding(model="org/name", dtype="float16", normalize=True)
    assert options.as_config() == EngineConfig("embed", "org/name", "torch", {"dtype": "float16", "normalize": True})
    assert Embedding.of("org/name", options.given()) == options == pickle.loads(pickle.dumps(options))
    with pytest.raises(ConfigError, match="Embedding has no setting 'no_such'"):
        Embedding(no_such=1)  # type: ignore[call-arg]


def test_a_required_option_that_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match="engine endpoint needs endpoints"):
        check_options("embed", "endpoint", {})
    with pytest.raises(ConfigError, match="EndpointEmbedding needs endpoints"):
        EndpointEmbedding()  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": 3}, "device.* is 3; it must be a text"),
        ({"truncate_dim": 0}, "truncate_dim.* is 0; it must be >= 1"),
        ({"normalize": "yes"}, "normalize.* is 'yes'; it must be True or False"),
    ],
)
def test_a_value_is_checked_by_its_declaration_before_a_model_is_loaded(
    options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_options("embed", None, options)


def test_each_engine_says_what_makes_it() -> None:
    for kind in declared_engines():
        module, _, attribute = kind.factory.partition(":")
        assert importlib.util.find_spec(module) is not None, kind
        assert attribute, kind
