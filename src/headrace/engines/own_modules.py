"""PyTorch modules of the user's own as engines: arrays in, arrays out."""

from __future__ import annotations

import copy
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from headrace.batching.options import whole
from headrace.columns import Column, PreparedColumn, RowNumbers, values_of
from headrace.device.cuda_memory import cuda_memory
from headrace.device.forward import ForwardMeter
from headrace.device.native import gpu_uuid, hardware, speeds
from headrace.device.placement import DTYPES, choose_device, choose_dtype, naming_device_errors, release
from headrace.device.streams import pipeline_on
from headrace.engines.base import ModelInput, Prepared
from headrace.engines.networks.base import in_groups
from headrace.engines.profile import EngineProfile
from headrace.errors import BadResultError, EngineDeadError, RecordError, attempted, text_of
from headrace.wording import shown

Array: TypeAlias = NDArray[np.generic]
OwnCode: TypeAlias = Any
"""A module, or an object, of the user's own."""
Tensors: TypeAlias = Any
"""A tensor, or a tuple, list or mapping of tensors, as `collate` gives it."""

_ROWS = {"cpu": 64, "cuda": 1_024}
"""Records in a batch to begin with. How many are best is measured."""
_RANGE = 32
"""How many times as many a batch may have."""
_LEAST_PARAMETERS = 4_000_000
"""Smaller modules gain nothing by fewer bits."""
_HASHED = 1 << 16
"""Numbers of each parameter that tell one module from another."""
_ONE = ""
"""The name of an input that is one array."""


@dataclass(frozen=True, slots=True)
class ModuleInputs:
    """Inputs of a module: `Payloads`. They are arrays as long as all of them have the same shapes, else a list."""

    arrays: Mapping[str, Array] | None
    """By column, one row for each input; under "" if an input is one array."""
    rows: Sequence[ModelInput] = ()
    """One by one, if they are no arrays."""

    @property
    def nbytes(self) -> int:
        if self.arrays is None:
            return sum(sum(map(_bytes, one.values())) if isinstance(one, dict) else _bytes(one) for one in self.rows)
        return sum(array.nbytes for array in self.arrays.values())

    def __len__(self) -> int:
        return len(self.rows if self.arrays is None else next(iter(self.arrays.values())))

    def __getitem__(self, row: int, /) -> ModelInput:
        if self.arrays is None:
            return self.rows[row]
        if _ONE in self.arrays:
            return self.arrays[_ONE][row]
        return {name: array[row] for name, array in self.arrays.items()}

    def take(self, rows: RowNumbers) -> Self:
        """The inputs of some rows, in the order given; neighbours without a copy."""
        if self.arrays is None:
            return type(self)(None, [self.rows[row] for row in rows.tolist()])
        if len(rows) and bool((np.diff(rows) == 1).all()):
            part = slice(int(rows[0]), int(rows[-1]) + 1)
            return type(self)({name: array[part] for name, array in self.arrays.items()})
        return type(self)({name: array[rows] for name, array in self.arrays.items()})

    @classmethod
    def joined(cls, pieces: Sequence[Self]) -> Self:
        arrays = [piece.arrays for piece in pieces if piece.arrays is not None]
        if len(arrays) < len(pieces) or len({_kinds(one) for one in arrays}) > 1:
            return cls(None, [piece[row] for piece in pieces for row in range(len(piece))])
        return cls({name: np.concatenate([one[name] for one in arrays]) for name in arrays[0]})


