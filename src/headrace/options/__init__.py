"""The declaration of settings: what each is called, takes and does, once for all who read it.

- `declaring.option`: a field of a dataclass that is a setting
- `declaring.declared`: the settings that a dataclass declares; `all_declared`: also those of its groups
- `declaring.named`: tells messages what settings are called
- `declaring.build`: the object of settings that are given flat, which `split` finds among others
"""

from headrace.options.declaring import NAMES, Declared, Option, all_declared, build, declared, named, option, split

__all__ = ["NAMES", "Declared", "Option", "all_declared", "build", "declared", "named", "option", "split"]
