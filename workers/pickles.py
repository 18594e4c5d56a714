"""Read pickles without running them.

A pickle is a program: it names functions and has them called. Here each name of a closed list (``pickle_names``)
stands for an inert constructor of our own, every other class becomes a record that cannot be
called, and a call of anything else refuses the file. No real module is ever looked up, nothing is imported, and
torch is not needed.

What ``load`` returns is made of plain data (dict, list, tuple, str, int, …) and records; what they mean is the
business of the formats.
"""

from __future__ import annotations

import gc
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from io import BytesIO
from typing import Any, cast

from workers import pickle_names as names
from workers.errors import CorruptFile, InsufficientResources, UnsafePickle
from workers.pickle_constructors import CONSTRUCTORS, LISTED, STORAGE_DTYPES, Constructor
from workers.pickle_records import (
    LARGEST_NUMBER,
    DType,
    MalformedError,
    Mapping,
    Record,
    RefusedError,
    SealedType,
    Sequence,
    Storage,
    TensorRecord,
    is_count,
    record_class,
)
from workers.pickle_scan import STACK_BYTES_PER_TUPLE, end_of, scan, tuple_depth_limit
from workers.pickle_sharing import RepeatedError, SharedParts, with_looks

__all__ = [
    "DType",
    "Loaded",
    "Mapping",
    "Record",
    "Sequence",
    "Storage",
    "TensorRecord",
    "inert_names",
    "load",
    "load_at",
    "paused_collector",
]

_MOST_OPAQUE_CLASSES = 10_000
_SAFE_TUPLE_DEPTH = 8_192
_LARGEST_STACK_BYTES = 8 << 30

# What the interpreter's unpickler and the constructors raise for input that makes no sense.
_NONSENSE = (
    MalformedError,
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RuntimeError,
    SystemError,
    TypeError,
    ValueError,
)


@dataclass(frozen=True, slots=True)
class Loaded:
    """One pickle of a stream: its object, the storages it refers to by key, and where the next pickle begins."""

    root: Any
    storages: dict[str, Storage]
    end: int


def load(data: bytes | memoryview, *, file: str) -> Any:
    """Read one pickle (protocols 2 to 5) as plain data and records.

    ``file`` is the name for messages. Raises ``UnsafePickle`` when the pickle mentions or calls what no checkpoint
    needs, and ``CorruptFile`` for everything else that is wrong with it; nothing is executed either way.
    """
    return _load(bytes(data), file).root


def load_at(data: bytes, start: int, *, file: str) -> Loaded:
    """Read the pickle that begins at ``start``; raises ``pickle_scan.EndsTooEarly`` when it is cut off."""
    end = end_of(data, start, file)
    return replace(_load(data[start:end], file), end=end)


def _load(data: bytes, file: str) -> Loaded:
    end, shared = scan(data, file)
    body = with_looks(data[:end], shared) if shared else data[:end]
    unpickler = _InertUnpickler(body)
    with paused_collector:
        root = _with_enough_stack(lambda: _run(unpickler, file), tuple_depth_limit(body), file)
    return Loaded(root, unpickler.storages, end)


def inert_names() -> Callable[[str, str], Any]:
    """What names mean in one pickle: the inert constructor or record class of a (module, name).

    For a reader of pickles of its own. Raises ``pickle_records.RefusedError`` for names that are never acceptable.
    """
    return _InertUnpickler(b"").find_class


def _run(unpickler: _InertUnpickler, file: str) -> Any:
    try:
        return unpickler.load()
    except RefusedError as refusal:
        raise UnsafePickle(
            f"{file}: its pickle {refusal.verb} {refusal.what}, which weights never need; nothing was executed",
            file=file,
            found=refusal.what,
            expected="only names that checkpoints are made of",
            hint="Do not open this file with tools that execute pickles, as an unrestricted torch.load does. "
            "If you trust its origin, ask there for a safetensors copy.",
        ) from None
    except RepeatedError as repeated:
        raise UnsafePickle(
            f"{file}: its pickle repeats a tuple of {repeated.parts} parts again and again, perhaps in itself; such a "
            "file is made to keep whoever reads it busy for ever; nothing was executed",
            file=file,
            found=f"a tuple of {repeated.parts} parts",
            expected="tuples that are few or small where they are repeated, such as shapes",
            hint="Do not open this file with other tools: they hang. If you trust its origin, ask there for a "
            "safetensors copy.",
        ) from None
    except _NONSENSE as error:
        found = f"{str(error)[:300] or type(error).__name__}"
        raise CorruptFile(
            f"{file}: its pickle makes no sense: {found}",
            file=file,
            expected="a pickle as torch writes it",
            found=found,
            hint="The file is damaged; fetch it again from where it was saved.",
        ) from None