class ModuleEngine:
    """Runs a module on batches of arrays. A record costs 1.

    Args:
        own: a module, which gets the stacked rows as one tensor, or as a tensor for each column that its `forward`
            names; or an object, which may be a module, with `collate` (a list of inputs to tensors) and `forward`
            (these tensors, on the device, to one output for each input). Either may have `preprocess` (a value to an
            input), which runs on several threads beside the device.
        name: the user's name for it; part of a job's fingerprint.
        model: passed to its factory, if any.
        facts: what else determines the outputs.
        options: `device`, `dtype` and `batch_size`.

    Raises:
        ConfigError: an unknown device or dtype, or a batch size below 1.
    """

    def __init__(
        self, own: OwnCode, name: str, model: object, facts: Mapping[str, object], options: Mapping[str, object]
    ) -> None:
        self._name, self._model, self._facts = name, model, facts
        asked = str(options.get("dtype", "auto"))
        self._device = choose_device(str(options.get("device", "auto")))
        dtype = choose_dtype(asked, self._device)
        modules = list(_modules_of(own).values())
        floats = [one for module in modules for one in module.parameters() if one.is_floating_point()]
        self._dtype = floats[0].dtype if floats else torch.float32
        self._size = sum(one.numel() for one in floats)
        if asked in DTYPES and dtype != self._dtype:  # the user's own stays as it is
            self._dtype = DTYPES[asked]
            own = _converted(own, self._dtype)
            modules = list(_modules_of(own).values())
        for module in modules:
            module.to(self._device).eval()
        self._own: OwnCode = own
        self._digest = _digest(modules)
        self._collate: Callable[[list[ModelInput]], Tensors] | None = getattr(own, "collate", None)
        self._preprocess: Callable[[object], object] | None = getattr(own, "preprocess", None)
        self._call = own if isinstance(own, torch.nn.Module) else own.forward
        self._takes = _names(own.forward)
        self._pipeline = pipeline_on(self._device, self._dtype)
        gpu = self._device.type == "cuda"
        self._meter = ForwardMeter(None, gpu_uuid(self._device), partial(cuda_memory, self._device) if gpu else None)
        rows = options.get("batch_size")
        rows = _ROWS[self._device.type] if rows is None else whole("``batch_size``", rows, 1)
        most = rows if options.get("batch_size") else rows * _RANGE
        self.profile = EngineProfile(
            batching="batches", cost_unit="records", uniform=True, tunable=True, prepares_columns=True,
            overlaps=self._pipeline.overlaps, batch_cost=rows, batch_size=most,
        )  # fmt: skip

    def describe(self) -> Mapping[str, object]:
        """The names of module and model, the digest of its weights and its dtype; the code is left out."""
        model = None if self._model is None else str(self._model)
        dtype = str(self._dtype).removeprefix("torch.")
        return {"module": self._name, "model": model, "model_digest": self._digest, "dtype": dtype, **self._facts}

    def hardware(self) -> Mapping[str, object]:
        return hardware(self._device)

    def dtype_speeds(self) -> Mapping[str, float]:
        """How many times as fast as float32 its device is in other types; empty for a small module."""
        return speeds(self._device) if self._size >= _LEAST_PARAMETERS else {}

    def forward_meter(self) -> ForwardMeter:
        return self._meter

    # -- prepare ---------------------------------------------------------------------------------------------------

    def prepare(self, inputs: Sequence[object]) -> list[Prepared[object] | Exception]:
        """Each value as an array, or as what `preprocess` makes of it for `collate`."""
        return [_caught(self._prepared, value) for value in inputs]

    def prepare_column(self, inputs: Column) -> PreparedColumn:
        """The values as one array, if they are numbers of one shape; else as `prepare` makes them."""
        if self._preprocess is None and self._collate is None and (array := _array_of(inputs)) is not None:
            return PreparedColumn(ModuleInputs({_ONE: array}), np.ones(len(array), np.int64))
        answers = self.prepare(values_of(inputs))
        errors = {row: answer for row, answer in enumerate(answers) if isinstance(answer, Exception)}
        payloads: list[ModelInput] = [answer.payload if isinstance(answer, Prepared) else None for answer in answers]
        costs = np.ones(len(payloads), np.int64)
        if not errors and self._collate is None and len({_key(row) for row in payloads}) == 1:
            return PreparedColumn(ModuleInputs(_stacked(payloads)), costs)
        return PreparedColumn(ModuleInputs(None, payloads), costs, errors)

    def _prepared(self, value: object) -> object:
        if self._preprocess is not None:
            value = self._preprocess(value)
        if self._collate is not None:
            return value
        if not isinstance(value, Mapping):
            return as_array(value, "the value")
        names = value if self._takes is None else [name for name in self._takes if name in value]
        row = {name: as_array(value[name], f"column {name!r}") for name in names}
        if not row:
            raise RecordError(
                f"the row has {shown(list(value))}, none of which {self._name} takes; name its column "
                "(``text_column``), or name columns in its forward"
            )
        return row

    # -- forward ---------------------------------------------------------------------------------------------------

    def forward(self, batch: ModuleInputs | list[ModelInput]) -> Sequence[object]:
        """One output for each input: an array, or a list of arrays, mappings or tuples of arrays.

        Raises:
            BadResultError: the module returned something else than one output for each input, or on another device.
            EngineOutOfMemoryError: the batch does not fit on the device.
            EngineDeadError: the device failed, or the engine is closed.
        """
        if not len(batch):
            return []
        if self._own is None:
            raise EngineDeadError("the engine is closed; create a new one")
        rows = list(batch.rows) if isinstance(batch, ModuleInputs) else batch
        if isinstance(batch, ModuleInputs) and batch.arrays is not None:
            return self._run(batch.arrays)
        if self._collate is not None:
            return self._run_on(self._collate(rows), len(rows))
        return in_groups(rows, _key, lambda some: self._run(_stacked(some)))

    def close(self) -> None:
        self._own = self._call = None
        release(self._device)

    def _run(self, arrays: Mapping[str, Array]) -> Sequence[object]:
        size = len(next(iter(arrays.values())))
        return self._run_on(arrays.get(_ONE, arrays), size, named=_ONE not in arrays)

    def _run_on(self, inputs: Tensors, size: int, *, named: bool = False) -> Sequence[object]:
        """Call the module on a batch, as tensors on the device.

        `named` says that its inputs are arguments, not one mapping.
        """
        arrays = {name: _for_pipeline(one) for name, one in _flat(inputs)}
        found: list[object] = []

        def call(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
            built = _rebuilt(inputs, tensors)
            output = self._call(**built) if named else self._call(built)
            for _, one in _flat(output):
                self._check(one)
            if isinstance(output, torch.Tensor):
                return output
            found.append(output)
            return torch.zeros(0, device=self._device)

        with naming_device_errors(self._device, lambda: f"a batch of {size} records of {self._name}"):
            computed = self._pipeline.run(arrays, call)
            self._meter.add(computed.seconds, [], computed.replayed)
            if not found:
                return self._counted(computed.rows, size)  # type: ignore[return-value]  # an array
            if not isinstance(found[0], (Mapping, tuple, list)):
                return found[0]  # type: ignore[return-value]  # whoever runs the batch names it
            return self._split(found[0], size)

    def _counted(self, rows: Array, size: int) -> Array:
        if rows.ndim and len(rows) == size:
            return rows
        raise BadResultError(
            f"{self._name} returned a tensor of shape {tuple(rows.shape)} for a batch of {size} records: its first "
            "dimension must be the batch"
        )

    def _split(self, output: Tensors, size: int) -> list[object]:
        """A mapping, tuple or list of tensors as one of their rows for each record."""
        is_answers = not isinstance(output, Mapping) and not all(isinstance(one, torch.Tensor) for one in output)
        if is_answers and len(output) == size:
            return list(output)
        parts = [(name, self._counted(_to_numpy(one), size)) for name, one in _flat(output)]
        if isinstance(output, Mapping):
            return [{name: rows[place] for name, rows in parts} for place in range(size)]
        return [tuple(rows[place] for _, rows in parts) for place in range(size)]

    def _check(self, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.device.type != self._device.type:
            raise BadResultError(
                f"{self._name} returned a tensor on {output.device}, and runs on {self._device}: return it on the "
                "device of its inputs"
            )


def _caught(prepare: Callable[[object], object], value: object) -> Prepared[object] | Exception:
    found = attempted(prepare, value)
    if isinstance(found, Exception):
        return found
    if isinstance(found, BaseException):
        raise found
    return Prepared(found, cost=1)


def _modules_of(own: OwnCode) -> dict[str, torch.nn.Module]:
    """The modules that an object is, or has as attributes of its own or of its class, by attribute."""
    if isinstance(own, torch.nn.Module):
        return {"": own}
    attributes = ((name, inspect.getattr_static(own, name, None)) for name in dir(own))
    return {name: one for name, one in attributes if isinstance(one, torch.nn.Module)}


def _converted(own: OwnCode, dtype: torch.dtype) -> OwnCode:
    if isinstance(own, torch.nn.Module):
        return copy.deepcopy(own).to(dtype)
    other = copy.copy(own)
    for name, module in _modules_of(own).items():
        setattr(other, name, copy.deepcopy(module).to(dtype))
    return other


def _names(forward: Callable[..., object]) -> tuple[str, ...] | None:
    """The names of its parameters; None if it takes any."""
    parameters = inspect.signature(forward).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return None
    return tuple(one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY))


def _digest(modules: Sequence[torch.nn.Module]) -> str:
    """Tells modules with other weights apart, by some numbers of each parameter."""
    digest = hashlib.blake2b(digest_size=16)
    for module in modules:
        digest.update(type(module).__qualname__.encode())
        for name, tensor in module.state_dict().items():
            digest.update(f"{name} {tuple(getattr(tensor, 'shape', ()))}".encode())
            if isinstance(tensor, torch.Tensor):
                some = tensor.detach().reshape(-1)[:_HASHED].float().cpu().numpy()
                digest.update(some.tobytes())
    return digest.hexdigest()


def as_array(value: object, what: str) -> Array:
    """A value as an array of numbers, those of Python and of 64 bits as float32.

    Raises:
        RecordError: it holds something else than numbers.
    """
    if isinstance(value, torch.Tensor):
        value = _to_numpy(value)
    array = attempted(np.asarray, value)
    if isinstance(array, BaseException) or array.dtype.kind not in "biuf":
        why = f": {text_of(array)}" if isinstance(array, BaseException) else ""
        raise RecordError(f"{what} is {shown(value)}, neither a number nor an array of numbers{why}")
    return _narrowed(array)


def _narrowed(array: Array) -> Array:
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _array_of(column: Column) -> Array | None:
    """A column as one array without a look at its values; None if that is not possible."""
    if isinstance(column, Sequence):
        kinds = set(map(type, column))
        if kinds != {np.ndarray} and kinds != {list} and not kinds <= {int, float}:
            return None
        array = attempted(np.array, column)  # ragged ones raise
        if isinstance(array, BaseException) or array.dtype.kind not in "biuf":
            return None
        return _narrowed(array)
    import pyarrow as pa

    shape = [len(column)]
    while not (pa.types.is_primitive(column.type) or pa.types.is_boolean(column.type)):
        if column.null_count:
            return None
        if pa.types.is_fixed_size_list(column.type):
            size = column.type.list_size
        elif pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
            lengths = np.diff(column.offsets.to_numpy())
            if not len(lengths) or (lengths != lengths[0]).any():
                return None
            size = int(lengths[0])
        else:
            return None
        shape.append(size)
        column = column.flatten()
    if column.null_count:
        return None
    array = column.to_numpy(zero_copy_only=False).reshape(shape)
    return _narrowed(array) if array.dtype.kind in "biuf" else None


def _for_pipeline(one: object) -> Array:
    """A tensor or array of `collate` as an array that a tensor may be made of."""
    array = _to_numpy(one) if isinstance(one, torch.Tensor) else np.asarray(one)
    # PyTorch warns of memory that it must not write, such as that of an Arrow table.
    return array if array.flags.writeable and array.flags.c_contiguous else array.copy()


def _to_numpy(tensor: torch.Tensor) -> Array:
    tensor = tensor.detach().cpu()
    found: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return found


def _flat(tensors: Tensors) -> list[tuple[str, Tensors]]:
    """The tensors in a structure, by name."""
    if isinstance(tensors, Mapping):
        return [(str(name), one) for name, one in tensors.items()]
    if isinstance(tensors, (tuple, list)):
        return [(str(place), one) for place, one in enumerate(tensors)]
    return [(_ONE, tensors)]


def _rebuilt(like: Tensors, tensors: Mapping[str, torch.Tensor]) -> Tensors:
    if isinstance(like, Mapping):
        return dict(tensors)
    if isinstance(like, (tuple, list)):
        return tuple(tensors[str(place)] for place in range(len(like)))
    return tensors[_ONE]


def _kinds(arrays: Mapping[str, Array]) -> object:
    """The same for arrays that can be joined."""
    return tuple((name, array.shape[1:], array.dtype) for name, array in arrays.items())


def _key(row: ModelInput) -> object:
    """The same for inputs that can be stacked."""
    if isinstance(row, dict):
        return tuple((name, one.shape, one.dtype.kind) for name, one in row.items())
    return row.shape, row.dtype.kind


def _stacked(rows: Sequence[ModelInput]) -> Mapping[str, Array]:
    """Inputs of the same shapes as arrays."""
    columns: dict[str, list[Array]] = {}
    for row in rows:
        for name, array in row.items() if isinstance(row, dict) else ((_ONE, row),):
            columns.setdefault(name, []).append(array)
    return {name: np.stack(column) for name, column in columns.items()}


def _bytes(value: object) -> int:
    size = getattr(value, "nbytes", 64)
    return size if isinstance(size, int) else 64
