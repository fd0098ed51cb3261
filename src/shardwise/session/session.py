"""One request across the stages: everything needed to go on after a fault, and nothing else.

A session is the token ids (prompt and generated), the sampling settings with the session seed, and an epoch. Opening it
again with a higher epoch replays it; tokens that were already given out are not given out twice.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from shardwise.errors import SessionError, ShardwiseError
from shardwise.records import Record, replace
from shardwise.session.request import GenerationRequest, Recovery, Token
from shardwise.session.text import TextStream, Tokenizer
from shardwise.transport.messages import OpenSession, Sampled

log = logging.getLogger(__name__)

OnEvent = Callable[["Token | ShardwiseError"], None]


class Interruption(Record):
    """A fault that holds a session up."""

    cause: str
    since_s: float
    at_token: int
    action: str = ""
    grade: str = "exact"
    predicted_stall_s: float = 0.0


class Session:
    """State of one generation. Used by the driver's thread only."""

    def __init__(
        self, number: int, request: GenerationRequest, tokenizer: Tokenizer, on_event: OnEvent, submitted_s: float
    ) -> None:
        self.number = number
        self.request = request
        self.epoch = 0
        self.generated: list[int] = []
        self.recoveries: list[Recovery] = []
        self.finished = False
        self.journalled = False
        self.restored_tokens = 0  # positions that rebuilt stages get from checkpoints when it is opened next
        self.submitted_s = submitted_s
        self.last_event_s = submitted_s
        self._interrupted: Interruption | None = None
        self._tokenizer = tokenizer
        self._on_event = on_event
        self._text = TextStream(request.stop)

    @property
    def next_position(self) -> int:
        """Position of the next token to be sampled."""
        return len(self.request.prompt) + len(self.generated)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The prompt and what was generated."""
        return (*self.request.prompt, *self.generated)

    def opening(self, *, fast: bool = False, resume: bool = False) -> OpenSession:
        """The message that begins, or begins again, this session on the stages."""
        request = self.request
        return OpenSession(
            session=self.number,
            epoch=self.epoch,
            tokens=self.tokens,
            num_prompt=len(request.prompt),
            max_tokens=request.max_tokens,
            stop_ids=() if request.ignore_eos else self._tokenizer.eog_ids,
            sampling=request.sampling,
            traced=request.traced,
            fast_replay=fast,
            start_position=self.restored_tokens if resume else 0,
            resume=resume,
        )

    def interrupt(self, cause: str) -> None:
        """A fault has stopped this session; the stall counts from its last token."""
        if self._interrupted is None:
            self._interrupted = Interruption(cause=cause, since_s=self.last_event_s, at_token=len(self.generated))

    def resumed(self, action: str, grade: str, predicted_stall_s: float) -> None:
        """It was opened again by `action`; the next token ends the stall."""
        if self._interrupted is not None:
            self._interrupted = replace(self._interrupted, action=action, grade=grade, predicted_stall_s=predicted_stall_s)

    def restored(self) -> None:
        """Rebuilt stages hold its rows up to a checkpoint."""
        if self._interrupted is not None:
            how = f"{self._interrupted.action}, from a checkpoint of {self.restored_tokens} tokens"
            self._interrupted = replace(self._interrupted, action=how, grade="exact")

    def _end_stall(self, now_s: float) -> None:
        stall = self._interrupted
        if stall is not None and stall.action:
            self._interrupted = None
            self.recoveries.append(
                Recovery(
                    at_token=stall.at_token,
                    cause=stall.cause,
                    action=stall.action,
                    stall_s=now_s - stall.since_s,
                    grade=stall.grade,
                    predicted_stall_s=stall.predicted_stall_s,
                )
            )

    def restore(self, generated: tuple[int, ...]) -> None:
        """Take over tokens that an earlier driver gave out already."""
        for token in generated:
            self.generated.append(token)
            self._text.feed(self._tokenizer.token_bytes(token))

    def is_due(self, sampled: Sampled) -> bool:
        """False for another epoch, a duplicate, or after the end."""
        return not self.finished and sampled.epoch == self.epoch and sampled.position == self.next_position

    def accept(self, sampled: Sampled, now_s: float) -> bool:
        """Take a token that is due and give it out; False where it is not."""
        if not self.is_due(sampled):
            return False
        self.generated.append(sampled.token)
        self._end_stall(now_s)
        ends = sampled.finish == "stop"
        text = "" if ends else self._text.feed(self._tokenizer.token_bytes(sampled.token))
        reason = sampled.finish
        if self._text.stopped:
            reason = "stop"
        elif reason:
            text += self._text.finish()
        self.finished = bool(reason)
        self.last_event_s = now_s
        self._tell(
            Token(
                id=sampled.token,
                text=text,
                position=sampled.position,
                logprob=sampled.logprob,
                top=sampled.top,
                finish_reason=reason,
                elapsed_s=now_s - self.submitted_s,
                visits=sampled.visits,
            )
        )
        return True

    def cancel(self, now_s: float) -> None:
        """End with what there is."""
        if self.finished:
            return
        self.finished = True
        last = self.generated[-1] if self.generated else -1
        self._tell(
            Token(
                id=last,
                text=self._text.finish(),
                position=self.next_position,
                finish_reason="cancelled",
                elapsed_s=now_s - self.submitted_s,
            )
        )

    def fail(self, error: ShardwiseError) -> None:
        """End with an error."""
        if not self.finished:
            self.finished = True
            self._tell(error)

    def _tell(self, event: Token | ShardwiseError) -> None:
        """Whoever listens is not ours: where it raises, this session is over, and no other one."""
        try:
            self._on_event(event)
        except BaseException as error:  # a SystemExit, too, would end the driver's thread
            log.exception("the listener of session %d raised", self.number)
            if not self.finished:
                self.fail(SessionError(f"the listener raised {type(error).__name__}: {error}", where=f"session {self.number}"))
