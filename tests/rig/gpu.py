"""The modules of scripts/gpu.sh, which are no package."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "scripts" / "gpu"


def load(name: str) -> Any:
    places = [str(FOLDER), str(ROOT / "scripts" / "bench")]
    with mock.patch.object(sys, "path", [*places, *sys.path]):
        return importlib.import_module(name)
