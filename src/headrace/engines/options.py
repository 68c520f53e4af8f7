"""Options that several engines share. Each engine's own are beside it, in a module `options`; none imports a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Literal, TypeAlias

from headrace.device.names import check_device, check_dtype
from headrace.engines.declaring import EngineOptions
from headrace.engines.requests.answer_parts import FAMILIES, THINKING
from headrace.engines.requests.chat import messages_of
from headrace.engines.requests.generation import Sampling, default_sampling
from headrace.engines.requests.long_prompts import LongPrompts
from headrace.engines.requests.tools import ToolUse, tools_in
from headrace.errors import ConfigError, RecordError, nearest
from headrace.options import declared, option
from headrace.records import Json
from headrace.wording import shown

MAX_PIXELS = 89_478_485
"""A quarter of a gigabyte as RGB; a larger image is probably a decompression bomb."""
TooLong: TypeAlias = Literal["truncate", "error", "split"]
PixelsOption: TypeAlias = Literal["auto", "exact"]
ChunkJoin: TypeAlias = Literal["mean", "max"]
"""How the outputs for the chunks of a long text become one."""
OutputDtype: TypeAlias = Literal["float32", "int8", "uint8", "binary", "ubinary"]
Quantize: TypeAlias = Literal["int8"] | None

PANEL = "Engine"
"""The heading in `--help` of options that have a line of their own there; the others are only listed."""

_ON_TOO_LONG = (
    "Cut a text that is too long, fail its record or request, or split it into chunks and join their outputs. "
    "Default: truncate; for generate: error."
)
_CHUNK_OVERLAP = "With ``on_too_long=split``: tokens that neighbouring chunks share. Default: 0."
_CHUNK_JOIN = (
    "With ``on_too_long=split``: how outputs are joined. Default: mean for vectors and labels, max for scores of "
    "pairs, map-reduce for generate."
)
MAX_MODEL_LEN = "Maximum tokens in a text. Default: the model's limit."


def _labels(text: str) -> str | Sequence[str]:
    """Labels as text such as a,b, or as a list in JSON, for labels with commas."""
    if not text.startswith("["):
        return text
    try:
        found: Sequence[str] = json.loads(text)
    except ValueError:
        return text
    return found


class PlaceOptions(EngineOptions):
    """Where a model runs in this process."""

    device: str = option(
        "auto", "Device: auto (a GPU if there is one), cpu, cuda or cuda:N. Default: auto.", panel=PANEL
    )

    def check(self) -> None:
        super().check()
        check_device(self.device)


class DeviceOptions(PlaceOptions):
    """Where a model runs in this process, and in which precision."""

    dtype: str = option(
        "auto",
        "Data type: auto (the fastest that passes a check), float32, float16 or bfloat16. Default: auto.",
        panel=PANEL,
    )

    def check(self) -> None:
        super().check()
        check_dtype(self.dtype)


class AdapterOptions(EngineOptions):
    adapter: str | None = option(
        None,
        "Folder of a LoRA adapter, as PEFT saves it, to add to the weights when they are loaded. Default: none.",
        panel=PANEL,
    )


class NamedAdapterOptions(AdapterOptions):
    """Adapters of the model that requests choose among."""

    adapters: Mapping[str, str] | None = option(
        None,
        'Folders of LoRA adapters by name, such as {"support": "./support-style"}. A request names one as its model '
        "or in its field adapter; others get the model as it is. Default: none.",
    )

    def check(self) -> None:
        super().check()
        if self.adapter is not None and self.adapters:
            raise ConfigError("``adapter`` and ``adapters`` do not go together: give all in ``adapters``")
        if wrong := {"", "*"}.intersection(self.adapters or ()):
            raise ConfigError(f"``adapters`` has the name {min(wrong)!r}, which requests cannot give: choose another")


class TextOptions(EngineOptions):
    """How long texts may be."""

    max_model_len: int | None = option(None, MAX_MODEL_LEN, panel=PANEL, minimum=1)
    on_too_long: TooLong = option("truncate", _ON_TOO_LONG, panel=PANEL)


class ChunkOptions(TextOptions):
    """How a long text is split."""

    chunk_overlap: int | None = option(None, _CHUNK_OVERLAP, panel=PANEL, minimum=0)
    chunk_join: ChunkJoin | None = option(None, _CHUNK_JOIN, panel=PANEL)


class PromptOptions(EngineOptions):
    """Text before each input."""

    prompt_name: str | None = option(
        None, "For embed: the model's prompt before each text, such as query. Default: the model's own.", panel=PANEL
    )
    prompt: str | None = option(
        None, "For embed: text before each text, such as 'query: '. Default: ``prompt_name``.", panel=PANEL
    )


class GraphOptions(EngineOptions):
    enforce_eager: bool = option(
        False, "For text encoders on a GPU, and for vLLM: do without CUDA graphs. Default: use them.", panel=PANEL
    )


class Int8Options(EngineOptions):
    """Encoders in fewer bits."""

    quantize: Quantize = option(
        None,
        "For text encoders: 8-bit integers in linear layers, if the outputs of a sample pass a check. Default: none.",
        panel=PANEL,
    )


class EncoderOptions(PromptOptions, ChunkOptions, GraphOptions, AdapterOptions, DeviceOptions):
    """Options of engines for models of sentence-transformers."""

    trust_remote_code: bool = option(False, "Allow Python code from the model folder to run.", panel=PANEL)


class OutputDtypeOptions(EngineOptions):
    """The type of a vector's numbers."""

    output_dtype: OutputDtype = option(
        "float32",
        "Type of a vector's numbers, for jobs: float32 or float16 for multi-vector-embed, all but float16 for embed. "
        "Servers of embed take it from each request. Default: float32.",
        panel=PANEL,
    )


