"""The inert constructors: what the listed names of a pickle stand for.

Nothing here runs anything of a checkpoint or looks up a real module. Functions are instances that refuse to be
changed, since BUILD sets attributes on whatever it is given. This module must not interpret what it makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NoReturn, TypeVar, cast

from workers import pickle_names as names
from workers.dtypes import BY_TORCH_NAME
from workers.geometry import MOST_DIMENSIONS
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
    make_record,
    record_class,
    taken_over,
)
from workers.shown import shown

_Collection = TypeVar("_Collection")


class Constructor:
    """A function of the list. An instance and not a function, since a pickle can set attributes on functions.

    ``own`` finds the other constructors of the same pickle.
    """

    __slots__ = ()

    def __init__(self, own: Callable[[names.Name], Constructor]) -> None:
        """Most need no others."""

    def __setstate__(self, state: object) -> NoReturn:
        raise MalformedError("it gives a state to a function")

    def __call__(self, *_: Any) -> Any:
        """Make the inert value that stands for the result."""
        raise MalformedError("it calls a function by itself that stands only inside others")


class _Size(Constructor):
    """``torch.Size``: a tuple of lengths. The equal ones of a pickle are one object, which saves memory."""

    __slots__ = ("_known",)

    def __init__(self, own: Callable[[names.Name], Constructor]) -> None:
        super().__init__(own)
        self._known: dict[object, tuple[int, ...]] = {}

    def __call__(self, lengths: Any = ()) -> tuple[int, ...]:
        known = self._known.get(lengths) if type(lengths) is tuple else None
        return known if known is not None else self._check(lengths)

    def _check(self, lengths: Any) -> tuple[int, ...]:
        if type(lengths) not in (tuple, list) or not all(is_count(length) for length in lengths):
            raise MalformedError("a shape or a stride is not a tuple of non-negative numbers")
        if len(lengths) > MOST_DIMENSIONS:
            raise MalformedError(f"a shape or a stride has {len(lengths)} dimensions, more than {MOST_DIMENSIONS}")
        plain = tuple(lengths)
        return self._known.setdefault(plain, plain)


class _RebuildTensor(Constructor):
    """``_rebuild_tensor`` and ``_rebuild_tensor_v2``: the storage has the dtype."""

    __slots__ = ("_geometries", "_lengths")

    def __init__(self, own: Callable[[names.Name], Constructor]) -> None:
        self._lengths = own(_SIZE)
        self._geometries: dict[object, tuple[tuple[int, ...], tuple[int, ...]]] = {}

    def __call__(self, storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> TensorRecord:
        if type(storage) is not Storage or storage[1] is None:
            raise MalformedError("a tensor lies on no typed storage")
        known = self._geometries.get((size, stride))
        if known is not None and type(offset) is int and 0 <= offset <= LARGEST_NUMBER and len(rest) < 3:
            return _new_tensor(TensorRecord, (storage, offset, *known, storage[1], False, False))
        return self._record((storage, offset, size, stride), storage[1], rest[2] if len(rest) > 2 else None)

    def _record(self, where: tuple[Storage, Any, Any, Any], dtype: str, metadata: Any) -> TensorRecord:
        storage, offset, size, stride = where
        shape, stride = self._geometries.get((size, stride)) or self._check(size, stride)
        if type(offset) is not int or not 0 <= offset <= LARGEST_NUMBER:
            raise MalformedError(f"a tensor begins at element {shown(offset, 40)} of its storage")
        conjugate = negative = False
        if metadata:
            conjugate, negative = bool(metadata.get("conj")), bool(metadata.get("neg"))
        return _new_tensor(TensorRecord, (storage, offset, shape, stride, dtype, conjugate, negative))

    def _check(self, size: Any, stride: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
        shape, strides = self._lengths(size), self._lengths(stride)
        if len(shape) != len(strides):
            raise MalformedError(f"a tensor has {len(shape)} dimensions and {len(strides)} strides")
        return self._geometries.setdefault((shape, strides), (shape, strides))


class _RebuildTensorV3(_RebuildTensor):
    """``_rebuild_tensor_v3``: the storage is untyped and the dtype an argument."""

    __slots__ = ()

    def __call__(self, storage: Any, offset: Any, size: Any, stride: Any, *rest: Any) -> TensorRecord:
        if type(storage) is not Storage or len(rest) < 3 or type(rest[2]) is not DType:
            raise MalformedError("a tensor lies on no storage or has no dtype")
        return self._record((storage, offset, size, stride), rest[2].name, rest[3] if len(rest) > 3 else None)


# Named tuples spend half of their construction on sorting out keyword arguments.
_new_tensor = cast("Callable[[type[TensorRecord], tuple[Any, ...]], TensorRecord]", tuple.__new__)


class _RebuildWrapper(Constructor):
    """``_rebuild_wrapper_subclass``, which makes sense only inside ``_rebuild_from_type_v2``."""

    __slots__ = ()


class _RebuildParameter(Constructor):
    """``_rebuild_parameter``: what it wraps is what counts."""

    __slots__ = ()

    def __call__(self, tensor: Any, *_: object) -> TensorRecord | Record:
        if not isinstance(tensor, (TensorRecord, Record)):
            raise MalformedError("a parameter holds no tensor")
        return tensor


class _RebuildFromType(Constructor):
    """``_rebuild_from_type_v2``: calls one of a few listed functions, then gives the result a class and a state."""

    __slots__ = ("_tensors", "_wrapper")

    def __init__(self, own: Callable[[names.Name], Constructor]) -> None:
        self._wrapper = own(("torch._utils", "_rebuild_wrapper_subclass"))
        self._tensors = tuple(
            own(("torch._utils", name)) for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter")
        )

    def __call__(self, function: Any, kind: Any, args: Any, state: Any) -> TensorRecord | Record:
        if type(kind) is not SealedType or type(args) is not tuple:
            raise MalformedError("a tensor subclass has no class or no arguments")
        if function is self._wrapper:
            return make_record(kind, args, state)
        if not any(function is allowed for allowed in self._tensors):
            raise RefusedError(getattr(function, "origin", None) or type(function).__name__, "rebuilds a tensor by")
        tensor: TensorRecord | Record = function(*args)
        return tensor if kind.kind in _PLAIN_TENSORS else make_record(kind, (tensor,), state)


_PLAIN_TENSORS = frozenset(("Tensor", "Parameter", "Buffer"))


class _GetAttribute(Constructor):
    """``getattr``, understood for one pair of arguments only."""

    __slots__ = ()

    def __call__(self, owner: Any, name: Any) -> SealedType:
        key, attribute = names.GETATTR_PAIR
        if owner is not LISTED[key] or name != attribute:
            raise RefusedError(f"builtins.getattr of {shown(name, 80)}", "calls")
        return _PROCESS_GROUP_STATE


class _Layout(Constructor):
    """``torch.serialization._get_layout``: the name it is given."""

    __slots__ = ()

    def __call__(self, name: Any) -> str:
        return _text(name, "a layout")


class _Device(Constructor):
    """``torch.device``: such as "cuda:3"."""

    __slots__ = ()

    def __call__(self, kind: Any, index: Any = None) -> str:
        return _text(kind, "a device") if index is None else f"{_text(kind, 'a device')}:{int(index)}"


class _DefaultDict(Constructor):
    """``defaultdict``, whose factory is dropped."""

    __slots__ = ()

    def __call__(self, _factory: object = None, content: Any = ()) -> Mapping:
        return Mapping(content)


class _Deque(Constructor):
    """``deque``, whose limit is dropped."""

    __slots__ = ()

    def __call__(self, content: Any = (), _limit: object = None) -> Sequence:
        return _made(Sequence, content)


class _Set(Constructor):
    """``set``: protocols below 4 call it."""

    __slots__ = ()

    def __call__(self, content: Any = ()) -> set[Any]:
        return _made(set, content)


class _FrozenSet(Constructor):
    """``frozenset``: protocols below 4 call it."""

    __slots__ = ()

    def __call__(self, content: Any = ()) -> frozenset[Any]:
        return _made(frozenset, content)


class _Complex(Constructor):
    """``complex``."""

    __slots__ = ()

    def __call__(self, real: Any, imaginary: Any = 0.0) -> complex:
        if type(real) not in (int, float) or type(imaginary) not in (int, float):
            raise MalformedError("a complex number is not made of two numbers")
        return complex(real, imaginary)


class _Bytes(Constructor):
    """``_codecs.encode``, ``bytes`` and ``bytearray``: protocol 2 spells bytes as text, one character a byte."""

    __slots__ = ("_known",)

    def __init__(self, own: Callable[[names.Name], Constructor]) -> None:
        super().__init__(own)
        self._known: dict[str, bytes] = {}

    def __call__(self, content: Any = b"", encoding: Any = "latin1") -> bytes:
        if isinstance(content, (bytes, bytearray)):
            made = bytes(content)
            taken_over(content)
            return made
        if type(content) is not str or encoding not in ("latin1", "latin-1"):
            raise MalformedError("bytes are spelt in an unknown way")
        if content not in self._known:
            self._known[content] = content.encode("latin1")
        return self._known[content]


def _made(kind: Callable[[Iterable[Any]], _Collection], content: Any) -> _Collection:
    if not isinstance(content, (list, tuple, set, frozenset)):
        raise MalformedError("a collection is not made from a list")
    made = kind(content)
    taken_over(content)
    return made


def _text(value: Any, what: str) -> str:
    if type(value) is not str:
        raise MalformedError(f"{what} is not a text")
    return value


def dtype_name(torch_name: str) -> str:
    """The safetensors name of a torch dtype; torch's own where safetensors has none."""
    known = BY_TORCH_NAME.get(torch_name)
    return known.name if known else torch_name


