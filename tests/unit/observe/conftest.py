from __future__ import annotations

from tests.unit.virtual_time import virtual as virtual
