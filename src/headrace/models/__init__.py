"""Models that are not local folders: found by name, downloaded, and kept in a cache.

- `names.remote_model`: the model that a name means: on the Hugging Face Hub, or in an object store
- `hub.HubModel`, `stores.StoredModel`: how each is downloaded
- `files`: which files of a model an engine needs

The small models that ship with Headrace are folders beside these modules.
"""
