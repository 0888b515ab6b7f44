"""The GPU environment contains every library that its extension modules are linked against, so that
importing them does not fail. No GPU is needed, and nothing is installed.

cuda_wheels.toml lists the libraries that the wheels of the extra `cuda` need in addition to their
own, and the package that provides each. With --full, the tests compare it with the wheels, and
check the rest of the environment, which is the same as for CPUs.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import IO, Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
WHEELS = tomllib.loads(Path(__file__).with_name("cuda_wheels.toml").read_text())
ENV_SH = (ROOT / "scripts" / "env.sh").read_text()
OLD = ["mooncake-transfer-engine==0.3.13.post1"]  # built for CUDA 12, in the extra of release 0.3
BASE = {
    *("ld-linux-x86-64.so.2", "libc.so.6", "libdl.so.2", "libgcc_s.so.1", "libm.so.6"),
    *("libpthread.so.0", "libresolv.so.2", "librt.so.1", "libstdc++.so.6", "libutil.so.1"),
    "libz.so.1",
}
"""Libraries in Debian's base system, which apt itself needs."""
DRIVER = {"libcuda.so.1", "libnvidia-ml.so.1"}
OPTIONAL = (
    # the wheels also have these modules for CUDA 13, which are the ones that are loaded
    r"torch_memory_saver_hook_mode_\w+?(_cu12)?\.abi3", "nixl_ep_cu12/",
    "numba/np/ufunc/(tbb|omp)pool",  # numba tries both, and uses the one that loads
)  # fmt: skip


def lacking(requirements: Iterable[str]) -> list[str]:
    """Return the libraries that these wheels need and that no package provides."""
    found = []
    for requirement in map(Requirement, requirements):
        name, wheel = requirement.name, WHEELS.get(requirement.name)
        if wheel is None or str(requirement.specifier) != f"=={wheel['version']}":
            found.append(f"{requirement}: cuda_wheels.toml has no such wheel")
        for library, by in (wheel or {"needed": {}})["needed"].items():
            if not is_provided(library, by):
                found.append(f"{name}: {library} is provided by {by or 'nothing'}")
    return found


def is_provided(library: str, by: str) -> bool:
    """Return True if `by` provides the library: Debian's base, the driver, a Debian package that
    scripts/env.sh installs, or a package of this environment."""
    if by in ("base", "driver"):
        return library in (BASE if by == "base" else DRIVER)
    if by and re.search(rf"={by}\b", ENV_SH):
        return True
    return bool(by) and any(file.name == library for file in metadata.files(by) or ())


@pytest.mark.parametrize(
    ("requirements", "expected"),
    [
        (EXTRAS["cuda"], []),
        (OLD, ["mooncake-transfer-engine: libcudart.so.12 is provided by nothing"]),
        (["flashinfer-python"], ["flashinfer-python: cuda_wheels.toml has no such wheel"]),
    ],
    ids=["the extra", "for CUDA 12", "not pinned"],
)
def test_every_library_of_the_cuda_wheels_is_provided(
    requirements: list[str], expected: Any
) -> None:
    assert lacking(requirements) == expected


def test_torch_loads_cudas_runtime() -> None:
    """Mooncake has no path to CUDA's runtime, and relies on torch having loaded a library of that
    name."""
    code = "import torch; print(open('/proc/self/maps').read().count('/libcudart.so.13'))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) > 0


def test_gpu_check_installs_sglangs_version_of_torch() -> None:
    (torch,) = (one for one in metadata.requires("sglang") or () if one.startswith("torch=="))
    assert f"({torch} " in ENV_SH or metadata.version("sglang") not in EXTRAS["sglang"][0]


# ---------------------------------------------------------------- the wheels


