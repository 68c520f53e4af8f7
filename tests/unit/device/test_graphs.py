"""Which shapes are captured, and when they are given up."""

from __future__ import annotations

import random

import pytest

from headrace.device.graphs import BatchShape, ShapeBook

GB = 1 << 30


def run(book: ShapeBook, texts: int, length: int, *, direct_s: float, replay_s: float, size: int = 1 << 20) -> None:
    """One batch, as the runner does it."""
    shape = book.shape(texts, length)
    if shape is None:
        return
    if book.state(shape) == "captured":
        book.replayed(shape, replay_s)
        return
    book.ran(shape, direct_s)
    if book.state(shape) == "wanted":
        book.captured(shape, size)


def test_a_shape_is_captured_once_it_was_often_seen_and_is_replayed_where_that_is_faster() -> None:
    book = ShapeBook(GB)
    for _ in range(15):
        run(book, 3, 20, direct_s=0.004, replay_s=0.001)
    assert book.state(BatchShape(4, 32)) == "seen"
    for _ in range(50):
        run(book, 4, 30, direct_s=0.004, replay_s=0.001)
    assert book.state(BatchShape(4, 32)) == "captured"


@pytest.mark.parametrize("replay_s", [0.004, 0.0039, 0.02])
def test_a_shape_whose_replays_are_not_faster_is_given_up_for_good(replay_s: float) -> None:
    book = ShapeBook(GB)
    for _ in range(500):
        run(book, 4, 32, direct_s=0.004, replay_s=replay_s)
    assert book.state(BatchShape(4, 32)) == "refused"


def test_shapes_are_bounded_in_number_memory_and_size() -> None:
    chance = random.Random(1)
    shapes = [(texts, length) for texts in (1, 2, 4, 8, 16) for length in range(16, 257, 16)]
    for room, most in ((GB, 16), (5 << 20, 5)):
        book = ShapeBook(room)
        for _ in range(20_000):
            run(book, *chance.choice(shapes), direct_s=0.004, replay_s=0.001)
        captured = [shape for texts, length in shapes if book.state(shape := BatchShape(texts, length)) == "captured"]
        assert len(captured) <= most
    assert book.shape(512, 64) is None, "the device is busy with that for long enough"


def test_a_rare_shape_is_not_captured() -> None:
    book = ShapeBook(GB)
    for number in range(10_000):
        run(book, 4, 32 if number % 100 else 16, direct_s=0.004, replay_s=0.001)
    assert book.state(BatchShape(4, 16)) == "seen"
    assert book.state(BatchShape(4, 32)) == "captured"


@pytest.mark.parametrize(("texts", "length"), [(1, 1), (5, 100), (8, 129), (63, 128)])
def test_a_shape_holds_its_batch_and_is_its_own_shape(texts: int, length: int) -> None:
    shape = ShapeBook(GB).shape(texts, length)
    assert shape is not None
    assert shape.texts >= texts and shape.length >= length
    assert ShapeBook(GB).shape(shape.texts, shape.length) == shape
