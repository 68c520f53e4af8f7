from __future__ import annotations

from tests.unit.virtual_time import quick_collection as quick_collection
from tests.unit.virtual_time import virtual as virtual
