"""The check of a process that is about to use the plugin's classes.

SGLang's launcher is checked while it resolves its arguments (`plugin.py`); `check_once` checks
every other process, since the launcher may have resolved them before plugins were loaded.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from sglang.srt.arg_groups.overrides import resolved_view
from sglang.srt.configs.model_config import AttentionArch, ModelConfig
from sglang.srt.server_args import ServerArgs

from sglang_mixkv import refusals
from sglang_mixkv.config import ATTRIBUTE, Config
from sglang_mixkv.engine import releases


def stop_if(unsupported: list[str]) -> None:
    """Stop the process where something is unsupported."""
    if unsupported:
        headline, remedy = "this combination is not supported", "Change it, or drop the flag"
        releases.stop("MIXKV-START-03", headline, unsupported, remedy)


def stop_if_refused(server_args: Any, rules: tuple[refusals.Rule, ...]) -> None:
    """Stop the process where these rules, or the environment, refuse resolved arguments."""
    is_mla = partial(has_mla_target, server_args)
    stop_if(refusals.broken(rules, resolved_view(server_args), os.environ, is_mla))


def has_mla_target(server_args: Any) -> bool:
    """By the model's configuration; False where that cannot be read (arguments made by hand)."""
    try:
        model = ModelConfig.from_server_args(server_args)
        return bool(model.attention_arch == AttentionArch.MLA)
    except Exception:  # of SGLang, transformers or the model's own code
        return False


_checked: Any = None
"""The ServerArgs that this process was last checked for."""


def check_once(server_args: Any, config: Config) -> None:
    """Stop an opted-in process that SGLang's launcher did not check. Once per ServerArgs.

    Who asks for KV classes transfers KV, so `--disaggregation-mode` is not looked at: the
    manager is given its role. Of a stand-in for ServerArgs only SGLang itself is checked.
    """
    global _checked
    if server_args is _checked:
        return
    releases.preflight(config, warns=not hasattr(server_args, ATTRIBUTE))  # else its launcher has
    if isinstance(server_args, ServerArgs):
        asked = tuple(rule for rule in releases.rules() if rule is not refusals.SINGLE_SERVER)
        stop_if_refused(server_args, asked)
    _checked = server_args
