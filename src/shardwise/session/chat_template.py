"""The model's own chat template, rendered in a sandbox.

A template comes with the weights, from anybody: it runs in Jinja's immutable sandbox, without access to Python, and with
a limit on its output. Fails with `UsageError` where the model has none, or the messages do not suit it.
"""

from __future__ import annotations

import datetime
import json
from typing import Any, NoReturn

from shardwise.errors import UsageError

MAX_RENDERED = 16 * 2**20


def _raise(message: str) -> NoReturn:
    from jinja2 import TemplateError

    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **_: Any) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def render_chat(
    template: str | None,
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    bos_token: str = "",
    eos_token: str = "",
) -> str:
    """The prompt text of a conversation."""
    if not template:
        raise UsageError("the model has no chat template", hint="give a plain prompt, or use an instruct model")
    import jinja2  # here: a model's start does not wait for it, the first conversation does (20 ms)
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"], undefined=jinja2.ChainableUndefined
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    try:
        pieces: list[str] = []
        size = 0
        for piece in environment.from_string(template).generate(
            messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, bos_token=bos_token, eos_token=eos_token
        ):
            size += len(piece)
            if size > MAX_RENDERED:
                raise UsageError("the rendered conversation is too long", where="messages")
            pieces.append(piece)
    except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"the model's chat template refused the messages: {error}", where="messages") from error
    return "".join(pieces)
