"""The commands and their flags. Each hands over to the module that does it, loaded when it runs."""
# ruff: noqa: PLC0415, PLR0917
# A command has as many arguments as it has flags, and importing late is the point here.

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from service.cli.flags import (
    DEFAULT_SERVER,
    Assignments,
    Config,
    Destination,
    From,
    Json,
    Server,
    Source,
    Step,
    Token,
    takes_options,
)
from service.cli.output import say
from workers.options import ConvertOptions

app = typer.Typer(
    name="unshard",
    help="Convert training checkpoints to Hugging Face models.",
    add_completion=False,
    # Plain help and no decorated tracebacks: rich would cost 80 ms before anything is done.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


class EngineName(StrEnum):
    """What makes the parts: threads of this process, or actors of a Ray cluster."""

    threads = "threads"
    ray = "ray"


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Show the version.")] = False,
) -> None:
    """Convert training checkpoints to Hugging Face models."""
    if version:
        from workers.manifest import program_version

        say(f"unshard {program_version()}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        say(context.get_help(), to=sys.stderr)
        raise typer.Exit(2)


@app.command()
@takes_options
def convert(
    source: Source,
    destination: Destination,
    options: ConvertOptions,
    engine: Annotated[EngineName, typer.Option(help="What makes the parts.")] = EngineName.threads,
    workers: Annotated[int | None, typer.Option(min=1, help="How many threads or Ray mergers.")] = None,
    as_json: Json = False,
) -> int:
    """Convert a checkpoint into a Hugging Face model."""
    from service.cli.converting import Request, run_convert

    return run_convert(Request(source, destination, options, engine.value, workers), as_json=as_json)


@app.command()
@takes_options
def plan(
    source: Source,
    destination: Destination,
    options: ConvertOptions,
    tensors: Annotated[bool, typer.Option("--tensors", help="One line for each tensor of the result.")] = False,
    as_json: Json = False,
) -> int:
    """Show what a conversion would do; nothing is written."""
    from service.cli.planning import run_plan

    return run_plan((source, destination), options, tensors=tensors, as_json=as_json)


@app.command()
def inspect(
    source: Source,
    tensor: Annotated[str | None, typer.Option(metavar="NAME", help="Show where this tensor's pieces lie.")] = None,
    source_format: From = None,
    config_dir: Config = None,
    step: Step = None,
    option: Assignments = None,
    as_json: Json = False,
) -> int:
    """Say what a checkpoint is; only its metadata is read."""
    given = dict(locals())
    from service.cli.inspecting import run_inspect
    from service.cli.options import gather

    return run_inspect(source, gather(given, option), tensor, as_json=as_json)


@app.command()
def verify(
    a: Annotated[str, typer.Argument(metavar="A", help="A model, or anything that convert takes.")],
    b: Annotated[str | None, typer.Argument(metavar="[B]", help="What to compare it with.")] = None,
    atol: Annotated[float, typer.Option(min=0.0, help="How far numbers may differ; 0: every bit.")] = 0.0,
    forward: Annotated[bool, typer.Option("--forward", help="Compare logits, computed by transformers.")] = False,
    as_json: Json = False,
) -> int:
    """Check a model, or compare two.

    One model is checked against its manifest, its index and its config; two are compared tensor by tensor.
    """
    if b is None and (forward or atol):
        raise typer.BadParameter("--forward and --atol compare two models: give a second one")
    from service.cli.verifying import run_verify

    return run_verify(a, b, atol=atol, forward=forward, as_json=as_json)


@app.command()
def formats(as_json: Json = False) -> int:
    """List the checkpoint formats that can be read."""
    from service.cli.inspecting import run_formats

    return run_formats(as_json=as_json)


@app.command()
def demo(
    folder: Annotated[str, typer.Option(metavar="FOLDER", help="Where the demo keeps its data.")] = ".demo",
) -> int:
    """Try everything on a small checkpoint.

    Starts a service, converts a checkpoint that ships with unshard through it and proves the result.
    """
    from service.demo import run_demo

    return run_demo(folder)


@app.command()
def serve(
    host: Annotated[str | None, typer.Option(help="Address to listen on. [default: 127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on. [default: 8000]")] = None,
    data_dir: Annotated[str | None, typer.Option(metavar="FOLDER", help="Where the service keeps its data.")] = None,
) -> int:
    """Run the service: REST API and dashboard.

    Where no flag is given, the environment's UNSHARD_* settings hold.
    """
    from service.cli.serving import run_serve

    return run_serve({"host": host, "port": port, "data_dir": data_dir})


@app.command()
@takes_options
def submit(
    source: Source,
    destination: Destination,
    options: ConvertOptions,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end and show progress.")] = False,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    as_json: Json = False,
) -> int:
    """Hand a conversion to a running service."""
    from service.cli.remote import Endpoint, run_submit

    return run_submit(Endpoint(server, token), (source, destination), options, wait=wait, as_json=as_json)


@app.command()
def jobs(
    job: Annotated[str | None, typer.Argument(metavar="[ID]", help="One job instead of the latest.")] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Stop this job.")] = False,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    as_json: Json = False,
) -> int:
    """List a service's jobs, show one, or cancel it."""
    if cancel and job is None:
        raise typer.BadParameter("--cancel needs the ID of a job")
    from service.cli.remote import Endpoint, run_jobs

    return run_jobs(Endpoint(server, token), job, cancel=cancel, as_json=as_json)
