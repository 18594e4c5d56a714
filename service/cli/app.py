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
    NO_OPTIONS,
    Assignments,
    Config,
    Destination,
    From,
    Json,
    LabelFlags,
    Server,
    Source,
    Step,
    Token,
    Wait,
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
    b: Annotated[str | None, typer.Argument(metavar="B", help="What to compare it with.")] = None,
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
    wait: Wait = False,
    label: LabelFlags = None,
    priority: Annotated[int, typer.Option(min=-1000, max=1000, help="Higher goes first.")] = 0,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    as_json: Json = False,
) -> int:
    """Hand a conversion to a running service."""
    from service.cli.asking import assigned
    from service.cli.remote import Endpoint, Submission, run_submit

    asked = Submission(source, destination, options, assigned(label), priority)
    return run_submit(Endpoint(server, token), asked, wait=wait, as_json=as_json)


@app.command()
def jobs(
    job: Annotated[str | None, typer.Argument(metavar="ID", help="One job instead of the latest.")] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="Stop this job.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Queue this job again.")] = False,
    wait: Wait = False,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    as_json: Json = False,
) -> int:
    """List a service's jobs, show one, cancel or retry it, or wait for its end."""
    if wait and job is None:
        raise typer.BadParameter("--wait needs an ID")
    from service.cli.remote import Endpoint, run_job, run_jobs

    action = _chosen({"cancel": cancel, "retry": retry}, job)
    if job is None:
        return run_jobs(Endpoint(server, token), as_json=as_json)
    return run_job(Endpoint(server, token), job, action=action, wait=wait, as_json=as_json)


@app.command()
@takes_options
def batch(
    folders: Annotated[
        str | None, typer.Argument(metavar="FOLDERS", help="Pattern of checkpoints, quoted: '/runs/*/global_step_*'.")
    ] = None,
    destination: Annotated[
        str | None, typer.Argument(metavar="TEMPLATE", help="Where each goes: '/models/{run}-{step}'.")
    ] = None,
    options: ConvertOptions = NO_OPTIONS,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Lines of SOURCE DESTINATION, or of JSON, instead of FOLDERS.")
    ] = None,
    name: Annotated[str, typer.Option(metavar="TEXT", help="What the batch is called.")] = "",
    label: LabelFlags = None,
    max_running: Annotated[int | None, typer.Option(min=1, help="How many of it may run at once.")] = None,
    stop_at_error: Annotated[bool, typer.Option("--stop-at-error", help="The first failure ends the rest.")] = False,
    redo: Annotated[bool, typer.Option("--redo", help="Make again what is there already.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be done.")] = False,
    wait: Wait = False,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    as_json: Json = False,
) -> int:
    """Hand many conversions to a running service at once; what is there already is skipped."""
    from service.cli.asking import assigned, discovery, listed, template
    from service.cli.batching import run_batch
    from service.cli.remote import Endpoint

    if (folders is None) == (file is None) or (destination is None and file is None):
        raise typer.BadParameter("give FOLDERS and TEMPLATE, or --file")
    what = {"items": listed(file)} if file is not None else {"discover": discovery(folders or "")}
    request = {
        **what,
        "name": name,
        "template": template(destination, options, assigned(label)),
        "on_item_error": "fail" if stop_at_error else "continue",
        "max_running": max_running,
        "if_done": "redo" if redo else "skip",
    }
    return run_batch(Endpoint(server, token), request, wait=wait, as_json=as_json, dry_run=dry_run)


@app.command()
def batches(
    batch: Annotated[str | None, typer.Argument(metavar="ID", help="One batch instead of the latest.")] = None,
    cancel: Annotated[bool, typer.Option("--cancel", help="End what is left of it.")] = False,
    retry: Annotated[bool, typer.Option("--retry", help="Queue again what failed.")] = False,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    as_json: Json = False,
) -> int:
    """List a service's batches, show one, cancel it, or retry what failed."""
    from service.cli.batching import run_batches
    from service.cli.remote import Endpoint

    action = _chosen({"cancel": cancel, "retry": retry}, batch)
    return run_batches(Endpoint(server, token), batch, action=action, as_json=as_json)


@app.command()
@takes_options
def watch(
    folders: Annotated[
        str, typer.Argument(metavar="FOLDERS", help="Pattern of checkpoints, quoted: '/runs/qwen/global_step_*'.")
    ],
    destination: Annotated[str, typer.Argument(metavar="TEMPLATE", help="Where each goes: '/models/{run}-{step}'.")],
    options: ConvertOptions = NO_OPTIONS,
    every: Annotated[float, typer.Option(min=1, metavar="SECONDS", help="How often to look.")] = 60.0,
    name: Annotated[str, typer.Option(metavar="TEXT", help="What the watch is called.")] = "",
    label: LabelFlags = None,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    as_json: Json = False,
) -> int:
    """Have a running service convert each checkpoint that appears, once it is complete and at rest."""
    from service.cli.asking import assigned, discovery, template
    from service.cli.batching import run_watch
    from service.cli.remote import Endpoint

    request = {
        **discovery(folders),
        "name": name,
        "interval_s": every,
        "template": template(destination, options, assigned(label)),
    }
    return run_watch(Endpoint(server, token), request, as_json=as_json)


@app.command()
def watches(
    watch: Annotated[str | None, typer.Argument(metavar="ID", help="One watch instead of the latest.")] = None,
    pause: Annotated[bool, typer.Option("--pause", help="Look no more until --resume.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Look again.")] = False,
    look: Annotated[bool, typer.Option("--look", help="Look at once.")] = False,
    delete: Annotated[bool, typer.Option("--delete", help="End it; its jobs go on.")] = False,
    server: Server = DEFAULT_SERVER,
    token: Token = None,
    as_json: Json = False,
) -> int:
    """List a service's watches, show one with what it saw, pause, resume or delete it."""
    from service.cli.batching import run_watches
    from service.cli.remote import Endpoint

    action = _chosen({"pause": pause, "resume": resume, "look": look, "delete": delete}, watch)
    return run_watches(Endpoint(server, token), watch, action=action, as_json=as_json)


def _chosen(flags: dict[str, bool], of: str | None) -> str | None:
    """The one flag that is set; a usage error for several, or for one without the thing that it is for."""
    chosen = [name for name, is_set in flags.items() if is_set]
    if len(chosen) > 1:
        raise typer.BadParameter(f"--{chosen[0]} and --{chosen[1]} do not go together")
    if chosen and of is None:
        raise typer.BadParameter(f"--{chosen[0]} needs an ID")
    return chosen[0] if chosen else None
