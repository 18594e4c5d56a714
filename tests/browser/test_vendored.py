"""Files of other projects are what they say."""

from __future__ import annotations

import base64
import hashlib
import io
import re
import shutil
import subprocess
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / "service" / "dashboard" / "vendor", ROOT / "tests" / "browser" / "vendor"]
FILE_ROW = re.compile(r"^\| `([^`]+)` \| (\S+) (\S+) \| `([^`]+)` \| `([0-9a-f]{64})` \|$", re.MULTILINE)
PACKAGE_ROW = re.compile(
    r"^\| (\S+) (\S+) \| [^|]+ \| <(https://registry[^>]+)> \| `(sha512-[^`]+)` \|$", re.MULTILINE
)


def files_and_packages(folder: Path) -> tuple[list[tuple[str, ...]], list[tuple[str, ...]]]:
    text = (folder / "VENDOR.md").read_text(encoding="utf-8")
    return FILE_ROW.findall(text), PACKAGE_ROW.findall(text)


@pytest.mark.parametrize("folder", FOLDERS, ids=["dashboard", "tests"])
def test_every_vendored_file_is_listed_with_its_digest_licence_and_package(folder):
    files, packages = files_and_packages(folder)
    known = {(name, version) for name, version, _, _ in packages}
    assert {name for name, *_ in files} == {
        path.name for path in folder.iterdir() if path.suffix in (".js", ".mjs", ".css")
    }
    for name, package, version, _, digest in files:
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == digest, name
        assert (package, version) in known
    assert (folder / "LICENSES").is_file() or (folder / "LICENSE").is_file()


def published(url: str) -> bytes | None:
    """The package as npm has it; None where it does not answer."""
    curl = shutil.which("curl")
    if curl is None:
        return None
    got = subprocess.run([curl, "-sfL", "--max-time", "20", url], capture_output=True, check=False)
    return got.stdout if got.returncode == 0 else None


@pytest.mark.parametrize("folder", FOLDERS, ids=["dashboard", "tests"])
def test_vendored_files_are_those_that_npm_publishes(folder):
    """Where the registry can be reached: a machine without it has the digests, which were taken from there."""
    files, packages = files_and_packages(folder)
    for package, version, url, integrity in packages:
        content = published(url)
        if content is None:
            continue
        assert "sha512-" + base64.b64encode(hashlib.sha512(content).digest()).decode() == integrity
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for name, owner, of_version, inside, _ in files:
                if (owner, of_version) == (package, version):
                    member = archive.extractfile(f"package/{inside}")
                    assert member is not None
                    assert member.read() == (folder / name).read_bytes()
