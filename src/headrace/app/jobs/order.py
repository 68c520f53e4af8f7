"""The order of work that a job may have, and what another order of its prompts would save."""

from __future__ import annotations

import time
from dataclasses import replace

from headrace.app.jobs.plan import Plan
from headrace.engines.profile import EngineProfile
from headrace.errors import ConfigError
from headrace.events import PromptsCompared
from headrace.io.sinks.callback_sink import CallbackWriter
from headrace.io.sources.joined import JoinedSource
from headrace.jobs.pipeline.job import Job, OrderPlan
from headrace.jobs.planning.survey import survey_prompts

_COMPARED = 512
"""Prompts, for which the best order of a template's fields is found in less than a second."""


def order_plan(plan: Plan, profile: EngineProfile) -> OrderPlan | None:
    """The order of work that the job may have; None if the engine computes every prompt in full.

    Raises:
        ConfigError: the order asked for cannot be had.
    """
    wanted = plan.settings.order
    if not profile.wants_prefix_order:
        if wanted == "prefix":
            raise ConfigError(
                "``order`` is 'prefix', but this engine computes every prompt in full: leave ``order`` out; only "
                "language models with a cache of prefixes gain from it"
            )
        return None
    if wanted == "input":
        return OrderPlan("input", "as asked")
    reasons = (
        (plan.settings.retry, "a retry goes through the dead letters"),
        (plan.user.prepares, "the prompts are made by ``prepare``"),
        (plan.output.windows is None, "the output is in an object store"),
        (isinstance(plan.output.writer, CallbackWriter), "the output goes to a function"),
        (plan.output.table is not None, "the output is a table"),
    )
    reason = next((reason for holds, reason in reasons if holds), "")
    if reason and wanted == "prefix":
        raise ConfigError(f"``order`` is 'prefix', but {reason}: leave ``order`` out")
    return OrderPlan("input", reason) if reason else OrderPlan(wanted)


def compared_prompts(plan: Plan, job: Job) -> PromptsCompared | None:
    """What the first prompts of a job have in common, if another order could be chosen; otherwise None. Blocks.

    Raises:
        JobError: the input cannot be read.
    """
    fields = plan.columns.inputs() if plan.columns.template is not None else ()
    if (len(fields) < 2 and plan.settings.order != "input") or plan.user.prepares:
        return None
    source = plan.source
    if isinstance(source, JoinedSource) or getattr(source, "reads_once", False):
        return None
    found = survey_prompts(replace(job, source=source), _COMPARED)
    if found is None or not found.prompts:
        return None
    unique = max(1 - found.duplicates, 1e-9)
    better = max((found.better - found.duplicates) / unique, 0.0) if found.template is not None else 0.0
    shared = found.beginnings / unique
    return PromptsCompared(shared, max(better, shared), found.template, time.monotonic())
