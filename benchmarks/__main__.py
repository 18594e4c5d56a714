"""``python -m benchmarks``: measure, print tables, write them to ``.bench/results.md``."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from benchmarks import formats, quantized, soak
from benchmarks.generate import make_checkpoint
from benchmarks.measure import Measured, Series, copy_and_sync, interleave, run_command

PYTHON = sys.executable
UNSHARD = str(Path(sys.executable).parent / "unshard")
SCRATCH = Path(".bench")


def main() -> None:
    """Run the chosen measurements."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--size-gb", type=float, default=2.0, help="size of the generated checkpoint")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tensors", type=int, default=36_000, help="tensors of the planning measurement")
    parser.add_argument("--ranks", type=int, default=128, help="ranks of the planning measurement")
    parser.add_argument("--jobs", type=int, default=1000, help="jobs of the soak")
    parser.add_argument("--verl-python", help="python of an environment with verl, to measure verl's own merger, too")
    parser.add_argument("--deepspeed-python", help="python of an environment with deepspeed, to measure zero_to_fp32")
    parser.add_argument("--formats", default=",".join(FORMATS), help="formats of the measurement of formats")
    parser.add_argument("--only", default=",".join(CHOICES), help=f"comma-separated: {', '.join(CHOICES)}")
    arguments = parser.parse_args()
    lines = [f"Measured {time.strftime('%Y-%m-%d')} on {machine()}.", ""]
    for name in arguments.only.split(","):
        lines += [*CHOICES[name](arguments), ""]
        print("\n".join(lines[-12:]), flush=True)
    (SCRATCH / "results.md").write_text("\n".join(lines))


def machine() -> str:
    """The machine in a line."""
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    system = f"Linux {platform.release()}, Python {platform.python_version()}"
    return f"{os.cpu_count()} cores ({model}), {memory:.0f} GiB, {system}"


def source(size_gb: float) -> Path:
    """The generated checkpoint, made once for each size."""
    folder = SCRATCH / f"checkpoint-{size_gb:g}gb"
    if not folder.exists():
        partial = SCRATCH / "checkpoint-partial"
        subprocess.run(["rm", "-rf", str(partial)], check=True)
        make_checkpoint(partial, int(size_gb * 10**9))
        partial.rename(folder)
    return folder


def table(series: list[Series], size_gb: float, title: str) -> list[str]:
    """A table with medians, spread, ratio to the first row, and peak memory."""
    rows = [
        f"### {title}",
        "",
        "| | median s | spread s | GB/s | x first row | peak MiB |",
        "|---|---|---|---|---|---|",
    ]
    return rows + [
        f"| {one.name} | {one.median:.2f} | {one.spread} | {size_gb / one.median:.2f} | "
        f"{one.median / series[0].median:.2f} | {one.peak} |"
        for one in series
    ]


def disk(arguments: argparse.Namespace) -> list[str]:
    """The command against cp and against merging in one process, on the local disk."""
    folder = source(arguments.size_gb)

    def convert(*options: str) -> Callable[[Path], Measured]:
        return lambda out: run_command([UNSHARD, "convert", str(folder), str(out), *options])

    peers: dict[str, Callable[[Path], Measured]] = {}
    if arguments.verl_python:
        merger = [arguments.verl_python, "-m", "verl.model_merger", "merge", "--backend", "fsdp"]
        peers["verl.model_merger"] = lambda out: run_command(
            [*merger, "--local_dir", str(folder), "--target_dir", str(out)]
        )
    series = interleave(
        {
            "cp -r, fsync": lambda out: copy_and_sync(folder, out),
            "unshard convert": convert(),
            "unshard convert --dtype bfloat16": convert("--dtype", "bfloat16"),
            "unshard convert --memory 256MiB": convert("--memory", "256MiB"),
            "load, concatenate, save_pretrained": lambda out: run_command(
                [PYTHON, "-m", "benchmarks.peer_merge", str(folder), str(out)]
            ),
            **peers,
        },
        SCRATCH,
        arguments.repetitions,
    )
    return table(series, arguments.size_gb, f"Local disk, {arguments.size_gb:g} GB float32, 4 ranks, whole commands")


@contextmanager
def engine() -> Iterator[object]:
    """A Ray engine with its actors up."""
    from workers.engines.ray_engine import RayEngine

    made = RayEngine()
    made.start()
    try:
        yield made
    finally:
        made.close()


def timed(action: Callable[[], object]) -> Measured:
    """Seconds of a call."""
    began = time.perf_counter()
    action()
    return Measured(time.perf_counter() - began)


