"""Every error that a user can meet, as one tree.

UnshardError
├── InputError                    exit status 1: the checkpoint or the options are at fault
│   ├── UnknownFormat             no reader recognises the source
│   ├── AmbiguousSource           several checkpoints (formats, steps, world sizes) and nothing that decides
│   ├── IncompleteCheckpoint      ranks, stages or files are missing
│   ├── CorruptFile               a file is truncated, damaged or not what its name says
│   ├── UnsafePickle              a pickle refers to something that is not on the list of inert names
│   ├── GeometryMismatch          shapes, pieces, dtypes or the config contradict each other
│   ├── UnmappedTensor            no rule says what becomes of a tensor
│   └── InvalidOption             an option has an impossible value or lacks a needed partner
├── DestinationError              exit status 3: the destination or the machine is at fault
│   ├── DestinationNotEmpty       something of the user's is already there
│   ├── DestinationBusy           another live conversion owns the destination
│   ├── InsufficientResources     disk, memory or cluster are too small: needed and available are named
│   └── StorageError              reading or writing files or objects failed
├── VerificationFailed            exit status 1: two models, or a model and its manifest, differ
├── Cancelled                     exit status 130: stopped on request; a later run resumes
└── InternalError                 exit status 70: a fault of unshard itself

An error says what is wrong, with the names and numbers, and its ``hint`` says what the user can do.
"""

from __future__ import annotations


class UnshardError(Exception):
    """Base of all errors that unshard raises on purpose."""

    code = "error"
    exit_status = 1

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        file: str | None = None,
        tensor: str | None = None,
        expected: str | None = None,
        found: str | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.file = file
        self.tensor = tensor
        self.expected = expected
        self.found = found

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the keyword arguments when the error travels from an actor to the driver."""
        return (_rebuild, (type(self), self.message, self.details(), self.hint))

    def details(self) -> dict[str, str]:
        """The structured parts that are known, for JSON output and the API."""
        parts = {"file": self.file, "tensor": self.tensor, "expected": self.expected, "found": self.found}
        return {name: value for name, value in parts.items() if value is not None}


def _rebuild(kind: type[UnshardError], message: str, details: dict[str, str], hint: str) -> UnshardError:
    return kind(message, hint=hint, **details)


class InputError(UnshardError):
    """The checkpoint or the options are at fault."""

    code = "input"


class UnknownFormat(InputError):
    """No reader recognises the source."""

    code = "unknown-format"


class AmbiguousSource(InputError):
    """Several checkpoints could be meant and nothing decides."""

    code = "ambiguous-source"


class IncompleteCheckpoint(InputError):
    """Ranks, stages or files are missing."""

    code = "incomplete-checkpoint"


class CorruptFile(InputError):
    """A file is truncated, damaged or not what its name says."""

    code = "corrupt-file"


class UnsafePickle(InputError):
    """A pickle refers to something that is not on the list of inert names; nothing of it was executed."""

    code = "unsafe-pickle"


class GeometryMismatch(InputError):
    """Shapes, pieces, dtypes or the config contradict each other."""

    code = "geometry-mismatch"


class UnmappedTensor(InputError):
    """No rule says what becomes of a tensor."""

    code = "unmapped-tensor"


class InvalidOption(InputError):
    """An option has an impossible value or lacks a needed partner."""

    code = "invalid-option"


class DestinationError(UnshardError):
    """The destination or the machine is at fault."""

    code = "destination"
    exit_status = 3


class DestinationNotEmpty(DestinationError):
    """Something of the user's is already at the destination."""

    code = "destination-not-empty"


class DestinationBusy(DestinationError):
    """Another live conversion owns the destination."""

    code = "destination-busy"


class InsufficientResources(DestinationError):
    """Disk, memory or cluster are too small."""

    code = "insufficient-resources"


class StorageError(DestinationError):
    """Reading or writing files or objects failed."""

    code = "storage"


class VerificationFailed(UnshardError):
    """Two models, or a model and its manifest, differ."""

    code = "verification-failed"


class Cancelled(UnshardError):
    """The work was stopped on request; a later run resumes it."""

    code = "cancelled"
    exit_status = 130


class InternalError(UnshardError):
    """A fault of unshard itself."""

    code = "internal"
    exit_status = 70
