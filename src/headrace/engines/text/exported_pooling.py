"""How a sentence-transformers folder makes one vector of a text's token states, for runtimes other than its own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace.engines.text.prompts import Prompts, chosen_prompt
from headrace.errors import ConfigError, EngineError
from headrace.records import Json

_NAMES = {"mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max", "lasttoken": "last"}
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")
_VALUES: Mapping[str, tuple[object, ...]] = {
    "module_input_name": ("sentence_embedding",),
    "module_output_name": ("sentence_embedding", None),
    "use_residual": (False,),
}
"""The values of modules' settings that other runtimes obey."""


@dataclass(frozen=True, slots=True)
class Pooling:
    """The modules after the encoder."""

    mode: str
    """ "mean" if the folder names none."""
    normalize: bool
    dense: Sequence[Mapping[str, object]]
    """The configurations of dense layers after the pooling."""
    include_prompt: bool
    """Whether the tokens of a prompt are pooled too."""

    def describe(self) -> str:
        return self.mode + (", normalised" if self.normalize else "")


def pooling_of(
    folder: Path, modes: Sequence[str], runtime: str, *, dense: bool = False, way_out: str = "use engine torch"
) -> Pooling:
    """Read it from the folder's files.

    Args:
        modes: those that the runtime has.
        dense: whether it computes dense layers.
        way_out: what to do about a module that it lacks.

    Raises:
        EngineError: the runtime lacks a module or the mode.
    """
    modules = _json(folder / "modules.json") or []
    kinds = [(str(module["type"]).rpartition(".")[2], folder / str(module["path"])) for module in modules]
    names = [kind for kind, _ in kinds]
    if unknown := [name for name in names if name not in _ORDER or (name == "Dense" and not dense)]:
        raise EngineError(
            f"the model in {folder} has the module {min(unknown)}, which {runtime} does not compute; {way_out}"
        )
    if names != sorted(names, key=_ORDER.index):
        raise EngineError(
            f"the model in {folder} has the modules {', '.join(names)}, in an order that {runtime} does not compute; "
            f"{way_out}"
        )
    for kind, path in kinds[1:]:
        for name, value in (_json(path / "config.json") or {}).items():
            if value not in _VALUES.get(name, (value,)):
                raise EngineError(
                    f"the model in {folder} has the module {kind} with {name} {value!r}, which {runtime} does not "
                    f"compute; {way_out}"
                )
    found = next((_json(path / "config.json") for kind, path in kinds if kind == "Pooling"), None) or {}
    flags = [name.removeprefix("pooling_mode_") for name, on in found.items() if on is True and "mode_" in name]
    mode = str(found.get("pooling_mode") or "+".join(flags) or "mean")
    mode = _NAMES.get(mode, mode)
    if mode not in modes:
        raise EngineError(
            f"the model in {folder} pools by {mode!r}; with {runtime} it must be {', '.join(modes[:-1])} or {modes[-1]}"
        )
    layers = [_json(path / "config.json") or {} for kind, path in kinds if kind == "Dense"]
    normalize = any(kind == "Normalize" for kind, _ in kinds)
    return Pooling(mode, normalize, layers, bool(found.get("include_prompt", True)))


def prompts_in(folder: Path, prompt_name: str | None, prompt: str | None) -> Prompts:
    """The prompts in the folder's files. Raises ConfigError: as `chosen_prompt`."""
    told = _json(folder / "config_sentence_transformers.json") or {}
    named = {"query": "", "document": ""}  # which sentence-transformers gives every model
    named |= {str(name): str(text) for name, text in (told.get("prompts") or {}).items()}
    return Prompts(chosen_prompt(named, told.get("default_prompt_name"), prompt_name, prompt), named)


def check_pooled_prompts(pooling: Pooling, prompts: Prompts, runtime: str) -> None:
    """Check that prompts may be pooled with the text.

    Raises:
        ConfigError: the model leaves out the tokens of a prompt.
    """
    if not pooling.include_prompt and (prompts.default or any(prompts.named.values())):
        raise ConfigError(f"the model leaves its prompt out of the pooling, which {runtime} does not; use engine torch")


def _json(path: Path) -> Json:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
