"""What huggingface_hub raises -> shardwise's errors. The only place that knows its exceptions."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from shardwise.errors import ConnectFailed, ModelError, UsageError

_DISK = {errno.ENOSPC: "the disk is full", errno.EACCES: "the cache may not be written", errno.EROFS: "the disk is read-only"}


@contextmanager
def mapped_hub_errors(where: str) -> Iterator[None]:
    """Everything that a request to the Hub or its cache can raise."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        hint = "ask for access on its page, then set HF_TOKEN"
        raise ModelError("this repository is closed to you", where=where, hint=hint) from error
    except (errors.RepositoryNotFoundError, errors.RevisionNotFoundError, errors.EntryNotFoundError) as error:
        what = {errors.RepositoryNotFoundError: "repository", errors.RevisionNotFoundError: "revision"}.get(type(error), "file")
        hint = "check the spelling; closed ones need HF_TOKEN"
        raise ModelError(f"there is no such {what} on the Hub", where=where, hint=hint) from error
    except errors.OfflineModeIsEnabled as error:
        raise ConnectFailed("HF_HUB_OFFLINE forbids to ask the Hub", where=where, hint="unset it") from error
    except errors.HFValidationError as error:
        raise UsageError(f"this is no name of a repository: {error}", where=where, field="MODEL") from error
    except (errors.HTTPError, OSError) as error:
        disk = _DISK.get(getattr(error, "errno", None) or 0)
        if disk is not None:
            raise ModelError(disk, where=where, hint="free some space, or set HF_HOME to another disk") from error
        hint = "check the network and HF_ENDPOINT; a download goes on where it stopped"
        raise ConnectFailed(f"the Hub does not answer: {_short(error)}", where=where, hint=hint) from error


def _short(error: Exception) -> str:
    text = str(error).splitlines()
    return text[0][:200] if text else type(error).__name__
