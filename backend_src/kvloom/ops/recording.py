"""Records calls of the C++ library and replays them: hundreds of calls become one, without Python in between.

This is the CPU's counterpart of a CUDA graph. A replay reads and writes the same addresses again, so inputs must be in
fixed buffers, and results are in memory of the recorder.
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
"""The ``struct`` format of each argument type in a word of 8 bytes; see cpu/replay.h."""

T = TypeVar("T")


class Recording(Generic[T]):
    """The recorded calls of some work, and its result.

    Attributes:
        result: the result's tensors, at the same addresses after every replay. Another recording of the same recorder
            overwrites them, because they share their memory.
        others: operations that can't be replayed. If there are any, the recording is incomplete.
    """

    def __init__(self) -> None:
        self.result: T
        self.others: list[str] = []
        self._words = bytearray()
        self._replay: Callable[[int], int] | None = None
        self._address = 0

    @property
    def complete(self) -> bool:
        """Whether a replay does the same as the work."""
        return not self.others

    @property
    def nbytes(self) -> int:
        """Bytes of the recorded calls. Tests read this."""
        return len(self._words)

    def add(self, lib: Library, function: str, types: tuple[type, ...], arguments: tuple[Argument, ...]) -> None:
        """Record a call."""
        self._replay = lib.kvloom_replay
        operation = lib.address(f"{function}_replayed")
        if operation is None:
            self.others.append(function)
            return
        layout = "<Q" + "".join(_WORDS[kind] for kind in types)
        self._words += struct.pack(layout, operation, *(0 if value is None else value for value in arguments))

    def finish(self, result: T) -> None:
        """Complete the recording."""
        self.result = result
        self._words += bytes(8)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(self._words))

    def replay(self) -> T:
        """Make the calls again and return ``result``."""
        assert self.complete and self._replay is not None
        self._replay(self._address)
        return self.result


class Recorder:
    """Records work on a number of rows, such as the sequences of a decode step.

    A result's memory is reused as soon as nothing refers to the result, so that all layers of a model share a few
    buffers. Each buffer has room for ``max_rows`` rows, so that all recordings share them.

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
        """Bytes of the results' buffers. Pages that no step has used take no memory. Tests read this."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def record(self, rows: int, work: Callable[[], T]) -> Recording[T]:
        """Run some work and record its calls.

        Args:
            rows: the number of rows. The size of every result must be proportional to it.
            work: uses the library's ops on tensors at fixed addresses.
        """
        assert 0 < rows <= self._max_rows
        # All buffers are free: only results of earlier recordings refer to them, and these may be overwritten
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
        # torch keeps the array alive as long as any view of the tensor lives
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
    """Records the operations of torch that compute something. Views don't."""

    def __init__(self, others: list[str]):
        super().__init__()
        self._others = others

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here. Without this method torch loads its compiler, which takes a second and many MB."""
        return False

    def __torch_dispatch__(  # noqa: PLW3201 torch's name
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not func.is_view:
            self._others.append(str(func))
        return func(*args, **(kwargs or {}))
