"""The commands and their flags. Each hands over to the module that does it, loaded when it runs."""
# ruff: noqa: PLC0415, PLR0917
# A command has as many arguments as it has flags, and importing late is the point here.

from __future__ import annotations

import math
import sys
from typing import TYPE_CHECKING

import click

from service.cli import flags
from service.cli.output import say

if TYPE_CHECKING:
    from service.cli.remote import Endpoint
    from workers.options import ConvertOptions

FOLDERS_HELP = "Pattern of checkpoints, quoted: '/runs/*/global_step_*'."
TEMPLATE_HELP = "Where each goes: '/models/{run}-{step}'."


class InOrder(click.Group):
    """A group whose help lists its commands as a reader meets them, not by the alphabet."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - the library's signature
        return list(self.commands)


@click.group(
    "unshard",
    cls=InOrder,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--version", is_flag=True, help="Show the version.")
@click.pass_context
def app(context: click.Context, *, version: bool) -> None:
    """Convert training checkpoints to Hugging Face models."""
    if version:
        from workers.manifest import program_version

        say(f"unshard {program_version()}")
        context.exit()
    if context.invoked_subcommand is None:
        say(context.get_help(), to=sys.stderr)
        context.exit(2)


@app.command()
@flags.source
@flags.destination
@flags.conversion
@click.option(
    "--engine",
    type=click.Choice(["threads", "ray"]),
    default="threads",
    show_default=True,
    help="What makes the parts: threads of this process, or actors of a Ray cluster.",
)
@click.option("--workers", type=click.IntRange(min=1), metavar="N", help="How many threads or Ray mergers.")
@flags.as_json
def convert(
    source: str, destination: str, options: ConvertOptions, engine: str, workers: int | None, *, as_json: bool
) -> int:
    """Convert a checkpoint into a Hugging Face model."""
    from service.cli.converting import Request, run_convert

    return run_convert(Request(source, destination, options, engine, workers), as_json=as_json)


@app.command()
@flags.source
@flags.destination
@flags.conversion
@click.option("--tensors", is_flag=True, help="One line for each tensor of the result.")
@flags.as_json
def plan(source: str, destination: str, options: ConvertOptions, *, tensors: bool, as_json: bool) -> int:
    """Show what a conversion would do; nothing is written."""
    from service.cli.planning import run_plan

    return run_plan((source, destination), options, tensors=tensors, as_json=as_json)


@app.command()
@flags.source
@click.option("--tensor", metavar="NAME", help="Show where this tensor's pieces lie.")
@flags.source_format
@flags.config_dir
@flags.step
@flags.assignments
@flags.as_json
def inspect(source: str, tensor: str | None, option: tuple[str, ...], *, as_json: bool, **given: object) -> int:
    """Say what a checkpoint is; only its metadata is read."""
    from service.cli.inspecting import run_inspect
    from service.cli.options import gather

    return run_inspect(source, gather(given, option), tensor, as_json=as_json)


@app.command()
@click.argument("a", help="A model, or anything that convert takes.")
@click.argument("b", required=False, help="What to compare it with.")
@click.option(
    "--atol",
    type=click.FloatRange(min=0.0),
    default=0.0,
    metavar="NUMBER",
    help="How far numbers may differ. [default: 0, every bit]",
)
@click.option("--forward", is_flag=True, help="Compare logits, computed by transformers.")
@flags.as_json
def verify(a: str, b: str | None, atol: float, *, forward: bool, as_json: bool) -> int:
    """Check a model, or compare two.

    One model is checked against its manifest, its index and its config; two are compared tensor by tensor.
    """
    if b is None and (forward or atol):
        raise click.UsageError("--forward and --atol compare two models: give a second one")
    if not math.isfinite(atol):
        raise click.UsageError(f"--atol {atol:g} is no difference that numbers can have")
    from service.cli.verifying import run_verify

    return run_verify(a, b, atol=atol, forward=forward, as_json=as_json)


@app.command()
@flags.as_json
def formats(*, as_json: bool) -> int:
    """List the checkpoint formats that can be read."""
    from service.cli.inspecting import run_formats

    return run_formats(as_json=as_json)


@app.command()
@click.option("--folder", default=".demo", show_default=True, metavar="FOLDER", help="Where the demo keeps its data.")
def demo(folder: str) -> int:
    """Try everything on a small checkpoint.

    Starts a service, converts a checkpoint that ships with unshard through it and proves the result.
    """
    from service.demo import run_demo

    return run_demo(folder)


@app.command()
@click.option("--host", metavar="ADDRESS", help="Address to listen on. [default: 127.0.0.1]")
@click.option("--port", type=click.IntRange(0, 65535), metavar="PORT", help="Port to listen on. [default: 8000]")
@click.option("--data-dir", metavar="FOLDER", help="Where the service keeps its data.")
def serve(**given: object) -> int:
    """Run the service: REST API and dashboard.

    Where no flag is given, the environment's UNSHARD_* settings hold.
    """
    from service.cli.serving import run_serve

    return run_serve(given)


@app.command()
@flags.source
@flags.destination
@flags.conversion
@flags.wait
@flags.labels
@click.option("--priority", type=click.IntRange(-1000, 1000), default=0, metavar="N", help="Higher goes first.")
@flags.service
def submit(
    source: str,
    destination: str,
    options: ConvertOptions,
    label: tuple[str, ...],
    priority: int,
    at: Endpoint,
    *,
    wait: bool,
    as_json: bool,
) -> int:
    """Hand a conversion to a running service."""
    from service.cli.asking import assigned
    from service.cli.remote import Submission, run_submit

    asked = Submission(source, destination, options, assigned(label), priority)
    return run_submit(at, asked, wait=wait, as_json=as_json)


@app.command(short_help="List a service's jobs; show, cancel, retry or await one.")
@click.argument("job", required=False, metavar="[ID]", help="One job instead of the latest.")
@click.option("--cancel", is_flag=True, help="Stop this job.")
@click.option("--retry", is_flag=True, help="Queue this job again.")
@flags.wait
@flags.service
def jobs(job: str | None, at: Endpoint, *, cancel: bool, retry: bool, wait: bool, as_json: bool) -> int:
    """List a service's jobs, show one, cancel or retry it, or wait for its end."""
    if wait and job is None:
        raise click.UsageError("--wait needs an ID")
    from service.cli.remote import run_job, run_jobs

    action = _chosen({"cancel": cancel, "retry": retry}, job)
    if job is None:
        return run_jobs(at, as_json=as_json)
    return run_job(at, job, action=action, wait=wait, as_json=as_json)


