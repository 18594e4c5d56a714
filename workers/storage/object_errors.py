"""What obstore says when a store fails, told in our errors.

The raw text may hold signed URLs and echoes of the request, so that only the status, the store's own code and a
first line without queries are passed on, and the original is not chained.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from obstore.exceptions import BaseError, PermissionDeniedError, UnauthenticatedError

from workers.errors import IncompleteCheckpoint, InvalidOption, StorageError, UnshardError

_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3} [A-Za-z ]+)")
_QUERY = re.compile(r"\?[^\s,\"']*")
_NO_BUCKET = ("NoSuchBucket", "ContainerNotFound", "specified bucket does not exist")
_REFUSED = ("401 Unauthorized", "403 Forbidden")
_NO_CREDENTIALS = ("169.254.169.254", "metadata.google.internal", "MissingAccessKey", "MissingSecretAccessKey")
_OUT_OF_RANGE = ("416 Range Not Satisfiable", "StartTooLarge")


@dataclass(frozen=True, slots=True)
class ErrorTeller:
    """Knows whose settings and which secrets the errors of one store are about."""

    profile: str | None
    secrets: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"ErrorTeller({self.profile!r})"

    @contextmanager
    def told(self, place: str) -> Iterator[None]:
        """Turn obstore's errors about a URL into ours; let everything else through."""
        try:
            yield
        except (BaseError, FileNotFoundError, ValueError, OSError) as error:
            raise self.translate(error, place) from None

    def translate(self, error: Exception, place: str) -> UnshardError:
        """The error of ours that says what happened and what the user can do."""
        text = str(error)
        if any(sign in text for sign in _NO_BUCKET):
            hint = "Check the name of the bucket, and the endpoint and region of the profile."
            return StorageError(f"{place}: there is no such bucket", file=place, hint=hint)
        if isinstance(error, FileNotFoundError):
            hint = "Check the path, and that the checkpoint was copied completely."
            return IncompleteCheckpoint(f"{place} is missing", file=place, hint=hint)
        problem, hint = self._explain(error, text)
        return StorageError(f"{place}: {problem}", file=place, hint=hint)

    def misconfigured(self, error: Exception, place: str) -> InvalidOption:
        """The error of ours for settings that make no client."""
        message = f"{place} cannot be opened: {self.scrub(_first_line(str(error)))}"
        return InvalidOption(message, hint=f"Complete {self._settings()}.")

    def _settings(self) -> str:
        return f"profile {self.profile!r}" if self.profile else "the environment, since no profile was named"

    def _explain(self, error: Exception, text: str) -> tuple[str, str]:
        whose = self._settings()
        if any(sign in text for sign in _NO_CREDENTIALS):
            return "no credentials were found", f"Name a storage profile, or complete the credentials of {whose}."
        if isinstance(error, PermissionDeniedError | UnauthenticatedError) or any(sign in text for sign in _REFUSED):
            return f"the store refused access{self._code(text)}", f"Check the credentials and rights of {whose}."
        if "builder error" in text:
            return (
                "the endpoint is http:// but only https:// is allowed",
                f"Set allow_http in the profile, or AWS_ALLOW_HTTP; now settings come from {whose}.",
            )
        if "error sending request" in text or "timed out" in text.lower() or "TimedOut" in text:
            return "the endpoint cannot be reached", f"Check the network and the endpoint of {whose}."
        return f"the store failed{self._code(text)}: {self.scrub(_first_line(text))}", f"Check {whose}."

    def _code(self, text: str) -> str:
        found = [match[1].strip() for match in (_STATUS.search(text), _CODE.search(text)) if match]
        return f" ({', '.join(found)})" if found else ""

    def scrub(self, text: str) -> str:
        """The text without queries (which may be signatures) and without this store's secrets."""
        text = _QUERY.sub("", text)
        for secret in self.secrets:
            text = text.replace(secret, "***")
        return text


def is_out_of_range(error: Exception) -> bool:
    """Whether a ranged GET failed because the range starts behind the end of the object."""
    return any(sign in str(error) for sign in _OUT_OF_RANGE)


def _first_line(text: str) -> str:
    return text.partition("\n")[0].partition("Server returned")[0].strip(" -")[:300]
