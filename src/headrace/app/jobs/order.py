"""The order of work that a job may have."""

from __future__ import annotations

from headrace.app.jobs.plan import Plan
from headrace.engines.profile import EngineProfile
from headrace.errors import ConfigError
from headrace.io.sinks.callback_sink import CallbackWriter
from headrace.jobs.pipeline.job import OrderPlan


def order_plan(plan: Plan, profile: EngineProfile) -> OrderPlan | None:
    """The order of work that the job may have; None if the engine reads every prompt anew.

    Raises:
        ConfigError: the order asked for cannot be had.
    """
    wanted = plan.settings.order
    if not profile.wants_prefix_order:
        if wanted == "prefix":
            raise ConfigError(
                "order is 'prefix', but this engine reads every prompt anew: leave --order out; only language models "
                "with a cache of prefixes gain from it"
            )
        return None
    if wanted == "input":
        return OrderPlan("input", "as asked")
    reasons = (
        (plan.settings.retry, "a retry goes through the dead letters"),
        (plan.user.prepares, "the prompts are made by --map"),
        (plan.output.windows is None, "the output is in an object store"),
        (isinstance(plan.output.writer, CallbackWriter), "the output goes to a function"),
        (plan.output.table is not None, "the output is a table"),
    )
    reason = next((reason for holds, reason in reasons if holds), "")
    if reason and wanted == "prefix":
        raise ConfigError(f"order is 'prefix', but {reason}: leave --order out")
    return OrderPlan("input", reason) if reason else OrderPlan(wanted)
