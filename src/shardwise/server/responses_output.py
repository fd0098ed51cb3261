"""Generated tokens -> the objects and events of OpenAI's Responses API."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from typing import Any

from shardwise.server import sse
from shardwise.server.chat_output import ChatChoice
from shardwise.server.problems import Problem
from shardwise.server.schemas.responses import ResponseRequest
from shardwise.server.toolcalls import ToolCall
from shardwise.session.request import Token

Item = dict[str, Any]


class ResponseOutput:
    """One response as it grows: a message, calls, or both; `feed` gives the events of a token."""

    def __init__(self, head: dict[str, Any], choice: ChatChoice, num_prompt: int) -> None:
        self._head = head
        self._choice = choice
        self._num_prompt = num_prompt
        self._num_generated = 0
        self._items: list[Item] = []
        self._open_text = False
        self._sequence = 0

    def opening(self) -> bytes:
        """`response.created` and `response.in_progress`."""
        snapshot = self.as_dict("in_progress")
        return self._event("response.created", response=snapshot) + self._event("response.in_progress", response=snapshot)

    def piece(self, choice: int, token: Token) -> bytes:
        """The events of one token; there is only one choice."""
        return self.feed(token)

    def feed(self, token: Token) -> bytes:
        """What one token makes known."""
        self._num_generated += 1
        out = []
        for piece in self._choice.feed(token):
            out += list(self._call(piece) if isinstance(piece, ToolCall) else self._text(piece))
        if self._choice.finish_reason:
            out += self._close_text()
        return b"".join(out)

    def ending(self) -> bytes:
        """`response.completed`, or `response.incomplete` where the length was reached."""
        status = self.status
        return self._event(f"response.{status}", response=self.as_dict(status))

    def failed(self, problem: Problem) -> bytes:
        """`response.failed`: the generation broke on the way."""
        error = problem.body["error"]
        reason = {"code": error.get("code") or "server_error", "message": error.get("message", "")}
        return self._event("response.failed", response=self.as_dict("failed") | {"error": reason})

    @property
    def status(self) -> str:
        return "incomplete" if self._choice.finish_reason == "length" else "completed"

    def as_dict(self, status: str) -> dict[str, Any]:
        """The response object of this moment."""
        generated = self._num_generated
        counts = {
            "input_tokens": self._num_prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": generated,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": self._num_prompt + generated,
        }
        return self._head | {
            "status": status,
            "output": self._items,
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "usage": None if status == "in_progress" else counts,
        }

    def _text(self, text: str) -> Iterator[bytes]:
        if not self._open_text:
            item: Item = {
                "id": f"msg_{secrets.token_hex(12)}",
                "type": "message",
                "status": "in_progress",
                "role": "assistant",
                "content": [],
            }
            yield self._added(item)
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            yield self._event("response.content_part.added", **self._place(content=True), part=dict(part))
            item["content"] = [part]
            self._open_text = True
        self._items[-1]["content"][0]["text"] += text
        yield self._event("response.output_text.delta", **self._place(content=True), delta=text, logprobs=[])

    def _close_text(self) -> Iterator[bytes]:
        if not self._open_text:
            return
        self._open_text = False
        item = self._items[-1]
        part = item["content"][0]
        item["status"] = "completed"
        yield self._event("response.output_text.done", **self._place(content=True), text=part["text"], logprobs=[])
        yield self._event("response.content_part.done", **self._place(content=True), part=part)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _call(self, call: ToolCall) -> Iterator[bytes]:
        yield from self._close_text()
        item: Item = {
            "id": f"fc_{secrets.token_hex(12)}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": call.name,
            "arguments": "",
        }
        yield self._added(item)
        yield self._event("response.function_call_arguments.delta", **self._place(), delta=call.arguments)
        item |= {"arguments": call.arguments, "status": "completed"}
        yield self._event("response.function_call_arguments.done", **self._place(), name=call.name, arguments=call.arguments)
        yield self._event("response.output_item.done", output_index=len(self._items) - 1, item=item)

    def _added(self, item: Item) -> bytes:
        self._items.append(item)
        return self._event("response.output_item.added", output_index=len(self._items) - 1, item=item)

    def _place(self, *, content: bool = False) -> dict[str, Any]:
        place: dict[str, Any] = {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}
        return place | {"content_index": 0} if content else place

    def _event(self, kind: str, **fields: Any) -> bytes:
        self._sequence += 1
        return sse.named(kind, {"type": kind, "sequence_number": self._sequence - 1, **fields})


def response_head(body: ResponseRequest, response_id: str, created_s: float, model: str) -> dict[str, Any]:
    """The fields of a response that do not change."""
    return {
        "id": response_id,
        "object": "response",
        "created_at": int(created_s),
        "model": model,
        "error": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": 1.0 if body.temperature is None else body.temperature,
        "top_p": 1.0 if body.top_p is None else body.top_p,
        "text": {"format": _format(body)},
        "tool_choice": body.tool_choice if isinstance(body.tool_choice, str) else _choice(body),
        "tools": [tool.model_dump() for tool in body.tools or []],
        "truncation": "disabled",
    }


def _choice(body: ResponseRequest) -> Any:
    return "auto" if body.tool_choice is None or isinstance(body.tool_choice, str) else body.tool_choice.model_dump()


def _format(body: ResponseRequest) -> Any:
    wanted = body.text.format if body.text is not None else None
    return {"type": "text"} if wanted is None else wanted.model_dump(by_alias=True, exclude_none=True)
