#!/usr/bin/env python
"""Train the small language model that adds, and measure it on sums it has never seen.

    python scripts/train_arithmetic.py               # about half an hour on one core
    python scripts/train_arithmetic.py --evaluate    # only measures the existing folder

A character-level model of Llama architecture (0.87 M parameters) that adds two whole numbers from 10 to 99, written as
`12+34=`, as a question, or in words. One pair of numbers in ten is held out of training in every form and in both
orders: those in `examples/unseen_sums.jsonl`, which it is measured on. Same seed, same machine, same weights.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
import zlib
from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders
from tokenizers.models import BPE
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

FOLDER = Path(__file__).resolve().parent.parent / "src" / "headrace" / "models" / "arithmetic"
UNSEEN = Path(__file__).resolve().parent.parent / "examples" / "unseen_sums.jsonl"
SEED = 20
SMALLEST, LARGEST = 10, 99
PEAK_RATE = 2e-3
WARMUP = 100
SUMS_ALONE = 0.2
"""Share of the steps with bare sums alone: adding is learned there, and reading afterwards."""
SUMS = {"bare": 192}
SUMS_AND_STORIES = {"bare": 32, "asked": 40, "story": 32}
SPECIAL = ["<pad>", "<eos>", "<unk>"]
LETTERS = ["\n", *(chr(code) for code in range(32, 127))]
CONTEXT = 512
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'system' %}{{ message.content }}\n"
    "{% elif message.role == 'user' %}Q: {{ message.content }}\n"
    "{% elif message.role == 'assistant' %}A: {{ message.content }}\n"
    "{% else %}{{ raise_exception('unknown role ' + message.role|string + ': known are system, user, assistant') }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}A: {% endif %}"
)
NAMES = ["Ada", "Ben", "Dan", "Eva", "Gus", "Ida", "Ivo", "Jim", "Kim", "Leo", "Mia", "Noa", "Ora", "Tom", "Uma", "Zoe"]
THINGS = ["beds", "cars", "caps", "cups", "eggs", "figs", "hats", "keys", "nuts", "pens", "pots", "toys"]
STORIES = [
    "{name} has {a} {thing} and gets {b} more. How many now?",
    "{name} has {a} {thing}, {other} has {b}. How many?",
    "{a} {thing} here and {b} there. How many?",
    "{name} finds {a} {thing}, then {b}. How many?",
    "{name} buys {a} {thing}, {other} {b}. How many?",
    "{name} had {a} {thing} and won {b}. How many now?",
]


def held_out(a: int, b: int) -> bool:
    """Whether training never sees this pair, in either order."""
    return zlib.crc32(f"{min(a, b)}+{max(a, b)}".encode()) % 10 == 0


def question(a: int, b: int, rng: random.Random) -> str:
    """A sum in digits, asked for."""
    return rng.choice([f"{a}+{b}=", f"{a}+{b}", f"What is {a}+{b}?"])


def story(a: int, b: int, rng: random.Random) -> str:
    """A sum in words."""
    name, other = rng.sample(NAMES, 2)
    return rng.choice(STORIES).format(a=a, b=b, name=name, other=other, thing=rng.choice(THINGS))


def tokenizer() -> PreTrainedTokenizerFast:
    """Characters as tokens; what is neither printable ASCII nor a line break is `<unk>`."""
    vocabulary = {token: index for index, token in enumerate([*SPECIAL, *LETTERS])}
    characters = Tokenizer(BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    characters.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


def new_model() -> LlamaForCausalLM:
    """Untrained."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SPECIAL) + len(LETTERS),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=CONTEXT,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=1,
            pad_token_id=0,
            attn_implementation="sdpa",
        )
    )