@app.command(short_help="Hand many conversions to a running service at once.")
@click.argument("folders", required=False, help=FOLDERS_HELP)
@click.argument("destination", required=False, metavar="[TEMPLATE]", help=TEMPLATE_HELP)
@flags.conversion
@click.option("--file", metavar="FILE", help="Lines of SOURCE DESTINATION, or of JSON, instead of FOLDERS.")
@click.option("--name", default="", metavar="TEXT", help="What the batch is called.")
@flags.labels
@click.option("--max-running", type=click.IntRange(min=1), metavar="N", help="How many of it may run at once.")
@click.option("--stop-at-error", is_flag=True, help="The first failure ends the rest.")
@click.option("--redo", is_flag=True, help="Make again what is there already.")
@click.option("--dry-run", is_flag=True, help="Only show what would be done.")
@flags.wait
@flags.service
def batch(
    folders: str | None,
    destination: str | None,
    options: ConvertOptions,
    file: str | None,
    name: str,
    label: tuple[str, ...],
    max_running: int | None,
    at: Endpoint,
    *,
    stop_at_error: bool,
    redo: bool,
    dry_run: bool,
    wait: bool,
    as_json: bool,
) -> int:
    """Hand many conversions to a running service at once; what is there already is skipped."""
    from service.cli.asking import assigned, discovery, listed, template
    from service.cli.batching import run_batch

    if (folders is None) == (file is None) or (destination is None and file is None):
        raise click.UsageError("give FOLDERS and TEMPLATE, or --file")
    what = {"items": listed(file)} if file is not None else {"discover": discovery(folders or "")}
    request = {
        **what,
        "name": name,
        "template": template(destination, options, assigned(label)),
        "on_item_error": "fail" if stop_at_error else "continue",
        "max_running": max_running,
        "if_done": "redo" if redo else "skip",
    }
    return run_batch(at, request, wait=wait, as_json=as_json, dry_run=dry_run)


@app.command(short_help="List a service's batches; show, cancel or retry one.")
@click.argument("batch", required=False, metavar="[ID]", help="One batch instead of the latest.")
@click.option("--cancel", is_flag=True, help="End what is left of it.")
@click.option("--retry", is_flag=True, help="Queue again what failed.")
@flags.service
def batches(batch: str | None, at: Endpoint, *, cancel: bool, retry: bool, as_json: bool) -> int:
    """List a service's batches, show one, cancel it, or retry what failed."""
    from service.cli.batching import run_batches

    action = _chosen({"cancel": cancel, "retry": retry}, batch)
    return run_batches(at, batch, action=action, as_json=as_json)


@app.command(short_help="Have a running service convert each checkpoint that appears.")
@click.argument("folders", help=FOLDERS_HELP)
@click.argument("destination", metavar="TEMPLATE", help=TEMPLATE_HELP)
@flags.conversion
@click.option(
    "--every",
    type=click.FloatRange(min=1),
    default=60.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@click.option("--name", default="", metavar="TEXT", help="What the watch is called.")
@flags.labels
@flags.service
def watch(
    folders: str,
    destination: str,
    options: ConvertOptions,
    every: float,
    name: str,
    label: tuple[str, ...],
    at: Endpoint,
    *,
    as_json: bool,
) -> int:
    """Have a running service convert each checkpoint that appears, once it is complete and at rest."""
    from service.cli.asking import assigned, discovery, template
    from service.cli.batching import run_watch

    request = {
        **discovery(folders),
        "name": name,
        "interval_s": every,
        "template": template(destination, options, assigned(label)),
    }
    return run_watch(at, request, as_json=as_json)


@app.command(short_help="List a service's watches; show, pause, resume or delete one.")
@click.argument("watch", required=False, metavar="[ID]", help="One watch instead of the latest.")
@click.option("--pause", is_flag=True, help="Look no more until --resume.")
@click.option("--resume", is_flag=True, help="Look again.")
@click.option("--look", is_flag=True, help="Look at once.")
@click.option("--delete", is_flag=True, help="End it; its jobs go on.")
@flags.service
def watches(watch: str | None, at: Endpoint, *, as_json: bool, **actions: bool) -> int:
    """List a service's watches, show one with what it saw, pause, resume or delete it."""
    from service.cli.batching import run_watches

    return run_watches(at, watch, action=_chosen(actions, watch), as_json=as_json)


def _chosen(actions: dict[str, bool], of: str | None) -> str | None:
    """The one flag that is set; a usage error for several, or for one without the thing that it is for."""
    chosen = [name for name, is_set in actions.items() if is_set]
    if len(chosen) > 1:
        raise click.UsageError(f"--{chosen[0]} and --{chosen[1]} do not go together")
    if chosen and of is None:
        raise click.UsageError(f"--{chosen[0]} needs an ID")
    return chosen[0] if chosen else None
