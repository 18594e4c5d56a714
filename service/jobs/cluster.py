"""The Ray cluster that conversions run on: started in the background, so that the API answers at once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from service.settings import Settings
from workers.convert import Result, convert
from workers.errors import UnshardError
from workers.events import Observer
from workers.options import ConvertOptions

RETRY_S = 15.0
CLOSE_TIMEOUT_S = 10.0
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Controls:
    """How whoever runs a conversion hears of it and stops it; see ``workers.convert.convert``."""

    observer: Observer
    cancel: threading.Event
    attempt: str
    may_commit: Callable[[], None]
    """Called right before the commit; raises to prevent it."""

    def arguments(self) -> dict[str, Any]:
        """As ``convert`` takes them."""
        return {
            "observer": self.observer,
            "cancel": self.cancel,
            "attempt": self.attempt,
            "may_commit": self.may_commit,
        }


class Conversions(Protocol):
    """What carries conversions out."""

    def run(self, source: str, destination: str, options: ConvertOptions, controls: Controls) -> Result:
        """Convert, or raise an ``UnshardError``."""

    def start(self) -> None:
        """Get ready, in the background."""

    def state(self) -> tuple[str, str]:
        """``starting``, ``ok`` or ``failed``, and a word on it."""

    def describe(self) -> list[dict[str, Any]]:
        """The workers and what each does now."""

    def close(self) -> None:
        """Let go of everything."""


class GivenConversions:
    """Conversions by a function that stands in for ``convert``; there is nothing to wait for."""

    def __init__(self, function: Callable[..., Result]) -> None:
        self._function = function

    def start(self) -> None:
        pass

    def state(self) -> tuple[str, str]:
        return ("ok", "in this process")

    def describe(self) -> list[dict[str, Any]]:
        return []

    def run(self, source: str, destination: str, options: ConvertOptions, controls: Controls) -> Result:
        return self._function(source, destination, options, **controls.arguments())

    def close(self) -> None:
        pass


class RayConversions:
    """Conversions by the actors of a Ray cluster that all jobs share."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._engine: Any = None
        self._state = ("starting", "waiting for the cluster")
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._connect, name="ray-start", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def state(self) -> tuple[str, str]:
        return self._state

    def describe(self) -> list[dict[str, Any]]:
        return list(self._engine.describe()) if self._state[0] == "ok" else []

    def run(self, source: str, destination: str, options: ConvertOptions, controls: Controls) -> Result:
        return convert(source, destination, options, engine=self._engine, **controls.arguments())

    def close(self) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(CLOSE_TIMEOUT_S)

    def _connect(self) -> None:
        # Late: ray takes seconds to import, and the API should answer meanwhile.
        from workers.engines.ray_engine import RayEngine  # noqa: PLC0415
        from workers.engines.ray_pool import PoolOptions  # noqa: PLC0415

        settings = self._settings
        options = PoolOptions(settings.ray_address, settings.mergers, settings.merger_cpus, settings.merger_gpus)
        while not self._closed.is_set():
            engine = RayEngine(options)
            try:
                engine.start()
            except UnshardError as error:
                self._fail(f"{error.message}. {error.hint}".strip())
            except Exception:
                log.exception("Ray did not start")
                self._fail("Ray did not start: the service's log has the details")
            else:
                self._engine, self._state = engine, ("ok", settings.ray_address or "embedded")
                log.info("Ray is ready")
                # Linux kills an embedded cluster with the thread that started it, so this one stays to the end.
                self._closed.wait()
                engine.close()
                return
            self._closed.wait(RETRY_S)

    def _fail(self, detail: str) -> None:
        log.warning("Ray is not ready: %s", detail)
        self._state = ("failed", detail)
