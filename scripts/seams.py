"""Write tests/pure/engine/seams.json: the parameters, attributes and arguments' defaults that the
plugin uses, as each supported release of SGLang has them in its wheel.

    pip download --no-deps -d wheels sglang==VERSION   # of each release
    python scripts/seams.py wheels/sglang-*.whl
"""

from __future__ import annotations

import ast
import json
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from sglang_mixkv.engine.seams import ATTRIBUTES, SEAMS
from sglang_mixkv.tools.against import ASSEMBLED, Wheel

WRITTEN = Path(__file__).parent.parent / "tests" / "pure" / "engine" / "seams.json"
((ARGUMENTS, FOLDER),) = ASSEMBLED.items()


def has(wheel: Wheel, path: str) -> str | None:
    with suppress(LookupError):
        names = wheel.names(path)
        return " ".join(names if path in SEAMS else sorted({*names} & {*ATTRIBUTES[path]}))
    return None


def default(wheel: Wheel, name: str) -> Any:
    for file in wheel.files(FOLDER):
        for node in ast.walk(ast.Module(wheel.body(file), [])):
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name and node.value:
                with suppress(ValueError):  # not a literal
                    return ast.literal_eval(node.value)
    return None


def by_release(wheels: Iterable[Wheel], find: Callable[[Wheel, str], Any], name: str) -> Any:
    """Return the value that all releases share, or each value by the releases that have it."""
    found: dict[str, list[str]] = defaultdict(list)
    for wheel in wheels:
        found[json.dumps(find(wheel, name))].append(wheel.version)
    values = {" ".join(versions): json.loads(value) for value, versions in found.items()}
    return values if len(values) > 1 else json.loads(*found)


def table(paths: Iterable[Path]) -> dict[str, Any]:
    wheels = sorted(map(Wheel, paths), key=lambda wheel: wheel.version)
    rows = {path: by_release(wheels, has, path) for path in SEAMS | ATTRIBUTES}
    defaults = {name: by_release(wheels, default, name) for name in ATTRIBUTES[ARGUMENTS]}
    rows |= {name: value for name, value in defaults.items() if value is not None}
    return {"releases": " ".join(wheel.version for wheel in wheels), **rows}


if __name__ == "__main__":
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in table(map(Path, sys.argv[1:])).items()]
    WRITTEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
