"""Who is being served at this moment, in figures only: no prompt and no text is ever kept here."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shardwise.clock import Clock


@dataclass(slots=True)
class Active:
    """One request in flight."""

    id: str
    client: str
    endpoint: str
    prompt_tokens: int
    max_tokens: int
    choices: int
    started_s: float
    generated_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: float | None = None

    def as_dict(self, now_s: float) -> dict[str, Any]:
        """For the live view."""
        if self.first_token_s is None:
            state, rate = "waiting", None
        else:
            state = "paused" if now_s - (self.last_token_s or now_s) > 2.0 else "generating"
            busy_s = (self.last_token_s or now_s) - self.first_token_s
            rate = (self.generated_tokens - 1) / busy_s if busy_s > 0 else None
        return {
            "id": self.id,
            "client": self.client,
            "endpoint": self.endpoint,
            "state": state,
            "prompt_tokens": self.prompt_tokens,
            "generated_tokens": self.generated_tokens,
            "max_tokens": self.max_tokens,
            "age_s": now_s - self.started_s,
            "tokens_per_s": rate,
            "time_to_first_token_s": None if self.first_token_s is None else self.first_token_s - self.started_s,
        }


@dataclass(slots=True)
class Activity:
    """All requests in flight, and totals."""

    clock: Clock
    active: dict[str, Active] = field(default_factory=dict)
    total_requests: int = 0
    total_generated_tokens: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count_token(self) -> None:
        """From any thread."""
        with self._lock:
            self.total_generated_tokens += 1

    def free_id(self, wanted: str) -> str:
        """An id that no request in flight has: clients may name theirs, and name two alike."""
        found, number = wanted, 1
        while found in self.active:
            number += 1
            found = f"{wanted}-{number}"
        return found

    def begin(self, active: Active) -> None:
        self.total_requests += 1
        self.active[active.id] = active

    def end(self, active: Active) -> None:
        self.active.pop(active.id, None)

    def rows(self) -> Iterator[dict[str, Any]]:
        """Oldest first."""
        now_s = self.clock.now_s()
        return (active.as_dict(now_s) for active in list(self.active.values()))
