"""Masks of the tokens that an answer of a given form may continue with, computed by llguidance.

llguidance and not xgrammar: it refuses by name what it cannot force (`not`, `if`, `uniqueItems`, unknown formats,
look-around), where xgrammar 0.2.8 ignores these; it compiles a schema of 500 fields in a third of the time, and needs
no other package.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import torch
from tokenizers import Tokenizer

from headrace.engines.requests.grammar_text import grammar_of, limits, worded
from headrace.engines.requests.structure import NO_FORMS, Structure
from headrace.errors import RecordError, attempted
from headrace.extras import require

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

_KEPT = 512
"""Compiled forms that are kept, the last used."""
_RUST = re.compile(r"Some\((\w+)\(.*", re.DOTALL)
"""A value as Rust shows it to programmers, from its name on."""
_WHAT = "an answer of a given form"


class Grammars:
    """Compiles forms for a model's tokenizer, and keeps them. Threads may share it.

    Args:
        ends: the tokens that end an answer.
    """

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._words: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._reading = threading.Lock()
        self._compiled: OrderedDict[Structure, Future[LLMatcher]] = OrderedDict()
        self._maker = MaskMaker()

    def guide(self, structure: Structure, after: int | None, *, forces: bool) -> TokenGuide:
        """The guide of an answer, see `TokenGuide`. Raises as `compiled`."""
        return TokenGuide(self.compiled(structure), self._ends, self._maker, after, forces=forces)

    def compiled(self, structure: Structure) -> LLMatcher:
        """The form, compiled by the first call, in the caller's thread.

        Raises:
            RecordError: no answer can be held to this form.
            MissingExtraError: llguidance is not installed.
        """
        with self._lock:
            found = self._compiled.get(structure)
            if is_new := found is None:
                found = Future()
                self._compiled[structure] = found
            self._compiled.move_to_end(structure)
            while len(self._compiled) > _KEPT:
                self._compiled.popitem(last=False)
        if is_new:
            matcher = attempted(self._compile, structure)
            if isinstance(matcher, BaseException):
                found.set_exception(matcher)
            else:
                found.set_result(matcher)
        try:
            return found.result()
        except RecordError as error:
            raise RecordError(str(error), param=structure.said_in, code=error.code) from None

    def _compile(self, structure: Structure) -> LLMatcher:
        library = require("llguidance", "structured", _WHAT)
        if not self._ends:
            raise RecordError(
                "the model has no token that ends an answer, so none can be held to a form", code=NO_FORMS
            )
        with self._reading:
            if self._words is None:
                self._words = self._tokens()
        matcher: LLMatcher = library.LLMatcher(self._words, grammar_of(structure), log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()  # the first has the most work, and may fail too
        if problem := matcher.get_error():
            raise RecordError(worded(structure, problem))
        return matcher

    def _tokens(self) -> LLTokenizer:
        """The tokenizer, as llguidance has it. Raises RecordError: it cannot read it."""
        library = require("llguidance", "structured", _WHAT)
        ends, content = sorted(self._ends), self._tokenizer.to_str()
        try:
            if json.loads(content)["decoder"] == {"type": "Fuse"}:  # it does not know this one
                plain = _PlainTokens(self._tokenizer, ends[0])
                content = library.TokenizerWrapper(plain)
            words: LLTokenizer = library.LLTokenizer(content, eos_token=ends)
        except ValueError as error:
            reason = _RUST.sub(r"\1", str(error))
            message = f"no answer of this model can be held to a form: its tokenizer: {reason}"
            raise RecordError(message, code=NO_FORMS) from error
        return words

    def close(self) -> None:
        """End the thread."""
        self._maker.close()


class _PlainTokens:
    """A tokenizer whose tokens are their own text, as llguidance asks for it."""

    def __init__(self, tokenizer: Tokenizer, end: int) -> None:
        self.eos_token_id, self.bos_token_id = end, None
        added = tokenizer.get_added_tokens_decoder()
        self.special_token_ids = [number for number, token in added.items() if token.special]
        self.tokens = [(tokenizer.id_to_token(number) or "").encode() for number in range(tokenizer.get_vocab_size())]
        self._tokenizer = tokenizer

    def __call__(self, text: bytes) -> list[int]:
        return list(self._tokenizer.encode(text.decode(), add_special_tokens=False).ids)


class MaskMaker:
    """Makes the next masks of answers on one thread, all of a step together, while the model runs."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "headrace-grammar")
        self._waiting: deque[TokenGuide] = deque()
        self._working: Future[None] | None = None

    def start(self, guide: TokenGuide) -> None:
        """Make the mask of this answer. Called by the model's thread alone."""
        self._waiting.append(guide)
        if self._working is None or self._working.done():
            self._working = self._thread.submit(self._work)

    def wait(self) -> None:
        """Wait until no mask is being made."""
        if self._working is not None:
            self._working.result()

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _work(self) -> None:
        while self._waiting:
            self._waiting.popleft().advance()


