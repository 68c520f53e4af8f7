from __future__ import annotations

from hypothesis import settings

# Time limits are pytest-timeout's: a busy machine makes no example wrong.
settings.register_profile("unit", deadline=None, max_examples=50)
settings.load_profile("unit")
