"""Which web pages may talk to the server: its own, and origins that were named.

A page on the internet can make a browser send requests to 127.0.0.1. Two checks stop it: a server on loopback answers only to
loopback names in `Host` (DNS rebinding), and a request with a foreign `Origin` is refused before it does anything.
"""

from __future__ import annotations

import ipaddress
from urllib.parse import urlsplit

from shardwise.server.problems import Problem
from shardwise.server.settings import ServerSettings


def check_host(host: str, settings: ServerSettings) -> None:
    """Refuse foreign names on a loopback server."""
    if not settings.is_loopback or not host:
        return
    name = _hostname(f"//{host}")
    if name not in ("localhost", settings.host) and not _is_loopback_address(name):
        raise Problem(403, "this server answers to loopback names only", code="foreign_host")


def check_origin(origin: str, host: str, settings: ServerSettings) -> dict[str, str]:
    """Refuse foreign origins; returns the CORS headers for those that were named."""
    if not origin:
        return {}
    if origin in settings.cors_origins:
        return {"Access-Control-Allow-Origin": origin, "Vary": "Origin"}
    if host and _authority(origin) == host.lower():
        return {}
    raise Problem(403, "requests from this web page are not allowed; name it with --cors-origin", code="foreign_origin")


def preflight_headers(origin: str) -> dict[str, str]:
    """The answer to a browser's question before a request from a named origin."""
    return {
        "Access-Control-Allow-Origin": origin,
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Allow-Headers": "authorization, content-type, x-request-id, traceparent",
        "Access-Control-Max-Age": "600",
        "Vary": "Origin",
    }


def _is_loopback_address(name: str) -> bool:
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


def _hostname(url: str) -> str:
    try:
        return (urlsplit(url).hostname or "").lower()
    except ValueError:
        return ""


def _authority(origin: str) -> str:
    try:
        return urlsplit(origin).netloc.lower()
    except ValueError:
        return ""
