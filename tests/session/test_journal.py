"""The journal: whatever happens to the file, reading it gives a prefix."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from shardwise.errors import UsageError
from shardwise.session.journal import AnyEvent, Ended, Generated, Journal, Opened, read_events, unfinished_sessions
from shardwise.session.request import GenerationRequest

REQUEST = GenerationRequest(prompt=(5, 6, 7), max_tokens=50)


def write(directory: Path) -> tuple[list[AnyEvent], bytes]:
    events: list[AnyEvent] = [Opened(session=1, request=REQUEST), Opened(session=2, request=REQUEST)]
    events += [Generated(session=s, position=3 + i, token=100 * s + i) for i in range(12) for s in (1, 2)]
    events += [Ended(session=1, reason="stop"), Generated(session=2, position=15, token=212)]
    journal = Journal(directory)
    for event in events:
        journal.append(event)
    journal.close()
    return events, journal.path.read_bytes()


def test_goes_on_after_a_restart(tmp_path: Path) -> None:
    write(tmp_path)
    with Journal(tmp_path) as journal:
        (session,) = journal.unfinished
        assert session.session == 2
        assert session.generated == tuple(range(200, 213))
        journal.append(Generated(session=2, position=16, token=9))
    with Journal(tmp_path) as again:
        assert again.unfinished[0].generated[-1] == 9


def test_torn_at_every_byte(tmp_path: Path) -> None:
    events, data = write(tmp_path / "whole")
    lengths = set()
    for cut in range(len(data) + 1):
        found, length, _ = read_events(data[:cut])
        assert found == events[: len(found)]
        assert length <= cut
        lengths.add(len(found))
    assert lengths == set(range(len(events) + 1))


def test_torn_file_is_repaired_and_goes_on(tmp_path: Path) -> None:
    _, data = write(tmp_path)
    path = tmp_path / "sessions.journal"
    for cut in range(0, len(data), 7):
        path.write_bytes(data[:cut])
        journal = Journal(tmp_path)
        before = read_events(path.read_bytes())[0]
        journal.append(Ended(session=2, reason="cancelled"))
        journal.close()
        assert read_events(path.read_bytes())[0] == [*before, Ended(session=2, reason="cancelled")]


def test_flipped_bits_never_give_a_wrong_token(tmp_path: Path) -> None:
    events, data = write(tmp_path)
    draw = random.Random(1)
    for _ in range(3000):
        damaged = bytearray(data)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        found = read_events(bytes(damaged))[0]
        assert found == events[: len(found)]


@pytest.mark.parametrize("change", ["swap", "repeat", "drop"])
def test_frames_out_of_place_end_the_prefix(tmp_path: Path, change: str) -> None:
    events, data = write(tmp_path)
    frames, at = [], len(b"shardwise journal 1\n")
    while at < len(data):
        size = 12 + int.from_bytes(data[at : at + 4], "little")
        frames.append(data[at : at + size])
        at += size
    if change == "swap":
        frames[5], frames[6] = frames[6], frames[5]
    elif change == "repeat":
        frames.insert(5, frames[5])
    else:
        del frames[5]
    found = read_events(b"shardwise journal 1\n" + b"".join(frames))[0]
    assert found == events[: len(found)]
    assert len(found) <= 6


def test_a_token_out_of_place_ends_the_known_part() -> None:
    events: list[AnyEvent] = [Opened(session=1, request=REQUEST)]
    events += [Generated(session=1, position=p, token=p) for p in (3, 4, 6, 7)]
    assert unfinished_sessions(events)[0].generated == (3, 4)


def test_compact_keeps_what_is_unfinished(tmp_path: Path) -> None:
    _, data = write(tmp_path)
    journal = Journal(tmp_path)
    assert journal.path.stat().st_size < len(data), "what has ended is dropped when it is opened"
    assert journal.next_session == 3, "numbers are not given twice"
    journal.append(Generated(session=2, position=16, token=1))
    journal.close()
    with Journal(tmp_path) as again:
        assert again.unfinished[0].generated == (*range(200, 213), 1)
    assert journal.path.stat().st_mode & 0o777 == 0o600


def test_it_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.session.journal.GROWTH_BYTES", 2000)
    with Journal(tmp_path) as journal:
        journal.append(Opened(session=1, request=REQUEST))
        for session in range(2, 300):
            journal.append(Opened(session=session, request=REQUEST))
            journal.append(Ended(session=session, reason="stop"))
        assert journal.path.stat().st_size < 6000
        journal.append(Generated(session=1, position=len(REQUEST.prompt), token=7))
    with Journal(tmp_path) as again:
        assert [(u.session, u.generated) for u in again.unfinished] == [(1, (7,))]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with Journal(tmp_path), pytest.raises(UsageError, match="another process"):
        Journal(tmp_path)
    Journal(tmp_path).close()


def test_a_directory_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UsageError, match="journal"):
        Journal(tmp_path / "file" / "sub")
