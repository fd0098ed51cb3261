"""Chat templates run in a sandbox and fail with one clear line."""

from __future__ import annotations

import pytest

from shardwise.errors import UsageError
from shardwise.session.chat_template import render_chat

MESSAGES = [{"role": "user", "content": "Hi"}]


def test_renders_messages() -> None:
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
    assert render_chat(template, MESSAGES) == "<user>Hi<a>"
    assert render_chat(template, MESSAGES, add_generation_prompt=False) == "<user>Hi"


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ raise_exception('no system role') }}",
        "{{ unclosed",
        "{% for a in 5 %}{% endfor %}",
    ],
)
def test_hostile_and_broken_templates_are_refused(template: str) -> None:
    with pytest.raises(UsageError, match=r"template|too long"):
        render_chat(template, MESSAGES)


def test_nothing_of_python_is_reachable() -> None:
    assert render_chat("[{{ cycler.__init__.__globals__ }}]", MESSAGES) == "[]"


def test_no_template() -> None:
    with pytest.raises(UsageError, match="no chat template"):
        render_chat(None, MESSAGES)


def test_output_is_bounded() -> None:
    with pytest.raises(UsageError):
        render_chat("{% for i in range(90000) %}" + "x" * 1000 + "{% endfor %}", MESSAGES)
