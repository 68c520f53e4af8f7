"""The declaration of settings: what each is called, takes and does, once for all who read it."""

from headrace.options.declaring import Declared, Option, declared, option

__all__ = ["Declared", "Option", "declared", "option"]
