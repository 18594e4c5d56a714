"""The flags that several commands share: those of a conversion, and those that lead to a service."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import click

Command = Callable[..., int]
Flag = Callable[[Command], Command]
"""What click's decorators are: they note a parameter on the function that they are given."""

source = click.argument("source", help="Folder or URL of the checkpoint.")
destination = click.argument("destination", help="Folder or URL for the model.")
source_format = click.option(
    "--from", "source_format", metavar="FORMAT", help="Format of the source, if detection can't tell."
)
config_dir = click.option("--config", "config_dir", metavar="FOLDER", help="Where config.json and the tokenizer are.")
step = click.option("--step", type=int, metavar="N", help="Which of several checkpoints in a run folder.")
assignments = click.option(
    "-o", "--option", "option", multiple=True, metavar="NAME=VALUE", help="Any option; may be repeated."
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
wait = click.option("--wait", is_flag=True, help="Wait for the end and show progress.")
labels = click.option(
    "--label", "label", multiple=True, metavar="NAME=VALUE", help="A label of each job; may be repeated."
)

# In the order of the help; all are fields of ``ConvertOptions`` but the last.
_CONVERSION: tuple[Flag, ...] = (
    source_format,
    click.option("--to", "target_format", metavar="FORMAT", help="Format of the result. [default: hf]"),
    click.option("--dtype", metavar="TYPE", help="float32, bfloat16 or float16. [default: as the source]"),
    click.option(
        "--quantization",
        metavar="SCHEME",
        help="fp8-block-128, fp8-dynamic, int8-w8a8 or int4-w4a16-g128. [default: none]",
    ),
    click.option(
        "--ignore", multiple=True, metavar="MODULE", help="What not to quantise: a name or re:REGEX; may be repeated."
    ),
    click.option("--max-shard-size", metavar="SIZE", help="Size of an output file. [default: 5GB]"),
    config_dir,
    click.option("--mapping", metavar="FILE", help="Rules of your own for names, in JSON or YAML."),
    click.option("--lora", metavar="HOW", help="An adapter: separate or merge. [default: separate]"),
    step,
    click.option("--overwrite", is_flag=True, help="Replace what is at the destination."),
    click.option("--memory", metavar="SIZE", help="Memory for parts under way. [default: 2GiB]"),
    click.option("--verify", metavar="LEVEL", help="none, digests, or reread the result. [default: digests]"),
    assignments,
)

_SERVICE: tuple[Flag, ...] = (
    click.option(
        "--server",
        default="http://127.0.0.1:8000",
        metavar="URL",
        envvar="UNSHARD_SERVER",
        show_envvar=True,
        show_default=True,
        help="Where the service listens.",
    ),
    click.option("--token", metavar="TOKEN", envvar="UNSHARD_TOKEN", show_envvar=True, help="Access token."),
    as_json,
)


def conversion(command: Command) -> Command:
    """Give a command the flags of a conversion; it gets them gathered, as its parameter ``options``."""

    @functools.wraps(command)
    def with_options(**given: Any) -> int:
        from service.cli.options import gather  # noqa: PLC0415 - what only prints help loads little

        flagged = {name: given.pop(name) for name in names}
        return command(**given, options=gather(flagged, flagged["option"]))

    names = _names(_CONVERSION)
    return _with(_CONVERSION, with_options)


def service(command: Command) -> Command:
    """Give a command the flags that lead to a service; it gets them as its parameters ``at`` and ``as_json``."""

    @functools.wraps(command)
    def with_endpoint(server: str, token: str | None, **given: Any) -> int:
        from service.cli.remote import Endpoint  # noqa: PLC0415

        return command(**given, at=Endpoint(server, token))

    return _with(_SERVICE, with_endpoint)


def _with(flags: tuple[Flag, ...], command: Command) -> Command:
    """The command with the flags, in their order: click lists what is applied last first."""
    return functools.reduce(lambda function, flag: flag(function), reversed(flags), command)


def _names(flags: tuple[Flag, ...]) -> tuple[str, ...]:
    def command() -> int:
        return 0

    return tuple(str(parameter.name) for parameter in click.command(_with(flags, command)).params)
