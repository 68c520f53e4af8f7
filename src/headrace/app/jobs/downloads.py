"""The downloaded model of a job: the commit that it is begun and resumed with."""

from __future__ import annotations

import logging
from dataclasses import replace

from headrace.engines.choosing.config import EngineConfig
from headrace.engines.choosing.resolving import moved, remote_model_of, resolve
from headrace.jobs.settings import JobSettings
from headrace.jobs.state.fingerprint import check_same
from headrace.jobs.state.job_state import ModelState
from headrace.jobs.state.output import JobOutput
from headrace.wording import spelled

logger = logging.getLogger("headrace")


def resolved_for(settings: JobSettings, output: JobOutput) -> EngineConfig:
    """The configuration with the commit of a model that must be downloaded: the one that the job was begun with.

    A finished job asks no hub: nothing may be left to do.

    Raises:
        ConfigError, EngineError: see `engines.choosing.resolving.resolve`.
        ResumeMismatchError: the job was begun with another commit.
    """
    config = settings.config
    if remote_model_of(config) is None:
        return config
    begun = None if settings.overwrite else output.begun_with_model()
    if begun is None:
        return resolve(config)
    if begun["name"] != config.model:
        config = resolve(config)
        if not settings.ignore_changes:
            asked = {"model": begun["name"]}, {"model": config.model}
            check_same(output.target, {"engine.commit": begun["commit"]}, {"engine.commit": config.commit}, asked)
        return config
    config = replace(config, commit=begun["commit"])
    if output.is_finished:
        return config
    config = resolve(config)
    if (newest := moved(config)) is not None:
        logger.warning(
            "headrace: %s has moved to commit %s since this job was begun: the job continues with %s "
            + spelled("(``overwrite=True`` starts again with the new commit)"),
            config.model,
            newest,
            config.commit,
        )
    return config


def model_state(settings: JobSettings) -> ModelState | None:
    """The name and commit of a downloaded model, which a resume asks for again; None for a local one."""
    config = settings.config
    return None if config.commit is None else {"name": str(config.model), "commit": config.commit}


def downloaded_model(settings: JobSettings) -> str | None:
    """A downloaded model and its commit, for people; None for a local one."""
    return settings.config.label if settings.config.commit is not None else None
