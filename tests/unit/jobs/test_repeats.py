from __future__ import annotations

import random

import pytest

from headrace.jobs.pipeline.prefixes import prefix_order, sharing
from headrace.jobs.planning.repeats import repeats, template_repeats

TEMPLATE = (
    "Answer in one word.\nQuestion: {question}\nNumber: {number}\nContext: {document}\nFrom: {source}\nLang: {lang}\n"
    "Answer:"
)


def table() -> list[dict[str, str]]:
    """Five columns: few languages and sources, some documents, many questions, a number of its own for each row."""
    dice = random.Random(5)
    return [
        {
            "question": f"What about {question}? " + "Please think. " * 4,
            "number": str(dice.random()),
            "document": f"document {document} " + "word " * 100,
            "source": f"source {document % 7}",
            "lang": "en" if document % 2 else "de",
        }
        for document in range(30)
        for question in range(20)
    ]


def test_the_better_order_of_five_fields_repeats_as_much_as_promised() -> None:
    rows = table()
    random.Random(1).shuffle(rows)
    found = template_repeats(TEMPLATE, rows)
    assert found.template is not None
    assert found.template.endswith("\nAnswer:")
    assert found.template.index("Context: {document}") < found.template.index("Question: {question}")
    assert found.template.index("{question}") < found.template.index("Number: {number}")
    now, then = ([template.format_map(row) for row in rows] for template in (TEMPLATE, found.template))
    measured = sharing(then, prefix_order(then)).sorted
    assert measured == pytest.approx(found.better, abs=0.01)
    assert found.beginnings == pytest.approx(sharing(now, prefix_order(now)).sorted, abs=0.01)
    left = (1 - found.better) / (1 - found.repeated)
    assert left < 1 / 1.5, "tokens to read, now by then"
    assert found.columns["document"] > 0.9
    assert found.columns["number"] == 0


def test_fields_of_one_line_stay_together() -> None:
    rows = [{"a": str(n), "b": str(n * n), "text": "the same examples of sums " * 4} for n in range(50)]
    found = template_repeats("Sum: {a}+{b}\nExamples: {text}\nAnswer:", rows)
    assert found.template == "Examples: {text}\nSum: {a}+{b}\nAnswer:"


def test_a_template_in_the_best_order_gets_no_advice() -> None:
    found = template_repeats("{document}\n{question}", table())
    assert found.template is None
    assert found.better == found.repeated > 0.7


def test_braces_and_repeated_fields_survive_a_new_order() -> None:
    rows = [{"q": f"q{n}" * 10, "d": f"d{n % 3}" * 99} for n in range(60)]
    template = "{{json}} {q} of {d} and {q}"
    found = template_repeats(template, rows)
    assert found.template is not None
    assert found.template.count("{{json}}") == 1
    assert sorted(found.template.format_map(rows[0])) == sorted(template.format_map(rows[0]))


def test_equal_prompts_and_common_beginnings_are_told_apart() -> None:
    found = repeats(["a" * 100, "a" * 100, "b" * 100 + "1", "b" * 100 + "2"])
    assert found.duplicates == pytest.approx(100 / 402)
    assert found.beginnings == pytest.approx(100 / 402)
    assert repeats([]).repeated == 0
