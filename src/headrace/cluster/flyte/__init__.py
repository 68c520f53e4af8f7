"""Headrace on Flyte.

- `app.app_environment`: a model as an app of Flyte
"""
