"""Calls of the library written down once and made again: a step's hundreds become one, without Python between them.

It is to the CPU what a CUDA graph is to a GPU: what was recorded reads and writes the same addresses again, so inputs
lie in buffers that stay, and results in memory that belongs to the recorder.
"""

import ctypes
import math
import struct
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvloom.ops.native import Argument, Library, recorded_by
from kvloom.ops.packed_memory import ALIGNMENT

_WORDS: dict[type, str] = {ctypes.c_void_p: "Q", ctypes.c_int64: "q", ctypes.c_int: "i4x", ctypes.c_float: "f4x"}
"""How ``struct`` writes an argument into a word of 8 bytes; see cpu/replay.h."""

T = TypeVar("T")


class Recording(Generic[T]):
    """What a piece of work called, in order, and what it returned.

    Attributes:
        result: tensors at the same addresses after every replay, until another recording of the same recorder is made
            or replayed: they share their memory.
        others: what the work did beside calling the library: where there is something, a replay would lack it.
    """

    def __init__(self) -> None:
        self.result: T
        self.others: list[str] = []
        self._words = bytearray()
        self._replay: Callable[[int], int] | None = None
        self._address = 0

    @property
    def complete(self) -> bool:
        """Whether a replay does all that the work did."""
        return not self.others

    @property
    def nbytes(self) -> int:
        """Bytes of what was written down."""
        return len(self._words)

    def add(self, lib: Library, function: str, types: tuple[type, ...], arguments: tuple[Argument, ...]) -> None:
        """Write a call down."""
        self._replay = lib.kvloom_replay
        operation = lib.address(f"{function}_replayed")
        if operation is None:
            self.others.append(function)
            return
        layout = "<Q" + "".join(_WORDS[kind] for kind in types)
        self._words += struct.pack(layout, operation, *(0 if value is None else value for value in arguments))

    def finish(self, result: T) -> None:
        """Nothing is added any more."""
        self.result = result
        self._words += bytes(8)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._words))

    def replay(self) -> T:
        """Make the calls again; returns ``result``."""
        assert self.complete and self._replay is not None
        self._replay(self._address)
        return self.result


class Recorder:
    """Records work on a number of rows, such as the sequences of a decode step.

    Results get memory that is given out again as soon as nothing refers to it, so that all layers of a model share the
    same few buffers; and each has room for ``max_rows`` rows, so that all recordings do.

    Args:
        max_rows: maximum number of rows.
    """

    def __init__(self, max_rows: int):
        self._max_rows = max_rows
        self._buffers: list[np.ndarray] = []
        self._free: list[np.ndarray] = []
        self._rows = 0
        self._recording: Recording[Any] = Recording()

    @property
    def nbytes(self) -> int:
        """Bytes of the results' memory; what no step has used yet takes none of the machine's."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def record(self, rows: int, work: Callable[[], T]) -> Recording[T]:
        """Do some work and write down what it calls.

        Args:
            rows: that every result is so many times as large as for one row.
            work: uses the library's ops on tensors that stay where they are.
        """
        assert 0 < rows <= self._max_rows
        # nothing of an earlier recording is in use any more: what still refers to it is its result
        recording: Recording[T] = Recording()
        self._rows, self._free, self._recording = rows, list(self._buffers), recording
        with recorded_by(self), _Watch(recording.others):
            recording.finish(work())
        return recording

    def note(self, lib: Library, function: str, types: tuple[type, ...], arguments: tuple[Argument, ...]) -> None:
        """See ``native.Recorder``."""
        self._recording.add(lib, function, types, arguments)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """See ``native.Recorder``."""
        size = math.prod(shape) * dtype.itemsize
        row = -(-size // self._rows)
        buffer = self._take(row * self._max_rows)
        # torch holds on to the array as long as any view of the tensor lives
        memory = buffer[:size]
        weakref.finalize(memory, self._free.append, buffer).atexit = False
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def _take(self, size: int) -> np.ndarray:
        for place, buffer in enumerate(self._free):
            if buffer.nbytes == size:
                return self._free.pop(place)
        memory = np.empty(size + ALIGNMENT, dtype=np.uint8)
        self._buffers.append(memory[-memory.ctypes.data % ALIGNMENT :][:size])
        return self._buffers[-1]


class _Watch(TorchDispatchMode):
    """Notes what torch computes; views are nothing to compute."""

    def __init__(self, others: list[str]):
        super().__init__()
        self._others = others

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing here is compiled: without this, torch loads its compiler, for a second and many MB."""
        return False

    def __torch_dispatch__(  # noqa: PLW3201 torch's name
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            self._others.append(str(func))
        return func(*args, **(kwargs or {}))
