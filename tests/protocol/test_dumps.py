"""SGLang pickles its ServerArgs into request dumps, which can be read without the plugin.

A dump of a server that has not opted in is identical to one made without the plugin."""

from __future__ import annotations

import argparse
import os
import pickle
import subprocess
import sys
from pathlib import Path

from .launchers import Call

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


def dumps(own: list[str]) -> tuple[bytes, bytes | None]:
    """Return a dump without the plugin's flags, and one with them if the plugin is loaded."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)

    def dump(flags: list[str]) -> bytes:
        args = ServerArgs.from_cli_args(parser.parse_args(["--model-path", "m", *flags]))
        return pickle.dumps({"server_args": args})

    is_loaded = any("--enable-mixkv" in one.option_strings for one in parser._actions)
    return dump([]), dump(own) if is_loaded else None


def test_a_dump_is_read_without_the_plugin(sglang_with_plugin: Call, tmp_path: Path) -> None:
    """SGLANG_PLUGINS=none makes SGLang load no plugin, as if this one were not installed."""
    flags = ["--enable-mixkv", "--mixkv-staging-mb", "7"]
    without, opted_in = sglang_with_plugin(dumps, flags, SGLANG_PLUGINS="none").value
    assert opted_in is None
    stock, opted_in = sglang_with_plugin(dumps, flags, SGLANG_PLUGINS="mixkv").value
    assert stock == without
    (tmp_path / "stock").write_bytes(stock)
    (tmp_path / "opted_in").write_bytes(opted_in)
    environ = {**os.environ, "SGLANG_PLUGINS": "none"}
    subprocess.run([sys.executable, "-c", READ, tmp_path], env=environ, check=True, timeout=300)
