"""The commands and their flags. Each hands over to the module that does it, loaded when it runs."""
# ruff: noqa: PLC0415, PLR0917
# A command has as many arguments as it has flags, and importing late is the point here.

from __future__ import annotations

import sys
from enum import StrEnum
from typing import Annotated

import typer

from service.cli.output import say

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
DEFAULT_SERVER = "http://127.0.0.1:8000"


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
def convert(
    source: Source,
    destination: Destination,
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
    engine: Annotated[EngineName, typer.Option(help="What makes the parts.")] = EngineName.threads,
    workers: Annotated[int | None, typer.Option(min=1, help="How many threads or Ray mergers.")] = None,
    as_json: Json = False,
) -> int:
    """Convert a checkpoint into a Hugging Face model."""
    given = dict(locals())
    from service.cli.converting import Request, run_convert
    from service.cli.options import gather

    return run_convert(Request(source, destination, gather(given, option), engine.value, workers), as_json=as_json)


@app.command()
def plan(
    source: Source,
    destination: Destination,
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
    option: Assignments = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="One line for each tensor of the result.")] = False,
    as_json: Json = False,
) -> int:
    """Show what a conversion would do; nothing is written."""
    given = dict(locals())
    from service.cli.options import gather
    from service.cli.planning import run_plan

    return run_plan((source, destination), gather(given, option), tensors=tensors, as_json=as_json)


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
def submit(
    source: Source,
    destination: Destination,
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
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the end and show progress.")] = False,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    as_json: Json = False,
) -> int:
    """Hand a conversion to a running service."""
    given = dict(locals())
    from service.cli.options import gather
    from service.cli.remote import Endpoint, run_submit

    options = gather(given, option)
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
