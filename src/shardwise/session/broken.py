"""What is left of a driver whose thread met something that nobody expected: nothing that it knows may be right any more.

**Promises** every session ends with an error that names what happened, later requests are refused at once, readiness says so, and
`close` still ends the workers; never a silent hang. **Called by** the session driver, in its thread.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from shardwise.errors import SessionLost

if TYPE_CHECKING:
    from shardwise.session.driver import Driver

log = logging.getLogger(__name__)

LOOK_MS = 250
HINT = "start the deployment again, and report this"


def failure_of(who: str, error: BaseException) -> SessionLost:
    """What sessions end with."""
    return SessionLost(f"the {who} failed: {type(error).__name__}: {error}", where=who, hint=HINT)


def serve_nothing(driver: Driver, error: BaseException) -> None:
    """End all sessions, and do what other threads ask for as far as that is possible, until the driver is closed."""
    log.error("the session driver failed", exc_info=error)
    driver.fail_all(failure_of("session driver", error))
    while driver.running:
        driver.bell.socket.poll(LOOK_MS)
        driver.bell.silence()
        while driver.calls:
            try:
                driver.calls.popleft()()
            except Exception:
                log.exception("after the session driver failed")
