"""The flags that several commands share: those of a conversion, and those that lead to a service."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Annotated, Any, get_type_hints

import typer

from workers.options import ConvertOptions

Source = Annotated[str, typer.Argument(metavar="SOURCE", help="Folder or URL of the checkpoint.")]
Destination = Annotated[str, typer.Argument(metavar="DESTINATION", help="Folder or URL for the model.")]
From = Annotated[
    str | None, typer.Option("--from", metavar="FORMAT", help="Format of the source, if detection can't tell.")
]
To = Annotated[str | None, typer.Option("--to", metavar="FORMAT", help="Format of the result. [default: hf]")]
Dtype = Annotated[
    str | None, typer.Option(metavar="TYPE", help="float32, bfloat16 or float16. [default: as the source]")
]
Quantization = Annotated[
    str | None,
    typer.Option(metavar="SCHEME", help="fp8-block-128, fp8-dynamic, int8-w8a8 or int4-w4a16-g128. [default: none]"),
]
Ignore = Annotated[
    list[str] | None,
    typer.Option("--ignore", metavar="MODULE", help="What not to quantise: a name or re:REGEX; may be repeated."),
]
ShardSize = Annotated[str | None, typer.Option(metavar="SIZE", help="Size of an output file. [default: 5GB]")]
Config = Annotated[
    str | None, typer.Option("--config", metavar="FOLDER", help="Where config.json and the tokenizer are.")
]
Mapping = Annotated[
    str | None, typer.Option("--mapping", metavar="FILE", help="Rules of your own for names, in JSON or YAML.")
]
Lora = Annotated[str | None, typer.Option(metavar="HOW", help="An adapter: separate or merge. [default: separate]")]
Step = Annotated[int | None, typer.Option(metavar="N", help="Which of several checkpoints in a run folder.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what is at the destination.")]
Memory = Annotated[str | None, typer.Option(metavar="SIZE", help="Memory for parts under way. [default: 2GiB]")]
Verify = Annotated[
    str | None, typer.Option(metavar="LEVEL", help="none, digests, or reread the result. [default: digests]")
]
Assignments = Annotated[
    list[str] | None, typer.Option("-o", "--option", metavar="NAME=VALUE", help="Any option; may be repeated.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]
Server = Annotated[
    str, typer.Option("--server", metavar="URL", envvar="UNSHARD_SERVER", help="Where the service listens.")
]
Token = Annotated[str | None, typer.Option("--token", metavar="TOKEN", envvar="UNSHARD_TOKEN", help="Access token.")]
Wait = Annotated[bool, typer.Option("--wait", help="Wait for the end and show progress.")]
LabelFlags = Annotated[
    list[str] | None, typer.Option("--label", metavar="NAME=VALUE", help="A label of each job; may be repeated.")
]
DEFAULT_SERVER = "http://127.0.0.1:8000"


def _conversion(  # noqa: PLR0917 - one for each flag
    source_format: From = None,
    target_format: To = None,
    dtype: Dtype = None,
    quantization: Quantization = None,
    ignore: Ignore = None,
    max_shard_size: ShardSize = None,
    config_dir: Config = None,
    mapping: Mapping = None,
    lora: Lora = None,
    step: Step = None,
    overwrite: Overwrite = False,
    memory: Memory = None,
    verify: Verify = None,
    option: Assignments = None,
) -> None:
    """The flags of a conversion, in the order of the help; all are fields of ``ConvertOptions`` but the last."""


NO_OPTIONS = ConvertOptions()
"""Where Python asks for a default; a command that takes options is always given them."""


def takes_options(command: Callable[..., int]) -> Callable[..., int]:
    """Give a command the flags of a conversion, in place of its parameter ``options``: it gets them gathered."""
    flags = inspect.signature(_conversion).parameters
    kinds = get_type_hints(_conversion, include_extras=True)
    own_kinds = get_type_hints(command, include_extras=True)
    parameters: list[inspect.Parameter] = []
    for name, parameter in inspect.signature(command).parameters.items():
        if name == "options":
            parameters += [flag.replace(annotation=kinds[flag.name]) for flag in flags.values()]
        else:
            parameters.append(parameter.replace(annotation=own_kinds[name]))

    @functools.wraps(command)
    def with_options(**given: Any) -> int:
        from service.cli.options import gather  # noqa: PLC0415 - what only prints help loads little

        flagged = {name: given.pop(name) for name in flags}
        return command(**given, options=gather(flagged, flagged["option"]))

    with_options.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    with_options.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return with_options
