"""Convert a request to vLLM's sampling parameters and structured output."""

from __future__ import annotations

import json
from dataclasses import asdict, fields

from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from headrace.engines.requests.chat_answers import TEMPLATE_FIELD
from headrace.engines.requests.generation import Request, biases
from headrace.engines.requests.grammar_text import calls_schema, forced_schema
from headrace.engines.requests.structure import Structure
from headrace.errors import RecordError
from headrace.records import text_refusal

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
EXTRA = (*_OWN_SAMPLING, TEMPLATE_FIELD)

MULTIMODAL = frozenset({"image_url", "input_audio", "audio_url", "video_url"})
"""Content part types that a multimodal model takes, with OpenAI's and vLLM's names."""

STRUCTURE_OPTIONS = tuple(
    field.name
    for field in fields(StructuredOutputsParams)
    if field.init and field.name not in ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
)
"""Further fields of `structured_outputs`, such as `disable_any_whitespace`."""


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
    if request.tools is not None:
        given["skip_special_tokens"] = False  # some are the marks of calls
    if "logit_bias" in own:
        given["logit_bias"] = biases(own["logit_bias"])
    return SamplingParams(
        **given,
        structured_outputs=_structure(_form(request)),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # the object is not shared
    )


def _form(request: Request) -> Structure | None:
    """The form of the answer, which of calls that must come is a list, as vLLM has it."""
    use = request.tools
    if use is None or not use.forced:
        if use is not None and request.structure is not None:
            raise RecordError(
                "tools and a form of the answer do not go together in vLLM: give one of them",
                param=request.structure.said_in,
            )
        return request.structure
    return Structure.of("json", calls_schema(use), "tools")


def _structure(structure: Structure | None) -> StructuredOutputsParams | None:
    if structure is None:
        return None
    value = forced_schema(structure.value) if structure.kind == "json" else structure.value
    return StructuredOutputsParams(**{structure.kind: value}, **json.loads(structure.options))
