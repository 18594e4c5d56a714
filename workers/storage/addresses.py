"""Addresses of folders and the one check that every path inside a folder goes through.

Pure text work: nothing here touches a disk or a network. An address never holds a credential; a URL that tries to
bring one is refused.
"""

# Paths are plain text here: a pathlib object per call costs more than the call itself.
# ruff: noqa: PTH100, PTH111

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import lru_cache
from urllib.parse import unquote

from workers.errors import InvalidOption

SCHEMES = ("file", "s3", "gs", "az", "memory")

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.\-]*)://(.*)", re.DOTALL)
_SCHEME_WITHOUT_SLASHES = re.compile(rf"({'|'.join(SCHEMES)}):", re.IGNORECASE)
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._\-]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")


@dataclass(frozen=True, slots=True)
class FolderAddress:
    """Where a folder is, without any secret: what an actor needs to open it for itself.

    ``url`` is a path or a URL; ``profile`` names a server-side storage profile, None means the environment.
    ``roots``, when given, are the only trees of a file system that the folder and its links may lead into.
    """

    url: str
    profile: str | None = None
    roots: tuple[str, ...] = ()

    def child(self, path: str) -> FolderAddress:
        """The address of a folder below."""
        path = check_path(path)
        return FolderAddress(f"{self.url.rstrip('/')}/{path}", self.profile, self.roots) if path else self

    def split(self) -> tuple[FolderAddress, str]:
        """The folder that holds the last name of the address, and that name: for an address that is a file's."""
        location = Location.parse(self.url)
        parent, _, name = location.path.rpartition("/")
        if not name:
            raise InvalidOption(f"{self.url} names no file")
        return FolderAddress(Location(location.scheme, location.bucket, parent).url, self.profile, self.roots), name


@dataclass(frozen=True, slots=True)
class Location:
    """An address taken apart. ``path`` is absolute for ``file``, else a prefix without slashes at its ends."""

    scheme: str
    bucket: str
    path: str

    @property
    def url(self) -> str:
        """The canonical spelling: a plain absolute path for files, else a URL without a slash at its end."""
        if self.scheme == "file":
            return self.path or "/"
        return f"{self.scheme}://{self.bucket}" + (f"/{self.path}" if self.path else "")

    def is_inside(self, other: Location) -> bool:
        """Whether this is the other location or lies below it."""
        if (self.scheme, self.bucket) != (other.scheme, other.bucket):
            return False
        base = other.path.rstrip("/")
        return self.path == base or self.path.startswith(f"{base}/") or not base

    @classmethod
    def parse(cls, text: str) -> Location:
        """Read a path or URL; ``InvalidOption`` says what is wrong with it.

        Only plain paths expand ``~``. Only ``file`` URLs decode ``%20`` and the like: the keys of a store are
        taken literally, as its own tools do.
        """
        if not text:
            raise InvalidOption("'' is not a path or URL", hint="A variable of the shell may not be set.")
        if _CONTROL.search(text):
            raise _control_character(text)
        match = _URL.fullmatch(text)
        if match is None:
            return _parse_plain(text)
        scheme, rest = match[1].lower(), match[2]
        if scheme not in SCHEMES:
            raise InvalidOption(
                f"storage of the kind {scheme}:// is not known ({_shown(text)!r})",
                hint=f"Use a path or one of: {', '.join(f'{known}://' for known in SCHEMES)}.",
            )
        _refuse_credentials(text, rest)
        return _parse_file(text, rest) if scheme == "file" else _parse_bucket(scheme, text, rest)


def check_path(path: str) -> str:
    """Return a path below a folder without a slash at its end, or raise ``InvalidOption``.

    Everything that a name in a checkpoint could use to leave the folder is refused: absolute paths, '.' and '..',
    empty segments, backslashes and control characters.
    """
    if not path:
        return ""
    trimmed = path.removesuffix("/")
    segments = trimmed.split("/")
    if "\\" in path or _CONTROL.search(path) or any(segment in ("", ".", "..") for segment in segments):
        raise InvalidOption(
            f"{path!r} is not a path below a folder",
            hint="Use names joined by '/', without '..', backslashes, doubled slashes or control characters.",
        )
    try:
        path.encode()
    except UnicodeEncodeError:
        raise InvalidOption(f"{path!r} is not valid Unicode and cannot be the name of a file here") from None
    return trimmed


@lru_cache(maxsize=4096)  # readers ask for ranges of the same files many thousand times
def check_file_path(path: str) -> str:
    """``check_path`` for a file: the empty path and a slash at the end are refused, too."""
    if not path or path.endswith("/"):
        raise InvalidOption(f"{path!r} names no file")
    return check_path(path)


def is_portable(name: str) -> bool:
    """Whether a name that was found somewhere can be asked for, which ``check_path`` decides."""
    try:
        return bool(check_path(name))
    except InvalidOption:
        return False


def _parse_plain(text: str) -> Location:
    if _SCHEME_WITHOUT_SLASHES.match(text):
        scheme = text.partition(":")[0].lower()
        raise InvalidOption(
            f"{text!r} is neither a path nor a URL",
            hint=f"A URL starts with {scheme}://; write ./{text} for a path with a colon in its name.",
        )
    return Location("file", "", _absolute(os.path.expanduser(text)))


def _parse_file(text: str, rest: str) -> Location:
    host, slash, path = rest.partition("/")
    if host not in ("", "localhost") or not slash:
        raise InvalidOption(f"{text!r} is not a file URL of this machine", hint="Write file:///absolute/path.")
    if "#" in path:
        raise InvalidOption(f"{text!r}: write a '#' in a file URL as %23")
    decoded = unquote(path)
    if _CONTROL.search(decoded):
        raise _control_character(text)
    return Location("file", "", _absolute(f"/{decoded}"))


def _control_character(text: str) -> InvalidOption:
    return InvalidOption(
        f"{_shown(text)!r} is not a path or URL: it holds the end of a line or another control character",
        hint="Rename the folder, or lead to it by a link with a plain name.",
    )


def _absolute(path: str) -> str:
    """Without ``.``, ``..`` and doubled slashes: POSIX lets two at the start mean something else, Linux doesn't."""
    return os.path.abspath(path).replace("//", "/", 1)


def _parse_bucket(scheme: str, text: str, rest: str) -> Location:
    bucket, _, prefix = rest.partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise InvalidOption(f"{text!r} names no bucket", hint=f"Write {scheme}://BUCKET/PREFIX.")
    return Location(scheme, bucket, check_path(prefix.strip("/")))


def _refuse_credentials(text: str, rest: str) -> None:
    if "?" in rest or "@" in rest.partition("/")[0]:
        raise InvalidOption(
            f"the URL {_shown(text)!r} carries a user, a password or a query",
            hint="Credentials and endpoints belong into a storage profile or the environment, never into a URL.",
        )


def _shown(text: str) -> str:
    """The text without the parts in which people put secrets."""
    return re.sub(r"//[^/@]*@", "//***@", text.partition("?")[0] + ("?***" if "?" in text else ""))
