"""Whether generation works, truthfully: a token came through every stage within the last three probe intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shardwise.session.request import Readiness

if TYPE_CHECKING:
    from shardwise.session.driver import Driver


def readiness_of(driver: Driver) -> Readiness:
    """Now; from any thread."""
    if driver.failure is not None:
        return Readiness(ready=False, reason=driver.failure.one_line())
    if (unwritten := driver.journalling.failure) is not None:
        return Readiness(ready=False, reason=unwritten.one_line())
    if driver.recovering:
        return Readiness(ready=False, reason=driver.recovering)
    if not driver.connected:
        share = len(driver.peers.ready) / driver.num_stages
        return Readiness(ready=False, reason="stages are loading", loading_progress=share)
    age_s = None if driver.last_token_s is None else driver.clock.now_s() - driver.last_token_s
    limit_s = 3 * (driver.settings.probe_interval_s or float("inf"))
    if age_s is None or age_s > limit_s:
        return Readiness(ready=False, reason="no token came through all stages lately", last_token_age_s=age_s)
    return Readiness(ready=True, last_token_age_s=age_s)