class TokenGuide:
    """Says which tokens one answer may continue with.

    Args:
        maker: makes the next mask beforehand.
        after: the token after which the form holds, such as the end of reasoning; None for the whole answer.
        forces: whether tokens without a choice follow at once.
    """

    def __init__(
        self,
        compiled: LLMatcher,
        ends: frozenset[int],
        maker: MaskMaker,
        after: int | None,
        *,
        forces: bool,
    ) -> None:
        self._after = after
        self._matcher = compiled.deep_copy()
        self._ends = ends
        self._maker = maker
        self._taken: list[int] = []
        self._consumed = 0
        """How many of them the matcher has seen."""
        self._bits: bytes | None = None
        self._forces = forces
        self.forced: list[int] = []
        """The tokens that must follow, which count as chosen; none unless it `forces`."""
        if forces and after is None:
            self._force()
        self.failed: RecordError | None = None
        """Why the answer could not be held to its form; it ends then."""

    def chosen(self, token: int) -> None:
        """The answer goes on with this token: the next mask may be made while the model runs."""
        if self.failed is None:
            self._taken.append(token)
            self._bits = None
            if self._after is None or self._consumed:
                if self._forces:
                    self._force()
                self._maker.start(self)

    def advance(self) -> None:
        """Make the mask after the last token."""
        self._consume()
        self._bits = self._matcher.compute_bitmask()

    def _force(self) -> None:
        """Find the tokens that must follow, and take them for chosen."""
        self._consume()
        self.forced = self._matcher.compute_ff_tokens()
        self._taken += self.forced

    def _consume(self) -> None:
        if self._after is not None and not self._consumed:
            self._consumed = self._taken.index(self._after) + 1
        self._matcher.consume_tokens(self._taken[self._consumed :])
        self._consumed = len(self._taken)

    def fill(self, generated: Sequence[int]) -> torch.Tensor:
        """The tokens that may come after these of the answer; before the form holds, all but those that end it.

        One bit each, lowest first, in an int32 tensor of shape (vocabulary / 32, rounded up) on the CPU. It is called
        once for each token, and again from an earlier one where an answer begins anew.
        """
        if self._after is not None and self._after not in generated:
            return self._only_ends() ^ -1
        if self._bits is None:
            self._maker.wait()
        if self._taken != list(generated):  # the answer began anew
            self._matcher.reset()
            self._taken, self._consumed, self._bits = list(generated), 0, None
        if self._bits is None:  # the first, or the thread had ended its work
            self.advance()
        mask = torch.frombuffer(bytearray(self._bits or b""), dtype=torch.int32)
        if problem := self._matcher.get_error():
            self.failed = RecordError(f"the answer cannot be held to its form: {' '.join(problem.split())[:300]}")
            return self._only_ends()
        return mask

    def _only_ends(self) -> torch.Tensor:
        """The mask of the tokens that end the answer."""
        mask = torch.zeros(len(self._matcher.compute_bitmask()) // 4, dtype=torch.int32)
        for end in self._ends:
            mask[end // 32] |= 1 << end % 32 if end % 32 < 31 else -(1 << 31)
        return mask
