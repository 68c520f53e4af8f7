"""Convert a request to vLLM's sampling parameters and structured output."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields

from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from headrace.engines.requests.generation import Request
from headrace.errors import RecordError
from headrace.records import text_refusal
from headrace.wording import shown

# Request fields in addition to `Sampling`, with the names of vLLM's SamplingParams or OpenAI's API.
_OWN_SAMPLING = (
    "allowed_token_ids",
    "bad_words",
    "include_stop_str_in_output",
    "logit_bias",
    "skip_special_tokens",
    "spaces_between_special_tokens",
    "stop_token_ids",
)
EXTRA = (*_OWN_SAMPLING, "structured_outputs", "response_format", "chat_template_kwargs")

MULTIMODAL = frozenset({"image_url", "input_audio", "audio_url", "video_url"})
"""Content part types that a multimodal model takes, with OpenAI's and vLLM's names."""

_STRUCTURES = [field.name for field in fields(StructuredOutputsParams) if field.init]


def check_unicode(request: Request) -> None:
    """Refuse lone surrogates, which JSON can encode and tokenizers do not accept."""
    texts = [request.prompt] if request.messages is None else [message.get("content") for message in request.messages]
    for text in texts:
        if isinstance(text, str) and (refusal := text_refusal(text, "the prompt")):
            raise refusal


def sampling_params(request: Request) -> SamplingParams:
    """The request's sampling parameters for vLLM."""
    own = {name: request.extra[name] for name in _OWN_SAMPLING if name in request.extra}
    given = asdict(request.sampling) | {"stop": list(request.sampling.stop)} | own
    if "logit_bias" in own:
        given["logit_bias"] = _biases(own["logit_bias"])
    return SamplingParams(
        **given,
        structured_outputs=_structure(request.extra),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # the object is not shared
    )


def _biases(given: object) -> dict[int, object]:
    """The biases by token id; in JSON the ids are text."""
    if isinstance(given, Mapping) and all(type(bias) in (int, float) for bias in given.values()):
        try:
            return {int(token): bias for token, bias in given.items()}
        except (TypeError, ValueError):
            pass
    raise RecordError(
        f'logit_bias is {shown(given)}: it must be an object of token ids and numbers, such as {{"42": -5}}',
        param="logit_bias",
    )


def _structure(extra: Mapping[str, object]) -> StructuredOutputsParams | None:
    """vLLM's `structured_outputs`, or OpenAI's `response_format`."""
    if "structured_outputs" in extra:
        wanted = extra["structured_outputs"]
        if not isinstance(wanted, Mapping):
            raise RecordError(
                f"structured_outputs is {shown(wanted)}: it must be an object, such as {{'regex': '[0-9]+'}}"
            )
        unknown = sorted(wanted.keys() - set(_STRUCTURES))  # vLLM would ignore them
        if unknown:
            raise RecordError(f"structured_outputs has an unknown {unknown[0]!r}; known: {', '.join(_STRUCTURES)}")
        return StructuredOutputsParams(**wanted)
    match extra.get("response_format"):
        case None | {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return StructuredOutputsParams(json_object=True)
        case {"type": "json_schema", "json_schema": {"schema": Mapping() as schema}}:
            return StructuredOutputsParams(json=dict(schema))
        case other:
            raise RecordError(f"response_format is {shown(other)}: it must be of type text, json_object or json_schema")
