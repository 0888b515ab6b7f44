"""SGLang pickles its ServerArgs into request dumps, which can be read without the plugin.

A dump of a server that has not opted in is identical to one made without the plugin."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

MADE = """
import pickle, sys
from pathlib import Path
from sglang.srt.plugins import load_plugins
load_plugins()
from sglang.srt.server_args import ServerArgs
import argparse
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
for name, flags in {"stock": [], "opted_in": ["--enable-mixkv", "--mixkv-staging-mb", "7"]}.items():
    if name == "stock" or "sglang_mixkv.plugin" in sys.modules:
        args = ServerArgs.from_cli_args(parser.parse_args(["--model-path", "m", *flags]))
        (Path(sys.argv[1]) / name).write_bytes(pickle.dumps({"server_args": args}))
"""
READ = """
import pickle, sys
from pathlib import Path
sys.modules["sglang_mixkv"] = None  # as if the plugin were not installed
folder = Path(sys.argv[1])
names = "stock", "opted_in"
stock, found = (pickle.loads((folder / name).read_bytes())["server_args"] for name in names)
assert not hasattr(stock, "_mixkv")
assert (found.model_path, found._mixkv["staging_mb"]) == ("m", 7)
"""


def test_a_dump_is_read_without_the_plugin(tmp_path: Path) -> None:
    """SGLANG_PLUGINS=none makes SGLang load no plugin, as if this one were not installed."""
    others, own = tmp_path / "without", tmp_path / "with"
    runs = (MADE, others, "none"), (MADE, own, "mixkv"), (READ, own, "none")
    for text, folder, plugins in runs:
        folder.mkdir(exist_ok=True)
        environ = {**os.environ, "SGLANG_PLUGINS": plugins}
        environ.pop("SGLANG_ENABLE_MIXKV", None)
        subprocess.run([sys.executable, "-c", text, folder], env=environ, check=True, timeout=300)
    assert [one.name for one in others.iterdir()] == ["stock"]
    assert (own / "stock").read_bytes() == (others / "stock").read_bytes()
