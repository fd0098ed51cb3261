"""The whole error tree.

    ShardwiseError
    + UsageError(ValueError)        an option or a config: names the field, the value, what is allowed
    + ModelError
      + UnsupportedModelError       an architecture or quantization that is not proved
      + CorruptWeightsError         file, expected, actual
    + PlanError
      + NoFeasiblePlanError         rejections, with the nearest miss in bytes
    + CompatibilityError
      + ProtocolMismatch            both sides' values
      + ManifestMismatch            both sides' values
    + NetworkError
      + ConnectFailed, ConnectTimeout, ReplyTimeout, PeerClosed, AuthenticationFailed
    + StageError
      + StageLoadFailed, StageOutOfMemory, StageCrashed, RemoteFailure
    + SessionError
      + SessionLost, ContextFull, QueueFull
    + MissingExtraError             names the command that installs it

Every error carries WHAT (the message), WHERE (`where`) and TRY (`hint`); the command line prints them as
one line, `error: WHAT (WHERE); TRY`. `exit_code` and `retryable` are attributes of the class.
"""

from __future__ import annotations

import functools
import os
import shlex
import sys
from pathlib import Path
from typing import Any, ClassVar


class ShardwiseError(Exception):
    """Base of all errors that shardwise raises on purpose."""

    exit_code: ClassVar[int] = 5
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, *, where: str = "", hint: str = "", **details: Any) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.hint = hint
        self.details = details

    def __str__(self) -> str:
        return self.one_line()

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.where, self.hint, self.details))

    def one_line(self) -> str:
        """`WHAT (WHERE); TRY` on one line."""
        where = f" ({self.where})" if self.where else ""
        hint = f"; {self.hint}" if self.hint else ""
        return " ".join(f"{self.message}{where}{hint}".split())

    def as_dict(self) -> dict[str, Any]:
        """The `error` object of `--json` output."""
        out: dict[str, Any] = {"type": type(self).__name__, "message": self.message, "hint": self.hint}
        if self.where:
            out["where"] = self.where
        return out | {name: value for name, value in self.details.items() if name not in out}


def _rebuild(cls: type[ShardwiseError], message: str, where: str, hint: str, details: dict[str, Any]) -> ShardwiseError:
    """Details come from another process: they may have any names."""
    error = cls(message, where=where, hint=hint)
    error.details = dict(details)
    return error


class UsageError(ShardwiseError, ValueError):
    """A wrong option, argument or configuration value."""

    exit_code = 2


class ModelError(ShardwiseError):
    """The model cannot be read or used."""

    exit_code = 2


class UnsupportedModelError(ModelError):
    """An architecture or quantization for which no parity test exists."""


class CorruptWeightsError(ModelError):
    """A weight file is not what it claims to be (details: file, expected, actual)."""

    exit_code = 4


class MalformedModelError(ModelError):
    """A file that is not a readable model: wrong magic, truncated, or with a header that lies."""


class PlanError(ShardwiseError):
    """Planning failed."""

    exit_code = 3


class NoFeasiblePlanError(PlanError):
    """Nothing fits. `details["rejections"]` always tells the nearest miss, in bytes."""


class CompatibilityError(ShardwiseError):
    """Two peers do not hold the same thing; nothing is served."""

    exit_code = 4


class ProtocolMismatch(CompatibilityError):
    """The peers speak different protocol versions."""


class ManifestMismatch(CompatibilityError):
    """The peers hold different models, tokenizers, splits or deployments."""


class NetworkError(ShardwiseError):
    """A peer cannot be reached or does not answer."""

    retryable = True


class ConnectFailed(NetworkError):
    """The connection was refused."""


class ConnectTimeout(NetworkError):
    """No connection within the deadline."""


class ReplyTimeout(NetworkError):
    """No reply within the deadline."""


class PeerClosed(NetworkError):
    """The peer closed the connection."""


class AuthenticationFailed(NetworkError):
    """The peer has no valid key."""

    exit_code = 4
    retryable = False


class StageError(ShardwiseError):
    """A stage failed."""


class StageLoadFailed(StageError):
    """The stage could not load its slice."""


class StageOutOfMemory(StageError):
    """The stage does not fit into the memory it may use (details: needed_bytes, available_bytes)."""

    exit_code = 3


class StageCrashed(StageError):
    """The worker process ended (details: exit_status, log_tail)."""

    retryable = True


class RemoteFailure(StageError):
    """A failure that happened in a worker, carried over as a record."""


class SessionError(ShardwiseError):
    """A request failed."""


class SessionLost(SessionError):
    """The request could not be finished; the message tells what was tried."""


class ContextFull(SessionError):
    """The context has no room for more tokens (details: needed_tokens, context_tokens)."""

    exit_code = 2


class QueueFull(SessionError):
    """Admission refused the request."""

    retryable = True


class MissingExtraError(ShardwiseError):
    """An optional dependency is not installed; the hint is the command that installs it."""

    exit_code = 2

    @classmethod
    def for_extra(cls, extra: str, needed_for: str) -> MissingExtraError:
        """The error for a missing extra, e.g. `for_extra("ray", "cluster up")`."""
        return cls(f"{needed_for} needs the extra '{extra}'", hint=install_command(extra))


@functools.cache
def bootstrap_tool() -> Path | None:
    """`tools/bootstrap.py` where this is a checkout; there pip knows no shardwise."""
    tool = Path(__file__).resolve().parents[2] / "tools" / "bootstrap.py"
    return tool if tool.is_file() else None


def install_command(extra: str) -> str:
    """What to type for an extra; in a checkout its own tool adds it to what is there."""
    tool = bootstrap_tool()
    return f"pip install 'shardwise[{extra}]'" if tool is None else f"python3 {_from_here(tool)} {extra}"


def pip_command(packages: str) -> str:
    """`... pip install PACKAGES` with the Python that runs this: another one's pip would install for somebody else."""
    return f"{_from_here(Path(sys.executable))} -m pip install {packages}"


def _from_here(path: Path) -> str:
    """As it can be typed in the folder where the command runs."""
    try:
        here = os.getcwd()
    except OSError:
        return shlex.quote(str(path))
    return shlex.quote(os.path.relpath(path, here) if path.is_relative_to(here) else str(path))


def from_record(
    kind: str, message: str, where: str = "", hint: str = "", details: dict[str, Any] | None = None
) -> ShardwiseError:
    """Rebuild an error that crossed a process as plain data; unknown kinds become `RemoteFailure`."""
    cls = globals().get(kind)
    if not (isinstance(cls, type) and issubclass(cls, ShardwiseError)):
        cls = RemoteFailure
    return _rebuild(cls, message, where, hint, details or {})
