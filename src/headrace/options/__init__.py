"""The declaration of settings: what each is called, takes and does, once for all who read it.

- `declaring.option`: a field of a dataclass that is a setting
- `declaring.declared`: the settings that a dataclass declares
"""

from headrace.options.declaring import Declared, Option, declared, option

__all__ = ["Declared", "Option", "declared", "option"]