class VectorOptions(OutputDtypeOptions):
    """The length and form of a vector."""

    truncate_dim: int | None = option(
        None, "For embed: components to keep of a Matryoshka model's vectors. Default: all.", panel=PANEL, minimum=1
    )
    normalize: bool = option(False, "For embed: scale each vector to length 1. Many models do so anyway.", panel=PANEL)


class LabelOptions(EngineOptions):
    top_labels: int | None = option(
        None, "How many labels to list with their scores, best first. Default: only the best."
    )


class CandidateOptions(EngineOptions):
    labels: str | Sequence[str] = option(
        (), "For zero-shot: labels, such as sports,politics. Required there.", panel=PANEL, parse=_labels
    )
    hypothesis_template: str = option("This example is {}.", "The sentence for a label, which replaces {}.")
    multi_label: bool = option(False, "Whether several labels may apply at once.")


class ImageOptions(EngineOptions):
    """Which images are refused, and how the others are read."""

    max_pixels: int = option(MAX_PIXELS, "An image with more pixels fails before it is decoded.", minimum=1)
    pixels: PixelsOption = option(
        "auto",
        "How images are decoded and resized: auto (a faster way, if test images pass a check) or exact (the pixels of "
        "transformers' processor for Pillow). Default: auto.",
    )


class ChatOptions(EngineOptions):
    """What goes into each chat; a plain text is then a user's message."""

    system_prompt: str | None = option(None, "For each chat without a system message.")
    tools: str | Sequence[Mapping[str, object]] | None = option(
        None, "Tools that answers may call, as in OpenAI's API: a JSON list, or a file with one. Default: none."
    )
    tool_choice: str | None = option(
        None, "required, or the name of a tool: each answer calls one. Default: auto, the model chooses."
    )
    examples: str | Sequence[Mapping[str, object]] | None = option(
        None,
        'Examples before each chat: a JSON list, or a file of JSON or JSON Lines, of {"text": ..., "answer": ...} or '
        "messages. Default: none.",
    )

    def tool_use(self) -> ToolUse | None:
        """The tools of requests that have none. Raises ConfigError: they are invalid, or cannot be read."""
        choice: object = self.tool_choice
        if choice not in (None, "auto", "none", "required"):
            choice = {"type": "function", "function": {"name": choice}}
        given = listed(self.tools, "tools")
        try:
            return tools_in({"tools": given or None, "tool_choice": choice})
        except RecordError as error:
            raise ConfigError(f"``{(error.param or 'tools').partition('.')[0]}``: {error}") from None

    def example_messages(self) -> list[Mapping[str, object]]:
        """The messages of the examples. Raises ConfigError: they are invalid, or cannot be read."""
        try:
            return messages_of(listed(self.examples, "examples"))
        except RecordError as error:
            raise ConfigError(f"``examples``: {error}") from None

    def described(self) -> dict[str, object]:
        """What affects an answer, with what is in the files."""
        use = self.tool_use()
        found: dict[str, object] = {"system_prompt": self.system_prompt}
        if use is not None:
            found |= {"tools": use.given, "tool_choice": self.tool_choice}
        return found | ({} if self.examples is None else {"examples": self.example_messages()})

    def check(self) -> None:
        super().check()
        self.tool_use()
        self.example_messages()


