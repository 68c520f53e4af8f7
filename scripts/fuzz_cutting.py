"""Hostile texts with every kind of tokenizer: shortened first or in pieces, each has the tokens of the whole text.

python scripts/fuzz_cutting.py --texts 100000
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from headrace.engines.base import Prepared
from headrace.engines.text.prompts import Prompts
from headrace.engines.text.splitting import LongTexts
from headrace.engines.text.tokenizing import Takes, TextTokens

SPECIAL = ("<pad>", "<unk>", "<s>", "</s>")
TRAINED_ON = [
    "the canal feeds the mill and its wheel turns, so that it never runs dry in 1987 ",
    "aaaa aaab abab naïve Übermäßig e\u0301te\u0301 水車漢字が 한국어 مرحبا — don't, it's I'll x=1;y=22;z=333 ",
    "    return self._rows(batch)\n\n\tif not self.tokens:\r\n        raise ValueError('no')\n 😀👍🏽 ﬁne ½ ",
] * 4
PIECES = [
    *(
        "a",
        "ab",
        "aaab",
        "the",
        " the",
        "the ",
        "canal feeds ",
        "naïve ",
        "Übermäßig",
        "don't ",
        "it's",
        "7",
        "1987",
        " 12,345.6",
    ),
    *(
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        " \n ",
        "\u00a0",
        "\u3000",
        "\u200b",
        "\u200d",
        "\x00",
        "\u0301",
        "\u0323\u0301",
        "e\u0301",
    ),
    *(
        "水車",
        "漢",
        "が",
        "か\u3099",
        "한국",
        "\u1112\u1161\u11ab",
        "\u1100",
        "\u1161",
        "مرحبا",
        "สำ",
        "\u0e33",
        "நி",
        "कि",
        "ｱﾞ",
        "ﬁ",
        "½",
    ),
    *(
        "😀",
        "👍🏽",
        "👨\u200d👩\u200d👧",
        "🇩🇪",
        "🇩",
        "\U0001d54f",
        "Σ",
        "ΟΔΟΣ",
        "İ",
        "ß",
        "µ",
        "…",
        "—",
        ".",
        "...",
        "!?",
        "_",
        "x=1;",
        "{}",
    ),
    *("<s>", "</s>", "<mask>", " <mask>", "<mask", "<", "</", "<unk>", "end", "END", "<|x|>"),
]


def _trained(inner: Tokenizer, trainer: Any) -> Tokenizer:
    inner.train_from_iterator(TRAINED_ON, trainer)
    inner.add_special_tokens([AddedToken("<mask>", lstrip=True, rstrip=False, normalized=False), "<|x|>"])
    inner.add_tokens([AddedToken("end", single_word=True), AddedToken("x=1;", rstrip=True)])
    ends = [(name, inner.token_to_id(name)) for name in ("<s>", "</s>")]
    inner.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=ends
    )
    return inner


def _wordpiece() -> Tokenizer:
    inner = Tokenizer(models.WordPiece(unk_token="<unk>", max_input_chars_per_word=100))
    inner.normalizer = normalizers.BertNormalizer()
    inner.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return _trained(inner, trainers.WordPieceTrainer(vocab_size=300, special_tokens=list(SPECIAL), show_progress=False))


def _bpe(split: Any, normalizer: Any = None, *, every_byte: bool = True, size: int = 500) -> Tokenizer:
    inner = Tokenizer(models.BPE(unk_token=None if every_byte else "<unk>", fuse_unk=not every_byte))
    if normalizer is not None:
        inner.normalizer = normalizer
    if split is not None:
        inner.pre_tokenizer = split
    alphabet = pre_tokenizers.ByteLevel.alphabet() if every_byte else []
    return _trained(
        inner,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
        ),
    )


def _bytes() -> Tokenizer:
    return _bpe(pre_tokenizers.ByteLevel(add_prefix_space=True))


def _regex() -> Tokenizer:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
        r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    whole = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    return _bpe(whole, normalizers.NFC())


def _whole_text() -> Tokenizer:
    """One piece for a whole text, as Llama 2 and Gemma have it."""
    return _bpe(None, normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]), every_byte=False)


def _unigram(normalizer: Any = None, split: Any = None) -> Tokenizer:
    inner = Tokenizer(models.Unigram())
    inner.normalizer = normalizer or normalizers.Sequence(
        [normalizers.Nmt(), normalizers.NFKC(), normalizers.Replace(Regex(" {2,}"), " ")]
    )
    inner.pre_tokenizer = split or pre_tokenizers.Metaspace()
    inner.decoder = decoders.Metaspace()
    return _trained(
        inner,
        trainers.UnigramTrainer(vocab_size=300, special_tokens=list(SPECIAL), unk_token="<unk>", show_progress=False),
    )


def _whole_unigram() -> Tokenizer:
    strip = normalizers.Sequence([normalizers.Strip(), normalizers.NFKD(), normalizers.StripAccents()])
    return _unigram(strip, pre_tokenizers.Metaspace(split=False))


def _words() -> Tokenizer:
    inner = Tokenizer(models.WordLevel(unk_token="<unk>"))
    inner.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    return _trained(inner, trainers.WordLevelTrainer(special_tokens=list(SPECIAL), show_progress=False))


def _characters() -> Tokenizer:
    return _bpe(None, normalizers.NFC(), every_byte=False, size=1)


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "wordpiece": _wordpiece,
    "bytes": _bytes,
    "regex": _regex,
    "whole-text": _whole_text,
    "unigram": _unigram,
    "whole-unigram": _whole_unigram,
    "words": _words,
    "characters": _characters,
}

LONGEST_OF_PAIR = 2_700
"""In characters."""


class Subject:
    """A kind of tokenizer, as the engines use it and as it is."""

    def __init__(self, kind: str, room: int, side: str = "right", takes: Takes = "either") -> None:
        tokenizer = Tokenizer.from_str(KINDS[kind]().to_str())  # as from a file: training leaves other ties
        words = SimpleNamespace(
            backend_tokenizer=tokenizer,
            truncation_side=side,
            pad_token_id=0,
            model_input_names=["input_ids", "token_type_ids"],
            num_special_tokens_to_add=lambda pair=False: 3 if pair else 2,
        )
        self.tokens = TextTokens(words, room, LongTexts(), takes=takes)
        self._settings = words, room, takes
        strategy = "only_first" if takes == "premise" else "longest_first"
        tokenizer.enable_truncation(room, strategy=strategy, direction=side)
        self._whole = tokenizer

    def split(self, chunk_overlap: int = 0) -> TextTokens:
        """The same tokenizer, which splits what is too long; a single text comes after a prompt."""
        words, room, takes = self._settings
        prompts = Prompts("query: " if takes == "text" else "")
        tokens = TextTokens(words, room, LongTexts("split", chunk_overlap), takes=takes, prompts=prompts)
        tokens.split_with(lambda rows, _: rows)
        return tokens

    def difference_in_pieces(self, text: str) -> str | None:
        """Where the tokens of a text in pieces differ from those of the whole one; None where they do nowhere."""
        cutter = self.tokens._cutter
        found, whole = cutter.all_ids(text, piece=4_096).tolist(), cutter.ids(text)
        if found == whole:
            return None
        place = next((n for n, (one, other) in enumerate(zip(found, whole, strict=False)) if one != other), -1)
        return f"in pieces: {len(found)} tokens instead of {len(whole)}, other ones from {place}"

    def difference(self, value: str | tuple[str, str]) -> str | None:
        """What is otherwise than by encoding the whole text; None where nothing is."""
        [found] = self.tokens.prepare([value])
        whole = self._whole.encode(value) if isinstance(value, str) else self._whole.encode(*value)
        if not isinstance(found, Prepared):
            return None if not whole.ids else f"refused: {found}"
        if found.payload[0].tolist() != whole.ids:
            return f"{found.payload[0].tolist()} instead of {whole.ids}"
        if found.payload.shape[0] > 1 and found.payload[1].tolist() != whole.type_ids:
            return "other types"
        return None if found.truncated == bool(whole.overflowing) else "truncated or not?"


def hostile(numbers: random.Random, pieces: Sequence[str] = PIECES) -> str:
    """A text of runs and mixtures, of up to about 6,000 characters; now and then 40,000."""
    text = ""
    size = numbers.choice((0, 20, 900, 1500, 3000, 6000)) if numbers.random() < 0.97 else 40_000
    while len(text) < size:
        some = numbers.sample(pieces, numbers.choice((1, 1, 2, 5)))
        count = numbers.choice((1, 1, 3, 10, 200, 1500, size)) // len(some) + 1
        text += "".join(some) * count if numbers.random() < 0.5 else "".join(numbers.choices(some, k=count))
    return text[: size + numbers.randrange(9)]


def main() -> int:
    """Try so many texts; status 1 where one differs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    numbers = random.Random(options.seed)
    kinds: list[tuple[int, str, Takes]] = [
        *((9, "right", "text"), (14, "right", "text"), (9, "left", "text")),
        *((100, "right", "pair"), (101, "right", "pair"), (100, "right", "premise")),
    ]
    subjects = [((kind, *how), Subject(kind, *how)) for kind in KINDS for how in kinds]
    began, bad = time.monotonic(), 0
    for number in range(options.texts):
        name, subject = subjects[number % len(subjects)]
        first = hostile(numbers)
        second = "a mill" if name[3] == "premise" else hostile(numbers)
        # A tokenizer makes all pairs of what it cuts off, so that very long ones take for ever.
        value = (
            first
            if name[3] == "text"
            else (first[:LONGEST_OF_PAIR], second[: numbers.choice((*[200] * 9, LONGEST_OF_PAIR))])
        )
        if number % 2_000 == 1_999:
            print(f"{number + 1} texts, {bad} different", flush=True)
        wrong = subject.difference(value)
        if not wrong and name[1:] == (9, "right", "text"):
            words = numbers.choices(TRAINED_ON[0].split(), k=2_000)
            first = " ".join(words[:900]) + first + hostile(numbers) + " ".join(words[900:])
            wrong = subject.difference_in_pieces(first)
        if wrong:
            bad += 1
            print(name, repr(value)[:300], len(first), wrong[:300], sep="\n  ")
    print(f"{options.texts} texts, {bad} different, {time.monotonic() - began:.0f} s, {len(KINDS)} kinds of tokenizer")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
