"""Train the two small classifiers of `src/headrace/models`: subjects of docstrings, and handwritten digits.

    python scripts/train_classifiers.py [docstrings] [digits]     # about two minutes on one core

They are for demonstrations and tests without a download. Both together are under a megabyte, and a sentence that
resembles no docstring of the standard library gets a random label.
"""

from __future__ import annotations

import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn.functional import cross_entropy
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    PreTrainedTokenizerFast,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessor,
)

from examples.docstrings import collect

MODELS = Path(__file__).resolve().parent.parent / "src" / "headrace" / "models"
SEED = 7
SUBJECTS = {
    "concurrency": ("asyncio", "concurrent", "multiprocessing", "queue", "sched", "subprocess", "threading"),
    "gui": ("tkinter", "turtle"),
    "logging": ("logging",),
    "mail": ("email", "imaplib", "mailbox", "nntplib", "poplib", "smtplib"),
    "testing": ("doctest", "unittest"),
    "web": ("ftplib", "html", "http", "socketserver", "urllib", "wsgiref", "xmlrpc"),
    "xml": ("plistlib", "xml"),
}
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]"]
POSITIONS = 128


def held_out(name: str) -> bool:
    """Whether an example is kept for measuring; the same at every run."""
    return zlib.crc32(name.encode()) % 5 == 0


def subjects() -> tuple[list[tuple[str, int]], list[tuple[str, int]]]:
    """Docstrings with the number of their subject: to learn from, and to measure with."""
    number = {package: index for index, packages in enumerate(SUBJECTS.values()) for package in packages}
    sides: tuple[list[tuple[str, int]], list[tuple[str, int]]] = ([], [])
    for name, text in collect().items():
        package = name.partition(".")[0]
        if package in number:
            sides[held_out(name)].append((text, number[package]))
    return sides


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Word pieces of these texts."""
    pieces = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    pieces.normalizer = normalizers.BertNormalizer(lowercase=True)
    pieces.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    pieces.decoder = decoders.WordPiece()
    pieces.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=2000, special_tokens=SPECIAL, show_progress=False)
    )
    pieces.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, SPECIAL.index(token)) for token in ("[CLS]", "[SEP]")],
    )
    names = {"unk_token": "[UNK]", "pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=pieces, model_max_length=POSITIONS, **names)


def train_docstrings() -> None:
    """A BERT of two layers that tells what a docstring is about."""
    torch.manual_seed(SEED)
    learned, kept = subjects()
    words = tokenizer([text for text, _ in learned])
    labels = dict(enumerate(SUBJECTS))
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=len(words),
            hidden_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=128,
            max_position_embeddings=POSITIONS,
            id2label=labels,
            label2id={name: index for index, name in labels.items()},
        )
    )

    def features(some: list[tuple[str, int]]) -> dict[str, Any]:
        return dict(words([text for text, _ in some], padding=True, truncation=True, return_tensors="pt"))

    order = sorted(learned, key=lambda example: len(example[0]))  # like lengths together: little padding
    batches = [order[start : start + 32] for start in range(0, len(order), 32)]
    inputs = [features(some) for some in batches]
    answers = [torch.tensor([label for _, label in some]) for some in batches]
    fit(model, inputs, answers, epochs=12)
    right = sum(
        int((model(**features(some)).logits.argmax(1) == torch.tensor([label for _, label in some])).sum())
        for some in (kept[start : start + 32] for start in range(0, len(kept), 32))
    )
    print(f"docstrings: {right / len(kept):.1%} of {len(kept)} held-out docstrings have the right subject of 7")
    model.half().save_pretrained(MODELS / "docstrings")
    words.save_pretrained(MODELS / "docstrings")


def train_digits() -> None:
    """A ViT of two layers that reads scikit-learn's handwritten digits, 8 × 8 pixels enlarged to 16 × 16."""
    torch.manual_seed(SEED)
    images, numbers = load_digits(return_X_y=True)
    processor = ViTImageProcessor(size={"height": 16, "width": 16})
    rgb = [np.repeat((image.reshape(8, 8, 1) * 15.9375).astype(np.uint8), 3, axis=2) for image in images]
    pixels = processor(images=rgb, return_tensors="pt")["pixel_values"]
    targets = torch.from_numpy(numbers)
    kept = torch.tensor([held_out(str(index)) for index in range(len(rgb))])
    labels = {index: str(index) for index in range(10)}
    model = ViTForImageClassification(
        ViTConfig(
            image_size=16,
            patch_size=4,
            hidden_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=96,
            id2label=labels,
            label2id={name: index for index, name in labels.items()},
        )
    )
    learned = (~kept).nonzero().flatten()
    batches = learned[torch.randperm(len(learned))].split(32)
    fit(model, [{"pixel_values": pixels[some]} for some in batches], [targets[some] for some in batches], epochs=25)
    right = (model(pixel_values=pixels[kept]).logits.argmax(1) == targets[kept]).float().mean().item()
    print(f"digits: {right:.1%} of {int(kept.sum())} held-out digits are read rightly")
    model.half().save_pretrained(MODELS / "digits")
    processor.save_pretrained(MODELS / "digits")


def fit(model: Any, inputs: list[dict[str, Any]], answers: list[torch.Tensor], epochs: int) -> None:
    """Train, with a rate that falls to nothing; leaves the model in evaluation mode, without gradients."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=epochs * len(inputs))
    model.train()
    for _ in range(epochs):
        for index in torch.randperm(len(inputs)).tolist():
            loss = cross_entropy(model(**inputs[index]).logits, answers[index])
            loss.backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
    model.eval().requires_grad_(False)


def main() -> None:
    torch.set_num_threads(1)  # more threads would add in another order, and give other weights
    wanted = sys.argv[1:] or ["docstrings", "digits"]
    if "docstrings" in wanted:
        train_docstrings()
    if "digits" in wanted:
        train_digits()


if __name__ == "__main__":
    main()