class _PausedCollector:
    """Keeps the cyclic collector away while any thread unpickles: all objects stay, so it would only look in vain.

    With it, a pickle of a million records takes two to three times as long.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock:
            if self._users == 0:
                self._was_enabled = gc.isenabled()
                gc.disable()
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0 and self._was_enabled:
                gc.enable()


paused_collector = _PausedCollector()
"""A context for work that makes many objects and drops none; reentrant, and shared by all threads."""

_stack_size_lock = threading.Lock()


def _with_enough_stack(work: Callable[[], Any], tuple_depth: int, file: str) -> Any:
    """Run ``work`` where hashing a tuple of this depth cannot overflow the stack; the interpreter checks it not.

    The stack of the thread is address space until it is used, and an honest checkpoint does not use it.
    """
    if tuple_depth <= _SAFE_TUPLE_DEPTH:
        return work()
    stack_bytes = (1 << 20) + tuple_depth * STACK_BYTES_PER_TUPLE
    outcome: list[Any] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            failure.append(error)

    thread = threading.Thread(target=run, name="unpickle", daemon=True)
    try:
        _start_with_stack(thread, stack_bytes)
    except (RuntimeError, ValueError, MemoryError) as error:
        raise InsufficientResources(
            f"{file}: its pickle has {tuple_depth} tuples, and takes {stack_bytes} bytes of stack to read safely",
            file=file,
            found=str(error),
            hint="Raise the limit on virtual memory, or save the checkpoint in more files.",
        ) from None
    thread.join()
    if failure:
        raise failure[0]
    return outcome[0]


def _start_with_stack(thread: threading.Thread, stack_bytes: int) -> None:
    if stack_bytes > _LARGEST_STACK_BYTES:
        raise ValueError(f"the limit is {_LARGEST_STACK_BYTES} bytes")
    with _stack_size_lock:
        before = threading.stack_size(-(-stack_bytes // 4096) * 4096)
        try:
            thread.start()
        finally:
            threading.stack_size(before)


class _Source(BytesIO):
    """The pickle as one buffer: with ``peek`` the interpreter's unpickler takes it whole, without a call an opcode."""

    def peek(self, _size: int = 0) -> bytes:
        return self.getvalue()[self.tell() :]


class _InertUnpickler(pickle.Unpickler):
    """Resolves names to inert constructors; one per pickle, so that what can change is not shared between files."""

    def __init__(self, data: bytes) -> None:
        # Text of Python 2 pickles is names in ASCII or raw bytes; latin1 keeps either.
        super().__init__(_Source(data), encoding="latin1")
        self.storages: dict[str, Storage] = {}
        self._shared = SharedParts(data)
        self._opaque: dict[names.Name, SealedType] = {}
        self._constructors: dict[names.Name, Constructor] = {}

    def find_class(self, module: str, name: str) -> Any:
        key = ("builtins" if module == "__builtin__" else module, name)
        listed = LISTED.get(key)
        if listed is not None:
            return listed
        if key in CONSTRUCTORS:
            return self._constructor(key)
        if names.is_denied(*key):
            raise RefusedError(".".join(key), "refers to")
        return self._opaque_class(key)

    def persistent_load(self, pid: Any) -> Any:
        if type(pid) is not tuple or not 5 <= len(pid) <= 6 or pid[0] != "storage":
            return self._look(pid)
        key, numel = pid[2], pid[4]
        if type(key) is not str or type(numel) is not int or not 0 <= numel <= LARGEST_NUMBER:
            raise MalformedError("a storage has no key or no number of elements")
        view_offset = _view_offset(pid[5], key) if len(pid) == 6 else 0
        try:
            storage = _new_storage(Storage, (key, _STORAGE_DTYPES[pid[1]], numel, view_offset))
        except KeyError:
            raise MalformedError(f"storage {key} has no storage class") from None
        self.storages[key] = storage
        return storage

    def _look(self, pid: Any) -> Any:
        """What ``with_looks`` wrote into the pickle; one that has such of its own is only looked at more often."""
        if type(pid) is not tuple or len(pid) != 2 or type(pid[1]) is not int or pid[1] < 0:
            raise MalformedError("a persistent id is not a storage")
        return self._shared.look(*pid)

    def _constructor(self, key: names.Name) -> Constructor:
        constructor = self._constructors.get(key)
        if constructor is None:
            constructor = self._constructors[key] = CONSTRUCTORS[key](self._constructor)
        return constructor

    def _opaque_class(self, key: names.Name) -> SealedType:
        known = self._opaque.get(key)
        if known is None:
            if len(self._opaque) >= _MOST_OPAQUE_CLASSES:
                raise MalformedError(f"it refers to more than {_MOST_OPAQUE_CLASSES} classes")
            known = self._opaque[key] = record_class(key, ".".join(key))
        return known


_STORAGE_DTYPES = {LISTED[key]: dtype for key, dtype in STORAGE_DTYPES.items()}
# Named tuples spend half of their construction on sorting out keyword arguments.
_new_storage = cast("Callable[[type[Storage], tuple[Any, ...]], Storage]", tuple.__new__)


def _view_offset(view: Any, key: str) -> int:
    if view is None:
        return 0
    if type(view) is not tuple or len(view) != 3 or not is_count(view[1]):
        raise MalformedError(f"storage {key} is an unknown kind of view")
    return int(view[1])
