"""From arguments to an exit status: the one place where exceptions become messages."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from service.cli.output import emit_json, flush, forget, say
from service.cli.problems import document, exit_status, lines, unexpected

SUCCESS, USAGE = 0, 2
BROKEN_PIPE = 141
"""What a shell reports of a program that wrote into a closed pipe: 128 + SIGPIPE."""


def run(arguments: Sequence[str]) -> int:
    """Run one command; every failure is told in plain words, or as JSON where ``--json`` was given."""
    _open_closed_streams()
    try:
        status = _run(arguments)
        flush()
    except BrokenPipeError:
        forget(sys.stdout)
        return BROKEN_PIPE
    except (Exception, KeyboardInterrupt) as error:  # noqa: BLE001 - nobody above could tell the user
        return _fail(error, as_json="--json" in arguments)
    return status


def _run(arguments: Sequence[str]) -> int:
    """Parse and call without the parser's own way of ending a program, which knows no status but 1."""
    import click  # noqa: PLC0415 - so that a failing import is told like any other failure

    from service.cli.app import app  # noqa: PLC0415

    try:
        with app.make_context("unshard", list(arguments)) as context:
            status = app.invoke(context)
    except click.exceptions.Exit as ended:
        return ended.exit_code
    return status if isinstance(status, int) else SUCCESS


def _fail(error: BaseException, *, as_json: bool) -> int:
    try:
        return _usage(error, as_json=as_json) if _is_usage(error) else _told(error, as_json=as_json)
    except BrokenPipeError:
        forget(sys.stdout)
        return BROKEN_PIPE


def _told(error: BaseException, *, as_json: bool) -> int:
    if as_json:
        emit_json(document(error))
    else:
        for line in lines(error):
            say(line, to=sys.stderr)
    if unexpected(error) and os.environ.get("UNSHARD_DEBUG"):
        sys.excepthook(type(error), error, error.__traceback__)
    flush()
    return exit_status(error)


def _is_usage(error: BaseException) -> bool:
    """Whether the parser refused the arguments; recognised by its face, which outlived several of its classes."""
    return hasattr(error, "exit_code") and hasattr(error, "format_message")


def _usage(error: Any, *, as_json: bool) -> int:
    message = error.format_message()
    if as_json:
        emit_json({"error": {"code": "usage", "message": message, "hint": "See unshard --help."}})
        return USAGE
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "unshard"
    say(f"error: {message}", to=sys.stderr)
    if path.endswith((" batch", " watch")) and "extra argument" in message:
        say("hint: Quote the pattern, so that the shell leaves it alone: '/runs/qwen/global_step_*'", to=sys.stderr)
    say(f"hint: {path} --help shows the usage", to=sys.stderr)
    return USAGE


def _open_closed_streams() -> None:
    """Whoever started this without an output (``>&-``) wants none: that is no reason to fail."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 - open to the end
