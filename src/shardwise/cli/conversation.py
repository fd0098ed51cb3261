"""A conversation: question after question from standard input, answers as they come, one document of it all with `--json`.

Where somebody sits at a terminal, Ctrl-C ends the answer that is being written; at the prompt it ends the conversation.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from shardwise.cli.common import output
from shardwise.cli.ending import cut_line, recovery_line
from shardwise.cli.generation import start
from shardwise.records import plain
from shardwise.session.request import GenerationRequest, Token

if TYPE_CHECKING:
    from shardwise.deploy import Deployment, RunOptions
    from shardwise.transport.messages import SamplingSettings

STOPPED = "interrupted"  # finish reason of an answer that Ctrl-C ended


@dataclass
class Conversation:
    """What was said, and how each answer ended."""

    deployment: Deployment
    max_tokens: int
    sampling: SamplingSettings
    stop: tuple[str, ...]
    messages: list[dict[str, Any]]
    answers: list[dict[str, Any]] = field(default_factory=list)
    num_told: int = 0  # recoveries that were told

    def ask(self, text: str) -> None:
        """One question; its answer is written as it comes."""
        self.messages.append({"role": "user", "content": text})
        request = GenerationRequest(
            prompt=tuple(self.deployment.prompt_ids(self.messages)),
            max_tokens=self.max_tokens,
            sampling=self.sampling,
            stop=self.stop,
        )
        tokens: list[Token] = []
        reason = self._stream(request, tokens)
        answer = "".join(token.text for token in tokens)
        self._tell(cut_line(tokens, request, self.deployment.options.context_tokens))
        self.answers.append(
            {"text": answer, "finish_reason": reason, "prompt_tokens": len(request.prompt), "generated_tokens": len(tokens)}
        )
        if answer or reason != STOPPED:
            self.messages.append({"role": "assistant", "content": answer})
        else:  # nothing was said: the next question takes its place
            self.messages.pop()

    def _stream(self, request: GenerationRequest, tokens: list[Token]) -> str:
        written = not output().json
        try:
            for token in self.deployment.stream(request):
                tokens.append(token)
                if written:
                    sys.stdout.write(token.text)
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if not sys.stdin.isatty():  # there is no prompt to go back to
                raise
            return STOPPED
        finally:
            if written:
                sys.stdout.write("\n")
                sys.stdout.flush()
        return tokens[-1].finish_reason

    def _tell(self, cut: str) -> None:
        recoveries = self.deployment.recoveries
        for recovery in recoveries[self.num_told :]:
            output().note(recovery_line(recovery))
        self.num_told = len(recoveries)
        if cut:
            output().note(cut)

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        model = self.deployment.model
        return {
            "messages": self.messages,
            "answers": self.answers,
            "recoveries": [plain(recovery) for recovery in self.deployment.recoveries],
            "model": {"name": model.name, "revision_digest": model.revision_digest, "quantization": model.quantization},
        }


def converse(
    model: str, options: RunOptions, *, system: str, max_tokens: int, sampling: SamplingSettings, stop: tuple[str, ...]
) -> None:
    """Launch, and talk until an empty line or the end of input."""
    out, at_terminal = output(), sys.stdin.isatty()
    with start(model, options) as deployment:
        messages = [{"role": "system", "content": system}] if system else []
        talk = Conversation(deployment, max_tokens, sampling, stop, messages)
        if at_terminal:
            out.note("Ctrl-D or an empty line ends the conversation, Ctrl-C an answer")
        while text := _next_question(at_terminal):
            talk.ask(text)
    if out.json:
        out.document(talk.document())


def _next_question(at_terminal: bool) -> str:
    """The next line of the user, or nothing at the end."""
    if at_terminal:
        output().stderr.print("> ", end="")
    return sys.stdin.readline().strip()
