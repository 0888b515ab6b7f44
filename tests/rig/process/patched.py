"""Make a copy of SGLang with patches from upstream/. The installed SGLang is unchanged."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parents[3]
UPSTREAM = ROOT / "upstream"
NAMES = sorted(path.stem for path in UPSTREAM.glob("*.patch"))


def touched(name: str) -> list[str]:
    """Return the files of a patch, as paths in SGLang's repository."""
    return re.findall(r"(?m)^\+\+\+ b/(\S+)", (UPSTREAM / f"{name}.patch").read_text())


def own_tests(name: str) -> list[str]:
    """Return a patch's own tests, as paths in the folder that `patched` makes."""
    return [file.removeprefix("test/") for file in touched(name) if file.startswith("test/")]


def patched(site: Path, names: Iterable[str], *, tests_of: Iterable[str] = ()) -> Path:
    """Make a folder for PYTHONPATH whose `sglang` has these patches. Unchanged files are symbolic
    links. The folder also contains the tests of these patches and of the patches in `tests_of`,
    whose code is not applied."""
    spec = find_spec("sglang")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (installed,) = spec.submodule_search_locations
    _link(Path(installed), site / "sglang")
    for name in names:
        for file in (file for file in touched(name) if file.startswith("python/")):
            _own(site, Path(file).relative_to("python"))
        _apply(site, name)
    for name in tests_of:
        _apply(site, name, "--include=registered/*")
    return site


def _link(source: Path, place: Path) -> None:
    """Link the contents of a folder. Copy its bytecode, so that Python adds none to the
    original."""
    place.mkdir(parents=True)
    for one in source.iterdir():
        if one.name == "__pycache__":
            shutil.copytree(one, place / one.name)
        else:
            (place / one.name).symlink_to(one)


def _own(site: Path, file: Path) -> None:
    """Replace symbolic links on a file's path, and the file itself, with copies."""
    for folder in [*reversed(file.parents)][2:]:
        if (site / folder).is_symlink():
            source = (site / folder).resolve()
            (site / folder).unlink()
            _link(source, site / folder)
    if (site / file).is_symlink():
        source = (site / file).resolve()
        (site / file).unlink()
        shutil.copy2(source, site / file)


def _apply(site: Path, name: str, *options: str) -> None:
    """Apply a patch without fuzz, by the command that upstream/README.md gives for
    site-packages."""
    command = ["git", "apply", "-p2", *options, str(UPSTREAM / f"{name}.patch")]
    env = os.environ | {"GIT_CEILING_DIRECTORIES": str(site.parent)}
    done = subprocess.run(command, cwd=site, env=env, text=True, capture_output=True)
    assert done.returncode == 0, f"{name}: {done.stderr}"


def python(site: Path, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    """Run Python with the `sglang` of this folder."""
    path = [site, ROOT, ROOT / "tests"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG")}
    env |= {"PYTHONPATH": os.pathsep.join(map(str, path))}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(
        command,
        env=env,
        text=True,
        capture_output=True,
        **{"cwd": site} | options,  # type: ignore[call-overload, no-any-return]
    )
