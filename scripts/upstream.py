"""Show what each patch of upstream/ mends, on copies of the installed SGLang.

python scripts/upstream.py             # each patch's test fails without it and passes with it;
                                       # then the ring runs on an engine that has all of them
python scripts/upstream.py NAME ...    # these patches alone, without the ring
python scripts/upstream.py --check     # no more than whether they apply

Exit status 0 if all of that is so. The installation is not written to.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PATCHES = ROOT / "upstream"
RELEASE = "0.5.23"  # what the patches are made against
# A patch's paths are those of SGLang's repository: without two folders its sources lie as in
# site-packages, its test in registered/.
STRIP, TESTS = "-p2", "registered/*"
RING = "tests/protocol/test_upstream.py"


class Copy:
    """The installed SGLang in another folder: links, but for what a patch touches."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (installed,) = importlib.util.find_spec("sglang").submodule_search_locations
        self._site = Path(installed).resolve().parent
        (folder / "sglang").symlink_to(self._site / "sglang")

    def apply(self, patch: Path, *options: str) -> None:
        """Apply the patch, or with options a part of it."""
        for line in patch.read_text().splitlines():
            if line.startswith("--- a/python/"):
                self._own(Path(line.removeprefix("--- a/python/")))
        environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(self.folder.parent)}
        subprocess.run(
            ["git", "apply", STRIP, *options, patch], cwd=self.folder, env=environment, check=True
        )

    def python(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        """Run Python over this copy."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("SGLANG_")}
        environment["PYTHONPATH"] = os.pathsep.join([str(self.folder), str(ROOT)])
        environment["PYTHONDONTWRITEBYTECODE"] = "1"  # it would go through the links
        return subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=environment, text=True,
            capture_output=True, check=False,
        )  # fmt: skip

    def _own(self, file: Path) -> None:
        """Make this file a copy, and the folders above it folders of links."""
        for folder in reversed(file.parents[:-1]):
            here = self.folder / folder
            if here.is_symlink():
                here.unlink()
                here.mkdir()
                for child in (self._site / folder).iterdir():
                    (here / child.name).symlink_to(child)
        here = self.folder / file
        if here.is_symlink():
            here.unlink()
            here.write_bytes((self._site / file).read_bytes())


def verdict(copy: Copy) -> tuple[str, str]:
    """How the patch's tests ended: "passes", "fails" by assertions alone, or "breaks"."""
    (test,) = copy.folder.glob("registered/**/test_*.py")
    done = copy.python(test)
    last = done.stderr.rstrip().rpartition("\n")[2]
    if done.returncode == 0 and last == "OK":
        return "passes", last
    fails = re.fullmatch(r"FAILED \(failures=\d+\)", last)
    return ("fails", last) if fails else ("breaks", done.stderr[-3000:])


def shows(patch: Path) -> bool:
    """Whether the test of this patch fails without its change, and passes with it."""
    right = True
    with tempfile.TemporaryDirectory() as folder:
        copy = Copy(Path(folder))
        for part, expected in ((f"--include={TESTS}", "fails"), (f"--exclude={TESTS}", "passes")):
            copy.apply(patch, part)
            got, last = verdict(copy)
            right &= got == expected
            when = "before" if expected == "fails" else "after"
            print(f"{patch.stem}, {when}: {got} (expected: {expected}); {last}", flush=True)
    return right


def apply_all(patches: list[Path], folder: Path) -> Copy:
    """A copy with all of them, without their tests."""
    copy = Copy(folder)
    for patch in patches:
        copy.apply(patch, f"--exclude={TESTS}")
    return copy


def serves(patches: list[Path]) -> bool:
    """Whether the ring is right with the plugin on an engine that has all the patches."""
    with tempfile.TemporaryDirectory() as folder:
        copy = apply_all(patches, Path(folder))
        done = copy.python(
            "-m", "pytest", "-q", "--timeout=1800", "-p", "no:cacheprovider", RING, "-k", "patched"
        )
        passed = re.search(r"\d+ passed", done.stdout)
        right = (
            done.returncode == 0
            and passed is not None
            and not re.search(r"\d+ skipped", done.stdout)
        )
        print(f"the ring, with the plugin and all patches: {'right' if right else done.stdout}")
    return right


def check(patches: list[Path]) -> int:
    """Whether each patch applies alone, and all of them do together."""
    for chosen in [*([patch] for patch in patches), patches]:
        with tempfile.TemporaryDirectory() as folder:
            apply_all(chosen, Path(folder))
    return 0


def main() -> int:
    everything = sorted(PATCHES.glob("*.patch"))
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="a patch, without .patch")
    parser.add_argument("--check", action="store_true", help="only apply them")
    options = parser.parse_args()
    names = options.names
    unknown = set(names) - {patch.stem for patch in everything}
    if unknown:
        parser.error(f"no such patch: {', '.join(sorted(unknown))}")
    if metadata.version("sglang") != RELEASE:
        print(
            f"expected SGLang {RELEASE}, got {metadata.version('sglang')}: the patches are made "
            f"against that release. Install it: pip install sglang=={RELEASE}"
        )
        return 2
    if options.check:
        return check(everything)
    right = [shows(patch) for patch in everything if not names or patch.stem in names]
    if not names:
        right.append(serves(everything))
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
