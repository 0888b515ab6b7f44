"""Whether a server's accept length is made up: SGLANG_SIMULATE_ACC_LEN, a knob for benchmarks.

With it SGLang 0.5.23 accepts so many drafts a round whatever they are (speculative/spec_utils.py,
dflash_utils.py), so nothing is known of the drafter's KV. A server shows its variables at
/server_info only with SGLANG_EXPOSE_OWN_ENV_VARS=1. Its answers show the knob too unless
SGLANG_SIMULATE_ACC_TOKEN_MODE is real-draft-token: each verified token is the same, FIXED_TOKEN.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

VARIABLE = "SGLANG_SIMULATE_ACC_LEN"
FIXED_TOKEN = 100
ENOUGH_TOKENS = 16
"""In a row; fewer can be an answer."""

TIMEOUT_S = 10


def is_set(variables: Mapping[str, Any]) -> bool:
    """Whether these variables make SGLang make acceptance up."""
    try:
        return float(variables.get(VARIABLE) or -1) > 0
    except ValueError:
        return False  # SGLang falls back to its default, with a warning


def server_info(url: str) -> Any:
    """What a server, or a router of its servers, says of itself; None where it says nothing."""
    import requests  # the doctor does without

    from sglang_mixkv.tools.client import session

    with session() as made:
        for path in ("server_info", "get_server_info"):
            try:
                answer = made.get(f"{url.rstrip('/')}/{path}", timeout=TIMEOUT_S)
                if answer.status_code == requests.codes.ok:
                    return answer.json()
            except (requests.RequestException, ValueError):
                continue
    return None


def shown(info: Any) -> bool:
    """Whether one of the servers in this information shows the variable."""
    if isinstance(info, Mapping):
        variables = info.get("env_vars")
        own = isinstance(variables, Mapping) and is_set(variables)
        return own or any(shown(part) for part in info.values())
    return isinstance(info, list) and any(shown(part) for part in info)


def answered(outputs: Iterable[Sequence[int]]) -> bool:
    """Whether an output is nothing but the token that SGLang makes up, behind prefill's."""
    return any(len(o) > ENOUGH_TOKENS and set(o[1:]) == {FIXED_TOKEN} for o in outputs)


def reason(url: str, outputs: Iterable[Sequence[int]] = ()) -> str | None:
    """Why nothing can be judged by the acceptance at `url`; None where it can be judged."""
    if shown(server_info(url)):
        sign = "a server there shows it in its variables"
    elif answered(outputs):
        sign = f"an output there is token {FIXED_TOKEN} and nothing else"
    else:
        return None
    return (
        f"{url} makes its accept length up: {sign}. {VARIABLE} accepts drafts whatever they are, "
        "so a broken drafter would look right. Restart its servers without the variable."
    )
