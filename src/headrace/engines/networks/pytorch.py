"""PyTorch networks, loaded from Hugging Face folders."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel

from headrace.columns import RowNumbers
from headrace.device.cpu_lanes import cpu_lanes, dealt
from headrace.device.cuda_graphs import cuda_graphs
from headrace.device.cuda_memory import cuda_memory
from headrace.device.forward import ForwardMeter, NetworkSize
from headrace.device.graph_runner import GraphRunner
from headrace.device.memory import memory_limit
from headrace.device.native import gpu_uuid, hardware, speeds
from headrace.device.pipeline import Arrays, Computed, NetworkCall, OutputRows, Pipeline
from headrace.device.placement import choose_device, choose_dtype, naming_device_errors, release
from headrace.device.precision import INT8
from headrace.device.sleeping import to_device, to_host
from headrace.device.streams import pipeline_on
from headrace.device_errors import is_out_of_memory
from headrace.engines.capabilities import BesideLane, Sleeper
from headrace.engines.model_folder import adapter_facts, digest, read_ahead
from headrace.engines.networks import packing
from headrace.engines.networks.adapters import merge
from headrace.engines.networks.base import BATCH_TOKENS, TextBatch
from headrace.engines.networks.files import one_line_errors, reading
from headrace.errors import EngineDeadError, EngineError

if TYPE_CHECKING:
    from transformers.models.auto.auto_factory import _BaseAutoModelClass

LEAST_PARAMETERS = 4_000_000
"""Smaller models gain nothing by fewer bits: most of their time does not go to matrix products."""
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 8e-2}
"""Maximum rounding error by dtype, as a fraction of the largest component."""
INT8_TOLERANCE = 3e-2
_CACHED_NUMBERS = BATCH_TOKENS["cpu"] * 1_536
"""Numbers in the widest layer of MiniLM for a batch of that many tokens on a CPU. A smaller model takes more tokens, so
that fewer calls of PyTorch are made for as much arithmetic."""
MOST_CPU_TOKENS = 8_192
_LEAST_PARTED = 256
"""Tokens of a batch that is computed in parts. In smaller ones, waking two threads costs more than it saves."""
_MOST_ALONE = 64
"""Tokens of a batch that the spare lane computes: all threads would save a quarter of the time, but take 1.5 times as
much processor time, and many times as long beside other work."""


class TorchNetwork:
    """A PyTorch module on a device.

    Args:
        call: runs the module on tensors; returns its output, rows first.
        inputs: names of its input tensors.
        by_length: whether it computes long and short batches differently.
        no_packing: why the call takes no row; empty if it can be tried.
    """

    def __init__(  # noqa: PLR0913 - what a network is made of
        self,
        folder: Path,
        module: torch.nn.Module,
        device: torch.device,
        call: NetworkCall,
        inputs: frozenset[str],
        by_length: bool = False,
        no_packing: str = "texts of this task are padded",
    ) -> None:
        self._folder = folder
        self._digest: str | None = None
        self.adapter: str | None = None
        """The folder of the adapter in its weights."""
        self._device = device
        self.module: torch.nn.Module | None = module
        self.call: NetworkCall | None = call
        self._asleep = False
        self._dtype = next(module.parameters()).dtype
        self.kind = device.type
        self.inputs = inputs
        self.batch_tokens = _batch_tokens(module, self.kind)
        # torchao's tensors have the dtype of what they stand for.
        self._int8 = any(type(one).__module__.startswith("torchao.") for one in module.parameters())
        self.tolerance = INT8_TOLERANCE if self._int8 else TOLERANCE.get(self._dtype, 1e-4)
        self.by_length = by_length
        self.no_packing = no_packing
        self._pipeline = pipeline_on(device, self._dtype)
        self.overlaps = self._pipeline.overlaps
        self._has_graphs = False
        self.graphs: GraphRunner | None = None
        self._has_parts = self._leaves_room = False
        self.beside_cost: float = _LEAST_PARTED
        memory = partial(cuda_memory, device) if device.type == "cuda" else None
        self.meter = ForwardMeter(_size(module), gpu_uuid(device), memory, str(device))

    def allow_graphs(self, enforce_eager: bool) -> None:
        """Replay frequent batches as CUDA graphs, unless `enforce_eager`. For calls that return one row per text."""
        self._has_graphs = self.kind == "cuda" and not enforce_eager
        self.graphs = self._new_graphs()
        if self.kind == "cuda" and enforce_eager:
            self.meter.no_graphs = "off, as set by enforce_eager"

    def allow_parts(self) -> None:
        """Compute parts of a batch at the same time on a CPU. For calls that return one row per text or image, of a
        model that may be called on several threads at once."""
        self._has_parts = self.kind == "cpu"

    def _new_graphs(self) -> GraphRunner | None:
        return cuda_graphs(self._pipeline, self._device, self.tolerance) if self._has_graphs else None

    def describe(self) -> Mapping[str, object]:
        if self._digest is None:
            self._digest = digest(self._folder)
        dtype = INT8 if self._int8 else str(self._dtype).removeprefix("torch.")
        return {"model_digest": self._digest, "dtype": dtype, **adapter_facts(self.adapter)}

    def hardware(self) -> Mapping[str, object]:
        return hardware(self._device)

    def dtype_speeds(self) -> Mapping[str, float]:
        """How many times as fast as float32 its device is in other types; empty for a small model."""
        module = self.module
        size = 0 if module is None else sum(parameter.numel() for parameter in module.parameters())
        if self._dtype == torch.float16:  # a CPU may be many times slower in it, however small the model is
            return speeds(self._device, own="float16")
        return speeds(self._device) if size >= LEAST_PARAMETERS else {}

    def run(self, arrays: Arrays) -> OutputRows:
        call = self._awake()

        def compute(pipeline: Pipeline, places: RowNumbers | None) -> Computed:
            some = arrays if places is None else {name: array[places] for name, array in arrays.items()}
            return pipeline.run(some, call)

        with naming_device_errors(self._device, lambda: _describe(arrays)):
            rows = len(next(iter(arrays.values())))
            computed = self._on_lanes(np.ones(rows, int), compute, least=0)
        self.meter.add(computed.seconds, [])
        return computed.rows

    def run_texts(self, batch: TextBatch, packed: bool) -> OutputRows:
        call, graphs, lengths = self._awake(), self.graphs, batch.lengths

        def compute(pipeline: Pipeline, places: RowNumbers | None) -> Computed:
            texts = batch if places is None else batch.take(places)
            if not packed:
                return pipeline.run(texts.padded(), call)
            on_cpu = self.kind == "cpu"
            plan = packing.plan_of(texts.lengths, tiled=on_cpu and self._dtype in packing.HALVES, filled=on_cpu)
            arrays = {**texts.packed(plan.length), packing.STARTS: plan.starts}
            return pipeline.run(arrays, packing.called_with(call, plan))

        direct = partial(compute, self._pipeline, None)
        with naming_device_errors(self._device, lambda: f"{len(lengths)} texts of up to {lengths.max()} tokens"):
            if graphs is not None:
                computed = graphs.run(len(lengths), int(lengths.max()), direct, batch.padded, call)
                self.meter.no_graphs = graphs.failure and f"off: {graphs.failure}"
            else:
                computed = self._on_lanes(lengths, compute, least=_LEAST_PARTED) if packed else direct()
        self.meter.add(computed.seconds, lengths, computed.replayed)
        return computed.rows

    def _on_lanes(
        self, sizes: NDArray[np.integer], compute: Callable[[Pipeline, RowNumbers | None], Computed], *, least: int
    ) -> Computed:
        """The rows of a batch with items of these sizes: of parts on lanes, if it holds `least` in all; else on all
        threads together, or on the spare lane beside another batch."""
        lanes = cpu_lanes() if self._has_parts else None
        if lanes is None:
            return compute(self._pipeline, None)

        def on_lane(places: RowNumbers | None) -> Computed:
            with torch.inference_mode():  # a pipeline computes one batch at a time
                return compute(pipeline_on(self._device, self._dtype), places)

        total = sizes.sum()
        if len(sizes) < lanes.count or total < least:
            if lanes.busy or total <= min(_MOST_ALONE, least):
                return lanes.alone(on_lane, None)
            return compute(self._pipeline, None)
        started, places = time.perf_counter(), dealt(sizes, lanes.count - self._leaves_room)
        parts = [computed.rows for computed in lanes.map(on_lane, places)]
        return Computed(np.concatenate(parts)[np.argsort(np.concatenate(places))], time.perf_counter() - started)

    def _awake(self) -> NetworkCall:
        """The call.

        Raises:
            EngineDeadError: the network is closed.
            EngineError: it sleeps.
        """
        if self.call is None:
            raise EngineDeadError("the engine is closed; create a new one")
        if self._asleep:
            raise EngineError("the model sleeps in host memory; wake it first")
        return self.call

    @property
    def sleeper(self) -> Sleeper | None:
        """Moves the weights of a GPU to host memory; those of torchao cannot be moved."""
        return self if self.kind == "cuda" and not self._int8 else None

    @property
    def beside(self) -> BesideLane | None:
        """The spare lane of a CPU."""
        return self if self._has_parts and cpu_lanes() is not None else None

    def leave_room(self, leave: bool) -> None:
        self._leaves_room = leave

    def sleep(self) -> None:
        if self.module is not None:
            self._asleep, self.graphs = True, None
            to_host(self.module, self._device)

    def wake(self) -> None:
        if self.module is not None:
            to_device(self.module, self._device)
            self.graphs, self._asleep = self._new_graphs(), False

    def close(self) -> None:
        module, self.module = self.module, None
        self.call = self.graphs = None
        if module is not None:
            _drop_tensors(module)
        release(self._device)


def _drop_tensors(module: torch.nn.Module) -> None:
    """Free a network's memory at once: its parts refer to each other in cycles, and collecting those takes 0.3 s.

    The parts stay as they are: some belong to the whole process, such as the activations of transformers.
    """
    for part in module.modules():
        held = vars(part)
        part._parameters.clear()
        part._buffers.clear()
        for name in [name for name, value in held.items() if isinstance(value, torch.Tensor)]:
            del held[name]


def load_pretrained(
    auto_class: type[_BaseAutoModelClass],
    folder: Path,
    device: str,
    dtype: str,
    split: Mapping[str, object] | None = None,
    adapter: str | None = None,
) -> tuple[PreTrainedModel, torch.device, set[str]]:
    """Load a transformers model in evaluation mode; returns the model, its device and the names of missing weights.

    `split` are the arguments of `from_pretrained` that load a part of the model, on a device that they choose. An
    adapter is merged into the weights.

    Raises:
        ConfigError: unknown device or dtype, or an adapter of another model.
        EngineError: the files cannot be loaded, or do not fit on the device.
    """
    place = choose_device(device)
    torch_dtype = choose_dtype(dtype, place)
    with loading(folder):
        model, facts = auto_class.from_pretrained(
            str(folder), local_files_only=True, dtype=torch_dtype, output_loading_info=True, **(split or {})
        )
        if not split:
            model = model.to(place)
    whole = set[str]() if adapter is None else merge(model, adapter)
    return model.eval(), model.device if split else place, set(facts["missing_keys"]) - whole


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """`files.reading` for a model's weights. They are read before it is this model's turn, so a file system that is
    slow or hangs does not hold up other models.

    Raises:
        EngineError: the files cannot be loaded, or do not fit on the device; or another load hangs.
    """
    with one_line_errors(folder), _fits(folder):
        read_ahead(folder, memory_limit().bytes // 2)
    with reading(folder), _fits(folder):
        yield


@contextmanager
def _fits(folder: Path) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9
        raise EngineError(
            f"the model in {folder} does not fit: {size:.1f} GB of weights; use a smaller model, ``dtype=bfloat16`` "
            "or another device"
        ) from error


def _size(module: torch.nn.Module) -> NetworkSize | None:
    base = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)
    if base is None or not hasattr(base.config, "hidden_size") or not hasattr(base.config, "vocab_size"):
        return None
    layers = getattr(base.config, "num_hidden_layers", 0)
    multiplied = sum(
        weight.numel()
        for name, part in base.base_model.named_modules()
        if (weight := _linear_weight(part)) is not None and not name.startswith("pooler")
    )
    stored = sum(one.numel() * one.element_size() for one in base.base_model.parameters() if one.dim() == 1)
    element = base.dtype.itemsize
    return NetworkSize(multiplied, base.config.hidden_size * layers, multiplied * element + stored)


def _batch_tokens(module: torch.nn.Module, kind: str) -> int:
    base = next((part for part in module.modules() if isinstance(part, PreTrainedModel)), None)
    width = 0 if base is None else getattr(base.config, "intermediate_size", None) or 0
    if kind != "cpu" or not isinstance(width, int) or not width:
        return BATCH_TOKENS[kind]
    return max(BATCH_TOKENS[kind], min(MOST_CPU_TOKENS, _CACHED_NUMBERS // width))


def _linear_weight(part: torch.nn.Module) -> torch.Tensor | None:
    if isinstance(part, torch.nn.Linear):
        return part.weight
    return getattr(part, "packed_weight", None)


def _describe(arrays: Arrays) -> str:
    shapes = ", ".join(f"{name} {'×'.join(map(str, array.shape))}" for name, array in arrays.items())
    return f"a batch of {shapes}"