_SIZE = ("torch", "Size")
_V2 = ("torch._utils", "_rebuild_tensor_v2")

CONSTRUCTORS: dict[names.Name, type[Constructor]] = {
    _SIZE: _Size,
    _V2: _RebuildTensor,
    ("torch._utils", "_rebuild_tensor"): _RebuildTensor,
    ("torch._utils", "_rebuild_tensor_v3"): _RebuildTensorV3,
    ("torch._utils", "_rebuild_wrapper_subclass"): _RebuildWrapper,
    ("torch._utils", "_rebuild_parameter"): _RebuildParameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _RebuildParameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _RebuildFromType,
    ("torch.serialization", "_get_layout"): _Layout,
    ("torch", "device"): _Device,
    ("collections", "defaultdict"): _DefaultDict,
    ("collections", "deque"): _Deque,
    ("builtins", "set"): _Set,
    ("builtins", "frozenset"): _FrozenSet,
    ("builtins", "complex"): _Complex,
    ("builtins", "bytearray"): _Bytes,
    ("builtins", "bytes"): _Bytes,
    ("_codecs", "encode"): _Bytes,
    names.GETATTR: _GetAttribute,
}
"""The listed functions; each pickle makes its own instances."""

STORAGE_DTYPES: dict[names.Name, str | None] = {
    (module, kind): name and dtype_name(name)
    for module in names.STORAGE_MODULES
    for kind, name in names.STORAGE_DTYPES.items()
}
"""The storage classes and their dtypes as ``Storage.dtype`` spells them."""

LISTED: dict[names.Name, SealedType | DType | type[Mapping]] = {
    ("collections", "OrderedDict"): Mapping,
    ("collections", "Counter"): Mapping,
    **{key: record_class(key, names.KINDS.get(key, key[1])) for key in names.RECORDS},
    **{key: record_class(key, names.KINDS.get(key, key[1]), called=True) for key in names.CALLED_RECORDS},
    **{key: record_class(key, key[1]) for key in STORAGE_DTYPES},
    **{
        ("torch", name): DType(plain, dtype_name(plain))
        for name in names.DTYPES
        for plain in (names.DTYPE_SYNONYMS.get(name, name),)
    },
}
"""The listed classes and values; they cannot be changed, so that all pickles share them."""

_PROCESS_GROUP_STATE = record_class((".".join(names.GETATTR_PAIR[0]), names.GETATTR_PAIR[1]), "ProcessGroupState")
