"""What a running server answers at GET /server_info."""

from __future__ import annotations

from typing import Any

import requests

from sglang_mixkv.config import API_KEY_ENV
from sglang_mixkv.tools.client import session
from sglang_mixkv.tools.plan_line import unreadable

TIMEOUT_S = 10
# The first that fits.
_WHY: tuple[tuple[type[Exception], str], ...] = (
    (requests.JSONDecodeError, "no JSON. Give the server's own URL, not a router's"),
    (requests.Timeout, "no answer in time. Try again, or give its launch line"),
    (
        requests.exceptions.SSLError,
        "no TLS connection. Try http://, or set REQUESTS_CA_BUNDLE to its certificates",
    ),
    (
        requests.ConnectionError,
        "no connection. Start the server, correct the URL, or give its launch line",
    ),
)


def server_info(url: str) -> dict[str, Any]:
    """Raises MixKVError with what to do."""
    address = f"{url.rstrip('/')}/server_info"
    try:
        with session() as made:
            reply = made.get(address, timeout=TIMEOUT_S)
            reply.raise_for_status()
            return dict(reply.json())
    except requests.HTTPError as error:
        why = f"HTTP {error.response.status_code}. Give the server's own URL, not a router's"
        if error.response.status_code == requests.codes.unauthorized:
            why = f"HTTP 401. Put the server's --api-key into {API_KEY_ENV}"
    except (OSError, ValueError, TypeError) as error:
        why = next((text for kind, text in _WHY if isinstance(error, kind)), str(error))
    raise unreadable(f"{address}: {why}")
