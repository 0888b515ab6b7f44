"""One server as its GET /server_info describes it."""

from __future__ import annotations

from typing import Any

import requests

from sglang_mixkv.errors import MixKVError
from sglang_mixkv.tools.client import API_KEY_ENV, session
from sglang_mixkv.tools.plan_flags import Server, about, from_line

TIMEOUT_S = 10


def from_url(role: str, url: str, line: str = "") -> Server:
    """A running server; the line's flags win over what it says. Raises MixKVError."""
    with about(role):
        said = _server_info(f"{url.rstrip('/')}/server_info")
    return from_line(role, line, said)


def _server_info(address: str) -> dict[str, Any]:
    try:
        with session() as made:
            reply = made.get(address, timeout=TIMEOUT_S)
            reply.raise_for_status()
            found = reply.json()
    except (OSError, ValueError) as error:
        raise MixKVError("MIXKV-START-04", f"{address}: {_why(error)}.") from None
    if not isinstance(found, dict):
        raise MixKVError("MIXKV-START-04", f"{address}: expected a JSON object.")
    return found


def _why(error: Exception) -> str:
    """Why there is no answer, and what to do."""
    if isinstance(error, requests.HTTPError):
        status = error.response.status_code
        if status == requests.codes.unauthorized:
            return f"HTTP 401: it asks for a key. Put that of --api-key into {API_KEY_ENV}"
        return f"expected HTTP 200; got {status}. Give the server's own URL, not a router's"
    if isinstance(error, requests.JSONDecodeError):
        return "expected JSON; got something else. Give the server's own URL, not a router's"
    if isinstance(error, requests.Timeout):
        return f"no answer within {TIMEOUT_S} s. Try again, or give its launch line"
    if isinstance(error, requests.exceptions.SSLError):
        return "no TLS connection. Try http://, or set REQUESTS_CA_BUNDLE to its certificates"
    if isinstance(error, requests.ConnectionError):
        return "no connection. Start the server, correct the URL, or give its launch line"
    return str(error)