def batch(pairs: list[tuple[str, str]], letters: dict[str, int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Token ids, attention mask and labels of (question, answer) pairs; only the answer and its end are learned."""
    rows = [([letters[c] for c in question], [*(letters[c] for c in answer), 1]) for question, answer in pairs]
    width = max(len(question) + len(answer) for question, answer in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    labels = torch.full_like(ids, -100)
    for row, (question, answer) in enumerate(rows):
        end = len(question) + len(answer)
        ids[row, :end] = torch.tensor(question + answer)
        mask[row, :end] = 1
        labels[row, len(question) : end] = torch.tensor(answer)
    return ids, mask, labels


def worked(a: int, b: int) -> str:
    """The answer to a question: the sum is first written down, and then done, as one that is bare."""
    return f"{a}+{b}={a + b}"


def lesson(kind: str, pairs: list[tuple[int, int]], rng: random.Random) -> list[tuple[str, str]]:
    """(Text, answer) pairs of one kind and so of like length, which leaves little padding."""
    if kind == "bare":
        return [(f"{a}+{b}=", str(a + b)) for a, b in pairs]
    ask = question if kind == "asked" else story
    return [(f"Q: {ask(a, b, rng)}\nA: ", worked(a, b)) for a, b in pairs]


def train(steps: int) -> LlamaForCausalLM:
    """The trained model, in float32: first bare sums alone, then questions and stories too."""
    torch.manual_seed(SEED)
    rng = random.Random(SEED)
    letters = tokenizer().get_vocab()
    pairs = [(a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(SMALLEST, LARGEST + 1)]
    known = [pair for pair in pairs if not held_out(*pair)]
    unseen = [pair for pair in pairs if held_out(*pair)]
    model = new_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.98), weight_decay=0.05)
    started = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            decay = 0.5 * (1 + math.cos(math.pi * step / steps))
            group["lr"] = PEAK_RATE * min(1.0, (step + 1) / WARMUP) * max(decay, 0.005)
        sizes = SUMS if step < steps * SUMS_ALONE else SUMS_AND_STORIES
        for kind, size in sizes.items():
            ids, mask, labels = batch(lesson(kind, rng.choices(known, k=size), rng), letters)
            loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss / len(sizes)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 99:
            shares = (f"{kind} {right(model, lesson(kind, unseen[::8], rng), letters):.0%}" for kind in sizes)
            print(
                f"step {step + 1}/{steps}, {time.monotonic() - started:.0f} s, unseen: {', '.join(shares)}", flush=True
            )
    return model


@torch.inference_mode()
def right(model: LlamaForCausalLM, pairs: list[tuple[str, str]], letters: dict[str, int]) -> float:
    """Share of answers of which every letter is the likeliest, given those before it."""
    ids, mask, labels = batch(pairs, letters)
    likeliest = model(input_ids=ids, attention_mask=mask).logits[:, :-1].argmax(-1)
    wanted = labels[:, 1:]
    return float(((likeliest == wanted) | (wanted == -100)).all(-1).float().mean())


def held_out_file(target: Path) -> None:
    """Write every held-out pair, as a bare sum and in words: `{"id", "kind", "prompt", "answer"}` a line."""
    rng = random.Random(SEED)
    with target.open("w", encoding="utf-8") as file:
        for a, b in (
            (a, b) for a in range(SMALLEST, LARGEST + 1) for b in range(SMALLEST, LARGEST + 1) if held_out(a, b)
        ):
            told = f"Q: {story(a, b, rng)}\nA: "
            for kind, prompt, answer in (("digits", f"{a}+{b}=", str(a + b)), ("words", told, worked(a, b))):
                row = {"id": f"{a}+{b} {kind}", "kind": kind, "prompt": prompt, "answer": answer}
                file.write(json.dumps(row) + "\n")


@torch.inference_mode()
def accuracy(folder: Path, unseen: Path) -> dict[str, float]:
    """Share of held-out prompts answered exactly, by kind, greedily."""
    words = PreTrainedTokenizerFast.from_pretrained(folder, padding_side="left")
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [json.loads(line) for line in unseen.read_text(encoding="utf-8").splitlines()]
    exact: dict[str, list[bool]] = {}
    for start in range(0, len(rows), 100):
        some = rows[start : start + 100]
        padded = words([row["prompt"] for row in some], return_tensors="pt", padding=True, return_token_type_ids=False)
        outputs = model.generate(**padded, max_new_tokens=12, do_sample=False)
        answers = words.batch_decode(outputs[:, padded["input_ids"].shape[1] :], skip_special_tokens=True)
        for row, answer in zip(some, answers, strict=True):
            exact.setdefault(row["kind"], []).append(answer == row["answer"])
    return {kind: sum(marks) / len(marks) for kind, marks in exact.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument("--unseen", type=Path, default=UNSEEN, help="where the held-out sums go")
    parser.add_argument("--evaluate", action="store_true", help="measure the folder that is there, train nothing")
    parser.add_argument("--steps", type=int, default=2400)
    options = parser.parse_args()
    torch.set_num_threads(1)  # more threads would add in another order, and give other weights
    if not options.evaluate:
        options.folder.mkdir(parents=True, exist_ok=True)
        held_out_file(options.unseen)
        model = train(options.steps)
        model.generation_config = GenerationConfig(eos_token_id=1, pad_token_id=0)
        model.half().save_pretrained(options.folder)
        tokenizer().save_pretrained(options.folder)
    for kind, share in accuracy(options.folder, options.unseen).items():
        print(f"{kind}: {share:.2%} of the held-out sums are right")


if __name__ == "__main__":
    main()