def ray_engine(arguments: argparse.Namespace) -> list[str]:
    """Both engines inside one process, actors up; and what a job costs that does next to nothing."""
    from workers.convert import convert

    folder, tiny = str(source(arguments.size_gb)), "tests/cases/verl-fsdp/llama-fsdp2-ws1/input"
    with engine() as ray:
        series = interleave(
            {
                "threads engine": lambda out: timed(lambda: convert(folder, str(out))),
                "Ray engine": lambda out: timed(lambda: convert(folder, str(out), engine=ray)),  # type: ignore[arg-type]
            },
            SCRATCH,
            arguments.repetitions,
        )
        overhead = interleave(
            {
                "threads engine, 200 kB": lambda out: timed(lambda: convert(tiny, str(out))),
                "Ray engine, 200 kB": lambda out: timed(lambda: convert(tiny, str(out), engine=ray)),  # type: ignore[arg-type]
            },
            SCRATCH,
            arguments.repetitions,
        )
    rows = table(series, arguments.size_gb, "Engines, local disk, inside one process, actors up")
    return [*rows, "", *table(overhead, 0.0002, "One small job, actors up")]


def s3(arguments: argparse.Namespace) -> list[str]:
    """Both engines into a bucket against a bare upload of the same bytes."""
    import tempfile

    from obstore import put

    from tests.seaweed import SeaweedFS
    from workers.convert import convert
    from workers.options import ConvertOptions

    size_gb = min(arguments.size_gb, 1.0)
    folder = str(source(size_gb))
    options = ConvertOptions(overwrite=True)
    merged = SCRATCH / "merged"
    subprocess.run(["rm", "-rf", str(merged)], check=True)
    convert(folder, str(merged))
    shard = next(merged.glob("*.safetensors"))
    server = SeaweedFS(Path(tempfile.mkdtemp(prefix="seaweed-")))
    address = server.start()
    os.environ.update(address.environment())
    url = f"s3://{address.bucket}/model"
    try:
        with engine() as ray:
            series = interleave(
                {
                    "bare obstore upload": lambda _: timed(
                        lambda: put(address.store(), "bare", shard, chunk_size=16 << 20, max_concurrency=4)
                    ),
                    "threads engine": lambda _: timed(lambda: convert(folder, url, options)),
                    "Ray engine": lambda _: timed(lambda: convert(folder, url, options, engine=ray)),  # type: ignore[arg-type]
                },
                SCRATCH,
                arguments.repetitions,
            )
    finally:
        server.stop()
    return table(series, size_gb, f"Into a bucket (SeaweedFS on the same machine), {size_gb:g} GB")


def planning(arguments: argparse.Namespace) -> list[str]:
    """Planning from metadata alone: FSDP's rank files, and DeepSeek-V3 as two frameworks save it."""
    from benchmarks import planning as sources

    made = {
        f"verl FSDP, {arguments.tensors:,} tensors x {arguments.ranks} ranks": (
            f"metadata-{arguments.tensors}x{arguments.ranks}",
            lambda folder: sources.make_metadata(folder, arguments.tensors, arguments.ranks),
        ),
        "DeepSeek-V3, torch DCP, 512 ranks": ("metadata-v3-dcp", sources.make_hub_run),
        "DeepSeek-V3, Megatron torch_dist, 2048 ranks": ("metadata-v3-megatron", sources.make_megatron_run),
    }
    rows = [
        "### Planning by metadata alone",
        "",
        (
            "| run | pieces | target tensors | plan, wall s | CPU us per piece | plan, peak MiB | bytes per piece | "
            "inspect, wall s | inspect, peak MiB |"
        ),
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for title, (name, make) in made.items():
        folder = SCRATCH / name
        if not folder.exists():
            partial = SCRATCH / "metadata-partial"
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            partial.rename(folder)
        plan, seen = (_in_own_process(folder, what) for what in ("plan", "inspect"))
        pieces = plan["pieces"]
        rows.append(
            f"| {title} | {pieces:,.0f} | {plan['targets']:,.0f} | {plan['seconds']:.1f} | "
            f"{plan['cpu_seconds'] / pieces * 1e6:.1f} | {plan['peak_bytes'] / 2**20:,.0f} | "
            f"{plan['peak_bytes'] / pieces:.0f} | {seen['seconds']:.1f} | {seen['peak_bytes'] / 2**20:,.0f} |"
        )
    return rows


def _in_own_process(folder: Path, what: str) -> dict[str, float]:
    command = [PYTHON, "-m", "benchmarks.plan_once", str(folder), what]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def quantization(arguments: argparse.Namespace) -> list[str]:
    """Quantised results from a bfloat16 model on the local disk."""
    series, size_gb = quantized.measure(source(arguments.size_gb), arguments)
    return table(series, size_gb, f"Quantising {size_gb:.1f} GB of bfloat16, local disk, whole commands")


CHOICES: dict[str, Callable[[argparse.Namespace], list[str]]] = {
    "disk": disk,
    "formats": formats.table,
    "ray": ray_engine,
    "s3": s3,
    "planning": planning,
    "quantization": quantization,
    "soak": soak.table,
}
FORMATS = (
    "dcp",
    "accelerate",
    "dcp-safetensors",
    "zero-2",
    "zero-3",
    "megatron-dist",
    "megatron-legacy",
    "torchtune",
    "meta",
)

if __name__ == "__main__":
    main()