class AnswerOptions(ChatOptions):
    """How answers are taken apart."""

    tool_call_parser: str | None = option(
        None, f"How the model writes calls of tools: {', '.join(FAMILIES)}. Default: as its chat template says."
    )
    reasoning_parser: str | None = option(
        None, f"How it marks its reasoning: {', '.join(THINKING)}, or none. Default: as its chat template says."
    )

    def described(self) -> dict[str, object]:
        """What affects an answer, with how it is taken apart."""
        parsers = {name: getattr(self, name) for name in ("tool_call_parser", "reasoning_parser")}
        return super().described() | {name: value for name, value in parsers.items() if value is not None}

    def check(self) -> None:
        super().check()
        for name, known in (("tool_call_parser", FAMILIES), ("reasoning_parser", (*THINKING, "none"))):
            if (given := getattr(self, name)) is not None and given not in known:
                raise ConfigError(f"``{name}`` is {given!r}; known: {', '.join(known)}{nearest(given, known)}")


def listed(given: str | Sequence[Mapping[str, object]] | None, name: str) -> Sequence[Mapping[str, object]]:
    """The list that an option gives: itself, as JSON, or in a file of JSON or JSON Lines.

    Raises:
        ConfigError: it cannot be read, or is no list of objects.
    """
    if given is None:
        return ()
    found: Json = given
    if isinstance(given, str):
        try:
            text = given if given.lstrip().startswith("[") else Path(given).read_text("utf-8")
            found = json.loads(text) if text.lstrip().startswith("[") else list(map(json.loads, text.splitlines()))
        except OSError as error:
            raise ConfigError(f"cannot read ``{name}`` {given}: {error.strerror or error}") from None
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"``{name}`` {shown(given)} is no JSON: {error}") from None
    if not isinstance(found, Sequence) or not all(isinstance(one, Mapping) for one in found):
        raise ConfigError(f"``{name}`` is {shown(found)}: it must be a list of objects")
    return list(found)


class SamplingOptions(EngineOptions):
    """Sampling of requests that set none, named and defined as in vLLM's `SamplingParams`; None for not given."""

    max_tokens: int | None = option(None, "Maximum tokens of an answer. Default: 256.")
    min_tokens: int | None = option(
        None, "Minimum tokens before an end token or a stop string ends the answer. Default: 0."
    )
    temperature: float | None = option(None, "0 for greedy decoding, which is the default.")
    top_p: float | None = option(None, "Sample from tokens with this probability in all. Default: 1.")
    top_k: int | None = option(None, "Sample from this many tokens; 0 (default) or -1 for all.")
    min_p: float | None = option(None, "Sample from tokens with this share of the best one's probability. Default: 0.")
    repetition_penalty: float | None = option(
        None, "Above 1: tokens of the prompt and the answer become less likely. Default: 1."
    )
    presence_penalty: float | None = option(None, "Above 0: tokens that the answer has become less likely. Default: 0.")
    frequency_penalty: float | None = option(
        None, "Above 0: tokens become less likely each time the answer has them. Default: 0."
    )
    stop: str | Sequence[str] | None = option(
        None, 'Text that ends an answer, or several as a list in JSON, such as ["Q:", "A:"]. Default: none.'
    )
    ignore_eos: bool | None = option(None, "Whether an end token does not end an answer.")

    def given_sampling(self) -> dict[str, object]:
        every = ((one.name, getattr(self, one.name)) for one in declared(SamplingOptions))
        return {name: value for name, value in every if value is not None}

    def sampling(self) -> Sampling:
        """The sampling of requests that set none. Raises ConfigError: a value has a wrong type or is out of range."""
        return default_sampling(self.given_sampling())


class LongPromptOptions(EngineOptions):
    """What happens to prompts that are too long for the model."""

    on_too_long: Literal["error", "split"] | None = option(None, _ON_TOO_LONG, panel=PANEL)
    chunk_overlap: int | None = option(None, _CHUNK_OVERLAP, panel=PANEL, minimum=0)
    chunk_join: Literal["map-reduce", "first"] | None = option(None, _CHUNK_JOIN, panel=PANEL)
    reduce_template: str | None = option(
        None,
        "For generate, with ``chunk_join=map-reduce``: the last prompt, such as 'Combine these summaries: {answers}'. "
        "Default: none.",
        panel=PANEL,
    )
    no_answer: str | None = option(
        None,
        "For generate, with ``chunk_join=first``: how an answer begins that counts as none, such as 'not found'. "
        "Default: only an empty answer is none.",
        panel=PANEL,
    )

    def long_prompts(self) -> LongPrompts:
        """The rules. Raises ConfigError: a value is out of range, or does not go with another."""
        given = {one.name: getattr(self, one.name) for one in fields(LongPrompts)}
        return LongPrompts(**{name: value for name, value in given.items() if value is not None})

    def check(self) -> None:
        super().check()
        self.long_prompts()
