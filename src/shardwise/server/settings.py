"""Settings of the server. Everything has a bound; nothing is open to the outside unless it is asked for."""

from __future__ import annotations

import ipaddress

from shardwise.errors import UsageError
from shardwise.records import Record


class ServerSettings(Record):
    """What `shardwise serve` may be told. Sizes in bytes, times in seconds."""

    host: str = "127.0.0.1"
    port: int = 8000
    alias: tuple[str, ...] = ()  # further names under which the model answers
    cors_origins: tuple[str, ...] = ()  # closed unless named
    max_body_bytes: int = 4 * 2**20
    body_timeout_s: float = 30.0
    max_choices: int = 16  # largest n
    max_stop_sequences: int = 16
    max_schema_bytes: int = 64 * 2**10
    max_tools: int = 128
    max_batch_prompts: int = 32  # prompts in one /v1/completions request
    keepalive_s: float = 10.0  # a comment on a stream that waits
    drain_s: float = 30.0
    trace_endpoint: str = ""  # OTLP over HTTP; empty = no export

    @property
    def is_loopback(self) -> bool:
        """True where only this machine can connect."""
        if self.host == "localhost":
            return True
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return False


def check_exposure(settings: ServerSettings, *, has_keys: bool) -> None:
    """Refuse to serve the network without a key."""
    if not settings.is_loopback and not has_keys:
        raise UsageError(
            f"--host {settings.host} can be reached by other machines, and there is no API key",
            where="shardwise serve",
            hint="give --api-key-file FILE (make a key with --new-api-key NAME), or keep --host 127.0.0.1",
        )
