"""A user's mapping as text: JSON or YAML, from a file or given as it is, to one canonical JSON text.

The text is untrusted: its size is bounded, YAML is read without aliases, tags and duplicate keys, and nothing in it
is ever called.
"""

from __future__ import annotations

import json
from pathlib import PurePosixPath
from typing import Any

from workers.errors import InvalidOption
from workers.storage import FolderAddress, open_folder

LARGEST_BYTES = 1 << 20
"""A table for a large family has some ten thousand; a service takes no larger body than this either."""

INLINE = "mapping"
"""What messages call a mapping that was given as it is."""

_YAML = (".yaml", ".yml")
_PLAIN = (str, int, float, bool, type(None))
_DEEPEST = 32


def is_inline(option: str) -> bool:
    """Whether the option's text is the mapping itself, a JSON object, and not the path of a file."""
    return option.lstrip().startswith("{")


def load(option: str, profile: str | None = None) -> tuple[dict[str, Any], str]:
    """The object that the option ``mapping`` stands for, and its file for messages; ``InvalidOption``.

    ``profile`` is the storage profile of the source, with which a file is read.
    """
    return (document(option, INLINE), INLINE) if is_inline(option) else (_read(option, profile), option)


def to_text(content: dict[str, Any]) -> str:
    """An object in the form in which it enters the plan."""
    return json.dumps(content, ensure_ascii=False, separators=(",", ":"))


def document(text: str, name: str) -> dict[str, Any]:
    """The object that a text holds: JSON by the ending of its file's ``name`` or its first letter, else YAML."""
    if len(text.encode(errors="surrogatepass")) > LARGEST_BYTES:
        raise _fault(name, f"has more than {LARGEST_BYTES} bytes", f"at most {LARGEST_BYTES} bytes")
    try:
        is_yaml = name.lower().endswith(_YAML) or not (name.lower().endswith(".json") or is_inline(text))
        content = _yaml(text) if is_yaml else json.loads(text, object_pairs_hook=_once)
        _check_plain(content, "", _DEEPEST)
    except _Refused as error:
        raise _fault(name, str(error), "a JSON or YAML object of plain values") from None
    except RecursionError:
        raise _fault(name, "is nested too deeply", f"at most {_DEEPEST} levels") from None
    except ValueError as error:
        raise _fault(name, f"is not JSON: {error}", "a JSON object") from None
    if not isinstance(content, dict):
        raise _fault(name, f"holds a {type(content).__name__}, not an object", "an object with schema and rules")
    return content


class _Refused(Exception):
    """Something that a mapping can't hold; the text says what and where."""


def _read(option: str, profile: str | None) -> dict[str, Any]:
    address, name = FolderAddress(option, profile).split()
    folder = open_folder(address)
    try:
        entry = folder.stat(name)
        if entry is None and folder.subfolder(name).exists():
            raise InvalidOption(
                f"{option}, which the option mapping names, is a folder",
                file=option,
                expected="a file with a mapping in JSON or YAML",
                found="a folder",
                hint="Name the file in it.",
            )
        if entry is None:
            raise InvalidOption(
                f"there is no file {option}, which the option mapping names",
                file=option,
                expected="a mapping in JSON or YAML",
                found="nothing of that name",
                hint="Check the spelling; a relative path counts from where the command runs.",
            )
        if entry.size_bytes > LARGEST_BYTES:
            raise _fault(option, f"has {entry.size_bytes} bytes", f"at most {LARGEST_BYTES} bytes")
        return document(folder.read(name).decode("utf-8-sig"), PurePosixPath(name).name)
    except UnicodeDecodeError as error:
        raise _fault(option, f"is not UTF-8 text: {error}", "UTF-8 text") from None
    finally:
        folder.close()


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    for key, value in pairs:
        if key in made:
            raise _Refused(f"has the key {key[:80]!r} twice in one object")
        made[key] = value
    return made


def _yaml(text: str) -> Any:
    import yaml  # noqa: PLC0415 - only for YAML, and not on the way of those who have no mapping

    class Loader(yaml.SafeLoader):
        """Without aliases, with which a small file can stand for a huge one, and without duplicate keys."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.events.AliasEvent):
                line = self.peek_event().start_mark.line + 1  # type: ignore[no-untyped-call]
                raise _Refused(f"has an alias in line {line}: write the value out instead")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:  # noqa: FBT001, FBT002 - PyYAML's
            keys = [self.construct_object(key, deep=True) for key, _ in node.value]
            pairs = [(key, None) for key in keys if isinstance(key, str)]
            _once(pairs)
            return super().construct_mapping(node, deep)

    try:
        return yaml.load(text, Loader)  # noqa: S506 - a SafeLoader with less
    except yaml.YAMLError as error:
        raise _Refused(f"is not YAML: {' '.join(str(error).split())}") from None
    except (
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        OverflowError,
    ) as error:  # PyYAML's own, for odd scalars and keys
        raise _Refused(f"is not YAML for a mapping: {error}") from None


def _check_plain(value: Any, path: str, deepest: int) -> None:
    """Refuse what JSON can't hold: YAML has dates, sets, bytes, keys that aren't text, infinities."""
    if deepest == 0:
        raise _Refused(f"is nested too deeply at {path}")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str) or not _is_unicode(key):
                raise _Refused(f"has the key {str(key)[:80]!r}, which is no text, at {path or 'the top'}")
            _check_plain(inner, f"{path}.{key}" if path else key, deepest - 1)
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            _check_plain(inner, f"{path}[{number}]", deepest - 1)
    elif isinstance(value, str) and not _is_unicode(value):
        raise _Refused(f"has a text that is not valid Unicode at {path}")
    elif type(value) not in _PLAIN:
        raise _Refused(f"has a {type(value).__name__} at {path}: put it in quotes if it is a text")


def _is_unicode(text: str) -> bool:
    return not any("\ud800" <= character <= "\udfff" for character in text)


def _fault(name: str, what: str, expected: str) -> InvalidOption:
    return InvalidOption(
        f"the mapping {name} {what}",
        file=name,
        expected=expected,
        found=what,
        hint="docs/mapping.md says how a mapping is written.",
    )
