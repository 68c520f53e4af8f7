"""Flyte: `app.app_environment` is a model as an app of Flyte."""