def linked(file: IO[bytes]) -> tuple[set[str], str] | None:
    """Return the libraries that an ELF file needs (NEEDED), and its own name (SONAME)."""
    head = file.read(64)
    if head[:6] != b"\x7fELF\x02\x01":
        return None
    (at,), (size, count) = struct.unpack_from("<Q", head, 32), struct.unpack_from("<HH", head, 54)
    file.seek(at)
    table = file.read(size * count)
    parts = [struct.unpack_from("<IIQQQQQQ", table, n * size) for n in range(count)]
    loaded = [part[2:6:3] + part[3:4] for part in parts if part[0] == 1]  # offset, bytes, address
    found = list[tuple[int, int]]()
    for kind, _, offset, *_, length, _, _ in parts:
        if kind == 2:
            file.seek(offset)
            found = list(struct.iter_unpack("<qQ", file.read(length)))
    if not found:
        return set(), ""
    strings, length = dict(found)[5], dict(found)[10]
    (at,) = (o + strings - a for o, size, a in loaded if a <= strings < a + size)
    file.seek(at)
    text = file.read(length)
    names = [(tag, text[n:].split(b"\0")[0].decode()) for tag, n in found if tag in (1, 14)]
    return {name for tag, name in names if tag == 1}, dict(names).get(14, "")


def needed(wheel: Path) -> set[str]:
    """Return the libraries that the wheel's files are linked against and that it does not
    contain."""
    found, own = set[str](), set[str]()
    with zipfile.ZipFile(wheel) as archive:
        for name in archive.namelist():
            with archive.open(name) as file:
                if about := linked(file):
                    found |= about[0]
                    own |= {Path(name).name, about[1]}
    return found - own


@pytest.mark.full
@pytest.mark.parametrize("name", WHEELS)
def test_cuda_wheels_toml_agrees_with_the_wheels(name: str, tmp_path: Path) -> None:
    wheel = WHEELS[name]
    for python, digest in wheel["sha256"].items():
        wanted = ("--python-version", python[2:], "--platform", "manylinux_2_28_x86_64")
        fetch(tmp_path, *wanted, f"{name}=={wheel['version']}")
        (file,) = tmp_path.glob(f"*-{python}-*.whl")
        assert hashlib.sha256(file.read_bytes()).hexdigest() == digest
        assert needed(file) == wheel["needed"].keys()
        file.unlink()


def fetch(folder: Path, *what: str) -> None:
    command = (sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(folder))
    done = subprocess.run([*command, "--only-binary=:all:", *what], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.full
def test_the_gpu_environment_differs_only_in_the_cuda_wheels() -> None:
    """The test resolves the environment with uv, as scripts/env.sh does."""
    packages = [one for extra in ("cuda", "nixl", "demo", "test") for one in EXTRAS[extra]]
    uv = shutil.which("uv", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if uv is None:
        pytest.skip("uv is not installed: pip would have to download what it resolves")
    command = [uv, "pip", "install", "--dry-run"]
    command += ["--python", sys.executable, "--override", str(ROOT / "scripts/overrides.txt")]
    command += [f"sglang=={metadata.version('sglang')}", *packages]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert re.findall(r"(?m)^ \+ (.*)$", done.stderr) == EXTRAS["cuda"]


@pytest.mark.full
def test_every_library_of_the_other_wheels_is_provided() -> None:
    """Only extension modules that Python imports are checked. Other libraries are optional
    plugins."""
    site, suffixes = (
        Path(sysconfig.get_path("platlib")),
        (sysconfig.get_config_var("EXT_SUFFIX"), ".abi3.so"),
    )
    own, modules = set[str](), dict[str, set[str]]()
    for path in (path for path in site.rglob("*.so*") if path.is_file()):
        with path.open("rb") as file:
            if about := linked(file):
                own |= {path.name, about[1]}
                if path.name.endswith(suffixes):
                    modules[str(path.relative_to(site))] = about[0]
    lack = {name: found - own - BASE - DRIVER for name, found in modules.items()}
    assert len(modules) > 100
    found = {name for name, libraries in lack.items() if libraries}
    assert [name for name in found if not re.match("|".join(OPTIONAL), name)] == []
    assert all(any(re.match(one, name) for name in found) for one in OPTIONAL)
