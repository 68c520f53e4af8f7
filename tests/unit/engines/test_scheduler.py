"""When prompts are read, where steps that only continue answers are cheaper."""

from __future__ import annotations

from headrace.device.step_sizes import StepSize
from headrace.engines.capabilities import PrefixCacheStats
from headrace.engines.generation.prefix_cache import PrefixCache
from headrace.engines.generation.scheduler import AnswerTokens, PageScheduler

MOST = StepSize(64, 1_000)


def scheduler_of(apart: int, answers: int) -> PageScheduler:
    """One whose answers have all begun."""
    made = PageScheduler(PrefixCache(range(400), 32, share=False), PrefixCacheStats(0, 0, 0), apart)
    for key in range(answers):
        made.add(AnswerTokens(key, [key] * 5, []))
    step(made)
    return made


def step(scheduler: PageScheduler) -> list[int]:
    """Run a step; the prompts that it read."""
    parts = scheduler.plan(MOST)
    read = [part.tokens.key for part in parts if not part.tokens.decodes]
    scheduler.done(parts, 0.01)
    for part in parts:
        part.tokens.generated.append(1)
    return read


def test_one_prompt_waits_for_a_few_steps_beside_many_answers() -> None:
    scheduler = scheduler_of(apart=8, answers=40)
    scheduler.add(AnswerTokens(40, [9] * 5, []))
    assert [step(scheduler) for _ in range(9)] == [[]] * 8 + [[40]]
    scheduler.add(AnswerTokens(41, [9] * 5, []))
    assert [step(scheduler) for _ in range(9)] == [[]] * 8 + [[41]], "and so does the next"


def test_prompts_that_are_many_beside_the_answers_are_read_at_once() -> None:
    scheduler = scheduler_of(apart=8, answers=40)
    for key in (40, 41, 42):
        scheduler.add(AnswerTokens(key, [9] * 5, []))
    assert step(scheduler) == [40, 41, 42]


def test_a_prompt_beside_few_answers_is_read_at_once() -> None:
    scheduler = scheduler_of(apart=8, answers=10)
    scheduler.add(AnswerTokens(40, [9] * 5, []))
    assert step(scheduler) == [40]


def test_without_such_steps_prompts_are_read_at_once() -> None:
    scheduler = scheduler_of(apart=0, answers=40)
    scheduler.add(AnswerTokens(40, [9] * 5, []))
    assert step(scheduler) == [40]


def test_answers_that_leave_are_not_waited_for() -> None:
    scheduler = scheduler_of(apart=8, answers=40)
    scheduler.add(AnswerTokens(40, [9] * 5, []))
    assert step(scheduler) == []
    for key in range(40):
        scheduler.remove(key)
    assert step(scheduler) == [40]
