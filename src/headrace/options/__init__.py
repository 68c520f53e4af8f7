"""The declaration of settings: what each is called, takes and does, once for all who read it.

- `declaring.option`: a field of a dataclass that is a setting
- `declaring.declared`: the settings that a dataclass declares; `all_declared`: also those of its groups
- `declaring.groups`: the dataclasses of settings that are fields of one
- `declaring.split`: the settings among what else is given

`headrace.argument_types` makes and checks the objects.
"""

from headrace.options.declaring import (
    NAMES,
    RESERVED,
    Declared,
    Option,
    SettingName,
    all_declared,
    declared,
    groups,
    option,
    split,
)

__all__ = [
    "NAMES",
    "RESERVED",
    "Declared",
    "Option",
    "SettingName",
    "all_declared",
    "declared",
    "groups",
    "option",
    "split",
]
