"""What `Driver.submit` returns."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.session.session import Session

if TYPE_CHECKING:
    from shardwise.session.driver import Driver


class SessionHandle:
    """One running session, from any thread."""

    def __init__(self, driver: Driver, session: Session) -> None:
        self._driver, self._session = driver, session

    @property
    def number(self) -> int:
        return self._session.number

    @property
    def session(self) -> Session:
        return self._session

    def cancel(self) -> None:
        """End the session; its KV is freed on every stage. Harmless after the end."""
        self._driver.call(lambda: self._driver.end(self._session, cancelled=True))
