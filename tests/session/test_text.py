"""Text streams: whole characters, stop strings across token borders."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwise.session.text import TextStream


def test_a_character_waits_until_it_is_whole() -> None:
    stream = TextStream()
    data = "a€😀".encode()
    shown = [stream.feed(data[i : i + 1]) for i in range(len(data))]
    assert shown == ["a", "", "", "€", "", "", "", "😀"]
    assert stream.finish() == ""


def test_a_cut_character_becomes_a_replacement_character() -> None:
    stream = TextStream()
    assert stream.feed("😀".encode()[:2]) == ""
    assert stream.finish() == "�"


def test_what_may_become_a_stop_string_is_held_back() -> None:
    stream = TextStream(("STOP",))
    assert stream.feed(b"ab ST") == "ab "
    assert stream.feed(b"A") == "STA"
    assert stream.feed(b" S") == " "
    assert stream.feed(b"TOP and more") == ""
    assert stream.stopped
    assert stream.feed(b"x") == ""
    assert stream.finish() == ""


def test_held_text_is_given_out_at_the_end() -> None:
    stream = TextStream(("STOP",))
    assert stream.feed(b"the ST") == "the "
    assert stream.finish() == "ST"


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=3), st.data())
def test_any_cutting_gives_the_same_text(text: str, stops: list[str], data: st.DataObject) -> None:
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))
    stream = TextStream(tuple(stops))
    parts = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    shown = "".join(stream.feed(part) for part in parts) + stream.finish()
    if not any(s in text for s in stops):
        assert shown == text
    else:
        assert stream.stopped
        assert text.startswith(shown)
        assert not any(s in shown for s in stops)


@pytest.mark.parametrize("stop", ["aa", "aba", "abab"])
def test_repeating_stop_strings(stop: str) -> None:
    stream = TextStream((stop,))
    shown = "".join(stream.feed(c.encode()) for c in "xab" + stop + "rest")
    assert stream.stopped
    assert ("xab" + stop).startswith(shown)
    assert stop not in shown
