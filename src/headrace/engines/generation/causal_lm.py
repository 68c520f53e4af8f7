"""Language models from Hugging Face folders: tokenize requests and decode answers."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerBase

from headrace.device.placement import release
from headrace.device.sleeping import to_device, to_host
from headrace.engines.base import PartialAnswer, Prepared, PreparedRecords
from headrace.engines.generation import logprobs
from headrace.engines.generation.grammars import Grammars
from headrace.engines.generation.model_rules import ModelRules
from headrace.engines.generation.options import LanguageModelOptions
from headrace.engines.generation.sampling import TokenSampler
from headrace.engines.model_folder import adapter_facts, check_tokenizer, digest, find_folder
from headrace.engines.networks.files import load_tokenizer
from headrace.engines.networks.pytorch import load_pretrained
from headrace.engines.requests.answer_parts import THINKING, AnswerReader
from headrace.engines.requests.chat import checked_messages, rendered
from headrace.engines.requests.chat_answers import (
    PROMPT_END,
    TEMPLATE_FIELD,
    ChatHabits,
    template_arguments,
    with_parts,
)
from headrace.engines.requests.generation import (
    GeneratedText,
    Request,
    Sampling,
    biases,
    derived_seed,
    nth_seed,
    parse,
)
from headrace.engines.requests.long_prompts import Place, PromptSplitter, PromptTooLongError, prepared_by, room_of
from headrace.engines.requests.structure import Structure
from headrace.engines.requests.vocabulary import Vocabulary, check_ids
from headrace.engines.text.max_length import choose_length, usable_positions
from headrace.engines.text.truncation import TextTruncator
from headrace.errors import ConfigError, EngineError, RecordError
from headrace.records import text_refusal
from headrace.wording import shown

ARITHMETIC = Path(__file__).resolve().parents[2] / "models" / "arithmetic"
"""The default: a tiny model that ships with Headrace and can only add two numbers."""


@dataclass(frozen=True, slots=True)
class TokenizedRequest:
    """A request as model input."""

    prompt: tuple[int, ...]
    sampling: Sampling
    """`max_tokens` is limited to the remaining context."""
    listener: Callable[[PartialAnswer], None] | None = None
    """Called with the partial answer whenever it grows."""
    logprobs: int | None = None
    """How many alternatives to list for each token, with log probabilities; None for no log probabilities."""
    counts_cached: bool = False
    """Whether the answer has `cached_tokens`."""
    place: Place = None
    """The place of the request among others, which its seed depends on; see `Placed`."""
    structure: Structure | None = None
    """The form of the answer."""
    reader: AnswerReader | None = None
    """Takes the answer apart; None for one that is text alone."""
    bias: Mapping[int, float] = field(default_factory=dict)
    """What is added to the scores of tokens."""
    adapter: str | None = None
    """The name of its adapter."""
    echo: str = ""
    """What comes before the answer: the prompt, if the request asks for it."""

    def sample(self, number: int, *, scored: bool) -> TokenizedRequest:
        """The same request with other random numbers; with log probabilities if it is `scored`."""
        seed, place = self.sampling.seed, self.place
        sampling = replace(self.sampling, seed=nth_seed(seed, number))
        place = f"{place}/{number}" if number else place
        return replace(self, sampling=sampling, place=place, logprobs=self.logprobs or 0 if scored else self.logprobs)


def folder_of(model: str | Path | None) -> Path:
    """The folder of the model; None for the arithmetic model. Raises ConfigError: no such folder."""
    return ARITHMETIC if model is None else find_folder(model)


class CausalLM(Vocabulary):
    """A model with its tokenizer: the code that both generation engines share.

    `split` loads a part of the model, see `networks.pytorch.load_pretrained`. `adapters` are those that requests name.

    Raises:
        ConfigError: no such folder, or a parameter that the model does not support.
        EngineError: the files cannot be loaded.
    """

    def __init__(
        self,
        options: LanguageModelOptions,
        split: Mapping[str, object] | None = None,
        adapters: Mapping[str, str] | None = None,
    ) -> None:
        self._options, self._sampling, self.long = options, options.sampling(), options.long_prompts()
        self._tools, self._examples = options.tool_use(), options.example_messages()
        self._folder, self._is_split = folder_of(options.model), bool(split)
        if split and (options.adapter is not None or adapters):
            raise ConfigError("an adapter does not go with ``tensor_parallel_size``: leave one of them out")
        check_tokenizer(self._folder)  # before the weights are read
        self.model, self.device, missing = load_pretrained(
            AutoModelForCausalLM, self._folder, options.device, options.dtype, split, options.adapter
        )
        if missing:
            raise EngineError(f"the model in {self._folder} holds no weights for {', '.join(sorted(missing)[:3])}")
        self._words = load_tokenizer(self._folder)
        self.dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        positions = usable_positions(self.model.config.get_text_config().to_dict())
        self.max_model_len = choose_length((), positions, 2, options.max_model_len)
        # transformers uses these as defaults. Reset them, so that only a record's own parameters count.
        self.model.generation_config, own = GenerationConfig(), self.model.generation_config
        self._adapters = adapters or {}
        self.ends = frozenset(_end_tokens(own, self._words))
        self._rules = ModelRules(self.model, own, self.ends, self.max_model_len)
        self.pad_token = self._words.pad_token_id if self._words.pad_token_id is not None else min(self.ends, default=0)
        # A private copy: the tokenizer sets truncation and padding on each call, which is not thread-safe. This copy
        # is not changed after construction.
        self._tokenizer = Tokenizer.from_str(self._words.backend_tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._cutter = TextTruncator(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self._special = {token.content: number for number, token in added.items() if token.special}
        self._habits = ChatHabits.of(self._words.chat_template, options.tool_call_parser, options.reasoning_parser)
        self._grammars = Grammars(self._tokenizer, self.ends)
        self._splitter = PromptSplitter(self.long, self) if self.long.splits else None
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

    def describe(self) -> Mapping[str, object]:
        """The model digest and all parameters that affect an answer. Reads all of the model's files."""
        options = self._options
        sampling = {name: getattr(self._sampling, name) for name in Sampling.__slots__}
        return {
            "model_digest": self._digest,
            "dtype": self.dtype,
            "max_model_len": self.max_model_len,
            **options.described(),
            **adapter_facts(options.adapter, self._adapters),
            "chat": options.chat,
            "engine_seed": options.seed,
            **{name: list(value) if isinstance(value, tuple) else value for name, value in sampling.items()},
            **self.long.describe(),
        }

    @cached_property
    def _digest(self) -> str:
        return digest(self._folder)

    def prepare(self, inputs: Sequence[object]) -> PreparedRecords:
        """The tokens of each request, or its chunks; a RecordError if it is invalid or longer than the context."""
        return prepared_by(inputs, self, self._splitter)

    def whole(self, request: object, place: Place) -> Prepared[TokenizedRequest]:
        ask = self._ask(self._parsed(request), place)
        return Prepared(ask, cost=len(ask.prompt), greedy=ask.sampling.temperature == 0)

    def room(self, request: object) -> int:
        return room_of(self.max_model_len, self._parsed(request).sampling.max_tokens)

    def count(self, request: object) -> int:
        """Tokens of the prompt; counting stops beyond the model's context."""
        parsed = self._parsed(request)
        try:
            return len(self._ids(parsed) if parsed.token_ids is None else parsed.token_ids)
        except PromptTooLongError:
            return self.max_model_len + 1

    def _parsed(self, value: object) -> Request:
        return parse(
            value,
            self._sampling,
            system_prompt=self._options.system_prompt,
            chat=self._options.chat,
            extra=(*logprobs.FIELDS, TEMPLATE_FIELD, "logit_bias", "echo"),
            token_ids=True,
            structures=(),
            tools=self._tools,
            examples=self._examples,
            adapters=self._adapters,
        )

    def _ask(self, request: Request, place: Place) -> TokenizedRequest:
        ids = self._ids(request) if request.token_ids is None else request.token_ids
        check_ids(self._tokenizer, ids, "prompt")
        room = self.max_model_len - len(ids)
        if room < 1:
            raise PromptTooLongError(
                f"the prompt has {len(ids)} tokens, which leaves no room for an answer in a context of "
                f"{self.max_model_len}; shorten it, or split it (``on_too_long=split``)"
            )
        sampling = request.sampling
        if sampling.max_tokens > room:
            sampling = replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
        form = self._habits.form(request, self._special)
        if form is not None:
            self._grammars.compiled(form)  # here, not on the model's thread
        end = self._tokenizer.decode(list(ids[-PROMPT_END:]), skip_special_tokens=False)
        reader = self._habits.reader(request, end, str(derived_seed(0, place, ids)))
        if form is not None and reader is not None and reader.opened and self._thinks_until(reader) is None:
            raise RecordError(
                "the model reasons before its answer and has no token that ends it, so the answer cannot be held to a "
                "form: turn it off (chat_template_kwargs), or leave the form out",
                param=form.said_in,
            )
        wanted = logprobs.wanted(request)
        return TokenizedRequest(
            ids, sampling, logprobs=wanted, place=place, structure=form, reader=reader, bias=self._bias(request),
            echo=self._echo(request), adapter=request.adapter,
        )  # fmt: skip

    def _bias(self, request: Request) -> Mapping[int, float]:
        given = request.extra.get("logit_bias")
        found = {} if given is None else biases(given)
        if found:
            check_ids(self._tokenizer, tuple(found), "logit_bias")
        return found

    def _echo(self, request: Request) -> str:
        """The prompt, if it comes before the answer."""
        given = request.extra.get("echo")
        if given in (None, False):
            return ""
        if given is not True or request.messages is not None or request.extra.get("logprobs") is not None:
            raise RecordError(
                f"echo is {shown(given)}: it may be true for a prompt, not for a chat, nor with logprobs", param="echo"
            )
        if request.token_ids is not None:
            return str(self._tokenizer.decode(list(request.token_ids), skip_special_tokens=True))
        return request.prompt or ""

    def _ids(self, request: Request) -> tuple[int, ...]:
        text = self._text(request)
        if refusal := text_refusal(text, "the prompt"):
            raise refusal
        if self._cutter.cut(text, self.max_model_len) != text:
            raise PromptTooLongError(
                f"the prompt has {self.max_model_len} tokens or more, which leaves no room for an answer in a context "
                f"of {self.max_model_len}; shorten it, or split it (``on_too_long=split``)"
            )
        # A chat template writes the special tokens itself.
        # As a batch of one, because `encode` holds the GIL.
        [words] = self._tokenizer.encode_batch_fast([text], add_special_tokens=request.messages is None)
        if not words.ids:
            raise RecordError("the prompt is empty; there is nothing to answer")
        return tuple(words.ids)

    def tokenize(self, value: object, add_special_tokens: bool) -> list[int]:
        if isinstance(value, list):
            text = self._text(Request(None, checked_messages(value), self._sampling, {}))
        else:
            text = str(value)
        if refusal := text_refusal(text, "the prompt"):
            raise refusal
        [words] = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        return list(words.ids)

    def token_spans(self, text: str, add_special_tokens: bool) -> list[tuple[int, int] | None]:
        """Where each token of `tokenize` is in the text; None for those that are not in it."""
        return self._cutter.spans(text, add_special_tokens=add_special_tokens)

    def _text(self, request: Request) -> str:
        if request.prompt is not None:
            return request.prompt
        if not self._words.chat_template:
            raise RecordError("the model has no chat template; give a prompt instead of messages", param="messages")
        request = self._habits.told(request)
        further = {**template_arguments(request), "tools": self._habits.template_tools(request)}
        apply = partial(self._words.apply_chat_template, tokenize=False, add_generation_prompt=True, **further)
        try:
            text = str(rendered(request.messages or (), str(self._words.chat_template), apply))
            self._habits.check_told(request, text)
            return text
        except RecordError:
            raise
        except (TemplateError, TypeError, ValueError) as error:
            raise RecordError(f"the model's chat template refuses this chat: {error}", param="messages") from error

    def sampler(self, ask: TokenizedRequest, *, forces: bool = False) -> TokenSampler:
        """Create the sampler of an answer's tokens.

        Args:
            forces: whether tokens that the answer's form leaves no choice for follow at once.
        """
        seed = ask.sampling.seed
        if seed is None:
            seed = derived_seed(self._options.seed, ask.place, ask.prompt)
        rules = self._rules.processors(ask.prompt, ask.sampling.max_tokens)
        after = None if ask.reader is None else self._thinks_until(ask.reader)
        forces = forces and not ask.sampling.stop and ask.logprobs is None  # which look at each token
        guide = None if ask.structure is None else self._grammars.guide(ask.structure, after, forces=forces)
        return TokenSampler(ask.sampling, ask.prompt, seed, self.ends, ask.logprobs, rules, guide, ask.bias)

    def _thinks_until(self, reader: AnswerReader) -> int | None:
        """The token that ends reasoning which the prompt has begun, before which no form holds."""
        if not reader.opened or reader.thinking is None:
            return None
        found: int | None = self._tokenizer.token_to_id(THINKING[reader.thinking][1])
        return found

    def _ends_of(self, ask: TokenizedRequest) -> frozenset[int]:
        """The tokens that end this answer."""
        return frozenset() if ask.sampling.ignore_eos else self.ends

    def ended(self, ask: TokenizedRequest, generated: Sequence[int]) -> bool:
        """Whether an answer is done with these tokens: by its last one, its length, a stop string or its only call."""
        if generated[-1] in self._ends_of(ask) or len(generated) == ask.sampling.max_tokens:
            return True
        if ask.reader is not None and ask.reader.single and ask.reader.stops(self._decode(ask, generated)):
            return True
        stops = ask.sampling.stop
        if not stops or len(generated) < max(ask.sampling.min_tokens, 1):
            return False
        # The last token may contain the end of a stop string and more text. A character has at most 4 tokens.
        tail = self._decode(ask, generated[-4 * max(map(len, stops)) - 8 :])
        return any(stop in tail for stop in stops) and self._stop_at(ask, generated) is not None

    def grown(self, ask: TokenizedRequest, generated: Sequence[int]) -> PartialAnswer:
        """The part of an unfinished answer that later tokens cannot change."""
        text = self._decode(ask, generated).rstrip("\ufffd")  # bytes of an incomplete character
        held_back = max(map(len, ask.sampling.stop), default=1) - 1  # may be the start of a stop string
        text = text[: len(text) - held_back] if held_back else text
        return f"{ask.echo}{text}" if ask.reader is None else ask.reader.parts(text, ended=False)

    def answer(
        self, ask: TokenizedRequest, generated: Sequence[int], sampler: TokenSampler
    ) -> GeneratedText | RecordError:
        """The result for the tokens of a finished answer."""
        if sampler.guide is not None and sampler.guide.failed is not None:
            return sampler.guide.failed
        ended = bool(generated) and generated[-1] in self._ends_of(ask)
        cut = self._stop_at(ask, generated)
        text = self._decode(ask, generated)[:cut]
        ended_early = ended or cut is not None or (ask.reader is not None and ask.reader.stops(text))
        answer = GeneratedText(
            text=f"{ask.echo}{text}",
            finish_reason="stop" if ended_early else "length",
            prompt_tokens=len(ask.prompt),
            completion_tokens=len(generated),
        )
        if ask.logprobs is not None:
            found = sampler.found[: len(generated) - ended]
            answer["logprobs"] = logprobs.written(
                found, lambda ids: self._tokenizer.decode(list(ids), skip_special_tokens=False), cut
            )
        return answer if ask.reader is None else with_parts(answer, ask.reader.parts(text))

    def _stop_at(self, ask: TokenizedRequest, generated: Sequence[int]) -> int | None:
        """The position of the first stop string that ends after the first `min_tokens` tokens; None if none."""
        least = max(ask.sampling.min_tokens - 1, 0)
        text, ignored = self._decode(ask, generated), self._decode(ask, generated[:least])
        places = (text.find(stop, max(len(ignored) - len(stop) + 1, 0)) for stop in ask.sampling.stop)
        return min((place for place in places if place >= 0), default=None)

    @property
    def can_sleep(self) -> bool:
        """Whether moving it to host memory frees a device."""
        return self.device.type == "cuda" and not self._is_split

    def sleep(self) -> None:
        if self.model is not None:
            to_host(self.model, self.device)

    def wake(self) -> None:
        if self.model is not None:
            to_device(self.model, self.device)

    def close(self) -> None:
        """Free the model's memory. Safe to call twice."""
        self.model = None
        self._grammars.close()
        gc.collect()  # modules of transformers refer to each other in cycles
        release(self.device)

    def _decode(self, ask: TokenizedRequest, ids: Sequence[int]) -> str:
        """The text of tokens, without special ones but the marks of its parts."""
        kept = {self._special.get(mark) for mark in ask.reader.marks} - {None} if ask.reader is not None else ()
        if not kept:
            return self._tokenizer.decode(list(ids), skip_special_tokens=True)
        left_out = set(self._special.values()) - kept
        return self._tokenizer.decode([one for one in ids if one not in left_out], skip_special_tokens=False)


def _end_tokens(config: GenerationConfig | None, words: PreTrainedTokenizerBase) -> set[int]:
    """The end tokens in the model's generation_config.json, else the tokenizer's."""
    ends = None if config is None else config.eos_token_id
    if ends is None:
        ends = words.eos_token_id
    return set() if ends is None else {ends} if isinstance(ends, int) else set(ends)
