"""Imports run one way: ``service`` to ``workers``, and inside ``workers`` from the engines down to the error tree."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the bottom up, by the first name below ``workers``. A module imports from its own layer and those before it.
LAYERS = [
    [
        "arithmetic",
        "dtypes",
        "errors",
        "events",
        "geometry",
        "options",
        "quantization",
        "shown",
        "storage",
        "tolerance",
    ],
    ["checkpoint*", "checksums", "dora", "expressions", "nf4", "quantized"],
    ["file_kinds", "mapping", "pickle*", "safetensors_file", "tokenizer_files", "torch_*", "zip_*"],
    ["layout"],
    ["families", "formats"],
    ["checks", "collect*", "*destination", "finished", "manifest", "merge*", "plan*", "verify*"],
    ["engines"],
    ["convert", "forward", "inspect"],
    ["compare"],
]

# Of the control plane; workers are plain Python that a cluster node runs.
SERVICE_ONLY = {
    "alembic",
    "click",
    "fastapi",
    "prometheus_client",
    "pydantic",
    "rich",
    "sqlalchemy",
    "starlette",
    "uvicorn",
}

# Seconds to import, or of no use before the first byte moves.
HEAVY = {"peft", "ray", "torch", "transformers"}

METADATA_PATH = [
    "workers.checkpoint",
    "workers.families",
    "workers.formats",
    "workers.layout",
    "workers.mapping",
    "workers.plan",
    "workers.safetensors_file",
    "workers.storage",
    "workers.torch_file",
]


@dataclass(frozen=True)
class Import:
    """One import statement's target, seen from the module that has it."""

    importer: str
    imported: str
    at_module_level: bool

    def __str__(self):
        return f"{self.importer} imports {self.imported}"


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def module_paths(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def targets(node: ast.stmt, package: str) -> list[str]:
    """The modules an import statement names; for ``from a import b`` both a.b (if a module) and a count as a.b."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert isinstance(node, ast.ImportFrom)
    base = node.module or ""
    if node.level:
        base = ".".join([*package.split(".")[: len(package.split(".")) - node.level + 1], *filter(None, [base])])
    return [f"{base}.{alias.name}" for alias in node.names]


def walk(body: list[ast.stmt], *, at_module_level: bool) -> Iterator[tuple[ast.stmt, bool]]:
    """Every import in a body, except those for a type checker's eyes only."""
    for node in body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node, at_module_level
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        for field in ("body", "orelse", "finalbody"):
            if field == "body" and isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
                continue
            inner = getattr(node, field, [])
            if isinstance(inner, list):
                yield from walk(inner, at_module_level=at_module_level and not is_function)
        for handler in [*getattr(node, "handlers", []), *getattr(node, "cases", [])]:
            yield from walk(handler.body, at_module_level=at_module_level and not is_function)


def imports_of(path: Path) -> list[Import]:
    importer = module_name(path)
    package = importer if path.name == "__init__.py" else importer.rpartition(".")[0]
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return [
        Import(importer, imported, level)
        for node, level in walk(tree.body, at_module_level=True)
        for imported in targets(node, package)
    ]


def all_imports(package: str) -> list[Import]:
    return [found for path in module_paths(package) for found in imports_of(path)]


def layer_of(name: str) -> int | None:
    """The layer of a module of ``workers``; None for the package itself, whose face may show anything."""
    parts = name.split(".")
    if len(parts) == 1:
        return None
    for number, patterns in enumerate(LAYERS):
        if any(fnmatch(parts[1], pattern) for pattern in patterns):
            return number
    pytest.fail(f"{name} has no layer: add it to LAYERS, as low as its imports allow")


def told(wrong: list[Import]) -> str:
    return "; ".join(map(str, wrong))


def test_workers_never_import_the_service():
    wrong = [i for i in all_imports("workers") if i.imported.split(".")[0] in {"service", "tests", "benchmarks"}]
    assert not wrong, told(wrong)


def test_workers_import_downwards():
    inside = [i for i in all_imports("workers") if i.imported.startswith("workers.") and i.importer != "workers"]
    known = {module_name(path) for path in module_paths("workers")} - {"workers"}
    inside = [i for i in inside if i.imported in known or i.imported.rpartition(".")[0] in known]
    wrong = [i for i in inside if layer_of(i.importer) < layer_of(i.imported)]
    assert not wrong, told(wrong)


def test_every_module_of_workers_has_a_layer():
    for path in module_paths("workers"):
        layer_of(module_name(path))


def test_only_the_ray_engine_imports_ray_when_loaded():
    wrong = [
        i
        for i in all_imports("workers")
        if i.imported.split(".")[0] == "ray" and i.at_module_level and not i.importer.startswith("workers.engines.ray")
    ]
    assert not wrong, told(wrong)


def test_workers_import_torch_only_when_arithmetic_is_asked_for():
    wrong = [
        i
        for i in all_imports("workers")
        if i.imported.split(".")[0] == "torch" and i.at_module_level and i.importer != "workers.engines.gpu"
    ]
    assert not wrong, told(wrong)


def test_the_control_planes_libraries_stay_in_the_service():
    wrong = [i for i in all_imports("workers") if i.imported.split(".")[0] in SERVICE_ONLY]
    assert not wrong, told(wrong)


def exists(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def loaded_by(*modules: str) -> set[str]:
    """The top-level modules that a fresh interpreter has after importing these."""
    code = f"import sys, {', '.join(modules)}; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_the_metadata_path_loads_neither_torch_nor_ray():
    present = [module for module in METADATA_PATH if exists(module)]
    assert loaded_by(*present) & (HEAVY | SERVICE_ONLY) == set()


def test_the_command_starts_without_what_only_some_commands_need():
    if not exists("service.cli"):
        return
    assert loaded_by("service.cli") & (HEAVY | {"fastapi", "sqlalchemy", "uvicorn"}) == set()


def test_a_wrong_import_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "workers" / "engines").mkdir(parents=True)
    late = "def f():\n    from service import app\n    from .engines import x\n"
    (tmp_path / "workers" / "errors.py").write_text(late)
    (tmp_path / "workers" / "engines" / "x.py").write_text("try:\n    import torch\nexcept ImportError:\n    pass\n")
    for check in (
        test_workers_never_import_the_service,
        test_workers_import_downwards,
        test_workers_import_torch_only_when_arithmetic_is_asked_for,
    ):
        with pytest.raises(AssertionError, match=" imports "):
            check()
