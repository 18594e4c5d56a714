"""What an unpickled checkpoint is made of, beside plain data: inert records.

Nothing here runs anything of a checkpoint or looks up a real module. Classes that a pickle can name
are guarded against being changed by it (BUILD sets attributes on whatever it is given). This module must not
interpret records: what a mesh or a placement means is the business of the formats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, NoReturn, Self, cast

from workers.pickle_names import Name

LARGEST_NUMBER = (1 << 63) - 1


class RefusedError(Exception):
    """A global that must not be mentioned or called; ``pickles`` adds the file and raises ``UnsafePickle``."""

    def __init__(self, what: str, verb: str) -> None:
        super().__init__(what)
        self.what = what
        self.verb = verb


class MalformedError(Exception):
    """The pickle contradicts what torch writes; ``pickles`` adds the file and raises ``CorruptFile``."""


class Storage(NamedTuple):
    """A reference to a storage: ``key`` names it in its file, ``numel`` counts elements of ``dtype``.

    ``dtype`` is a safetensors name, torch's own name where safetensors has none, or None for an untyped storage,
    whose ``numel`` counts bytes. ``view_offset`` is not 0 only in very old files, whose storages could be views.
    A named tuple, as ``TensorRecord``: there is one for each of a million tensors.
    """

    key: str
    dtype: str | None
    numel: int
    view_offset: int = 0


class TensorRecord(NamedTuple):
    """A tensor on a storage, counted in elements. ``shape`` and ``stride`` are equally long and not negative.

    ``dtype`` is a safetensors name, or torch's own name where safetensors has none. ``conjugate`` and ``negative``
    say that the value is the conjugate or the negative of what is stored. That the storage exists and is long
    enough is for ``torch_file.resolve`` to check.
    """

    storage: Storage
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: str
    conjugate: bool = False
    negative: bool = False


class DType(NamedTuple):
    """A torch dtype that occurs as a value: torch's name, and the safetensors name or torch's where there is none."""

    torch_name: str
    name: str


class SealedType(type):
    """The type of classes that a pickle can name: a call is refused unless listed, and nothing can be set."""

    kind: str
    origin: str
    called: bool

    def __call__(cls, *args: object) -> Any:
        if not cls.called:
            raise RefusedError(cls.origin, "calls")
        return make_record(cls, args, None)

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise MalformedError(f"it sets {name} on the class {cls.origin}")

    def __delattr__(cls, name: str) -> NoReturn:
        raise MalformedError(f"it deletes {name} of the class {cls.origin}")


class Record(metaclass=SealedType):
    """An object that stays closed: what it was made with (``args``) and what it was given (``state``).

    ``kind`` is the class's name, the same for every torch generation; for a class on no list it is "module.name".
    ``state`` is a dict of attributes for most classes, otherwise whatever the pickle says. Records compare by
    identity.
    """

    __slots__ = ("args", "state")
    kind: ClassVar[str] = "Record"
    origin: ClassVar[str] = "Record"
    called: ClassVar[bool] = False
    args: tuple[Any, ...]
    state: Any

    def __new__(cls, *args: object) -> Self:
        self = object.__new__(cls)
        self.args = args
        self.state = None
        return self

    def __setstate__(self, state: object) -> None:
        if type(state) is tuple and len(state) == 2 and type(state[1]) is dict:
            # How copyreg hands over slots: (attributes or None, slots).
            attributes, slots = state
            state = {**attributes, **slots} if attributes else slots
        self.state = state

    def __repr__(self) -> str:
        return f"<{self.kind}>"

    def get(self, name: str, default: Any = None) -> Any:
        """Read one attribute from the state, or the default where the state has no such attribute."""
        return self.state.get(name, default) if isinstance(self.state, dict) else default


class Mapping(dict[Any, Any]):
    """A dict of a class of its own (OrderedDict, defaultdict, Counter); its attributes are dropped.

    A pickle gets this class itself in its hands, to save a call for each tensor. It cannot change it: what BUILD
    finds on the class is ``__setstate__``, which fails without an instance.
    """

    __slots__ = ()

    def __init__(self, content: Any = None) -> None:
        """Take the content over: nobody else can have it any more."""
        if content:
            super().__init__(content)
            taken_over(content)

    def __setstate__(self, state: object) -> None:
        """Drop the state: torch keeps nothing but module versions there."""


class Sequence(list[Any]):
    """A deque; its attributes are dropped."""

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        """Drop the state."""


_new_record = cast("Callable[[SealedType], Record]", object.__new__)


def make_record(kind: SealedType, args: tuple[Any, ...], state: object) -> Record:
    """Make the record that stands for a call, or for a tensor subclass with its state."""
    record = _new_record(kind)
    record.args = args
    record.__setstate__(state)
    return record


def record_class(key: Name, kind: str, *, called: bool = False) -> SealedType:
    """Make the class that stands for a global."""
    origin = ".".join(key)
    return SealedType("Record", (Record,), {"__slots__": (), "kind": kind, "origin": origin, "called": called})


def taken_over(content: Any) -> None:
    """Empty what another collection was made from.

    A pickle makes such a list for the one collection. Otherwise it could make any number of large ones out of it, each
    with a few bytes, and be at that for ever.
    """
    if isinstance(content, (list, dict, set, bytearray)):
        content.clear()


def is_count(value: object) -> bool:
    """Whether a value of a pickle can be a size, an offset or a stride."""
    return type(value) is int and 0 <= value <= LARGEST_NUMBER
