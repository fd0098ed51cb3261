"""What every `StageBackend` must do. A test class per backend inherits this and brings `open_stages`.

A chain of two stages of one model is driven by hand; what is compared is compared to the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest

from shardwise.errors import ContextFull, RemoteFailure, ShardwiseError, StageLoadFailed, UsageError
from shardwise.stage.backend import BatchSegment, Floats, StageBackend, Tokens
from shardwise.transport.messages import SamplingSettings

Stages = list[StageBackend]
PROMPT = [5, 9, 200, 31, 7, 64, 12, 80, 3, 150, 41, 22]
OTHER = [17, 2, 91, 60, 130, 8, 44, 19, 77, 5, 101, 33]


def run(stages: Stages, *parts: tuple[int, int, list[int]], sample: bool = True) -> Floats:
    """Logits [S, V] of one batch through the chain; parts are (slot, position, tokens)."""
    segments = [BatchSegment(slot, position, len(tokens), sample) for slot, position, tokens in parts]
    x_TH = stages[0].embed(np.array([t for _, _, tokens in parts for t in tokens], dtype=np.int32))
    for stage in stages[:-1]:
        output = stage.forward(segments, x_TH)
        assert output.logits_SV is None
        assert output.activations_TH is not None
        x_TH = output.activations_TH
    output = stages[-1].forward(segments, x_TH)
    assert output.activations_TH is None
    assert output.logits_SV is not None
    return output.logits_SV.copy()


def rollback(stages: Stages, slot: int, position: int) -> None:
    for stage in stages:
        stage.rollback(slot, position)


def same_bits(one: Floats, other: Floats) -> bool:
    return np.array_equal(one.view(np.uint32), other.view(np.uint32))


class BackendContract:
    """Promises of `StageBackend`, one test each. `stages`: first and last, 64 positions, 3 slots, at most 16 rows a chunk."""

    open_stages: Callable[[], AbstractContextManager[Stages]]  # a fresh chain

    @pytest.fixture
    def stages(self) -> object:
        with self.open_stages() as made:
            yield made

    def test_shapes(self, stages: Stages) -> None:
        first, last = stages
        vocab_size = first.known_vocab_size
        x_TH = first.embed(np.array(PROMPT, dtype=np.int32))
        assert (x_TH.shape, x_TH.dtype) == ((len(PROMPT), first.hidden_size), np.float32)
        out_TH = first.forward([BatchSegment(0, 0, len(PROMPT), True)], x_TH).activations_TH
        assert out_TH is not None
        assert (out_TH.shape, out_TH.dtype) == (x_TH.shape, np.float32)
        assert last.known_vocab_size == vocab_size > 0
        segments = [BatchSegment(0, 0, 5, True), BatchSegment(1, 0, 4, False), BatchSegment(2, 0, 3, True)]
        logits_SV = last.forward(segments, out_TH).logits_SV
        assert logits_SV is not None
        assert (logits_SV.shape, logits_SV.dtype) == ((2, vocab_size), np.float32)
        assert last.forward([BatchSegment(1, 4, 1, False)], out_TH[:1]).logits_SV is not None
        assert first.max_rows >= 16
        assert all(stage.memory.weight_bytes > 0 for stage in stages)
        assert first.library == last.library != ""

    def test_equal_batches_give_equal_bits(self, stages: Stages) -> None:
        once = run(stages, (0, 0, PROMPT))
        rollback(stages, 0, 0)
        assert same_bits(run(stages, (0, 0, PROMPT)), once)
        rollback(stages, 0, 0)
        assert same_bits(run(stages, (1, 0, PROMPT)), once)  # nor does the slot matter

    def test_rows_do_not_depend_on_what_others_say(self, stages: Stages) -> None:
        results = []
        for company in (OTHER, OTHER[::-1]):
            run(stages, (0, 0, PROMPT), (1, 0, company[:3]))
            results.append(run(stages, (0, len(PROMPT), [6]), (1, 3, company[3:4]))[0])
            rollback(stages, 0, 0)
            rollback(stages, 1, 0)
        assert same_bits(*results)

    def test_rollback_forgets_positions_of_its_slot_only(self, stages: Stages) -> None:
        run(stages, (0, 0, PROMPT))
        run(stages, (1, 0, OTHER))
        after = run(stages, (0, len(PROMPT), [6]))
        beside = run(stages, (1, len(OTHER), [6]))
        run(stages, (0, len(PROMPT) + 1, [90]))
        rollback(stages, 0, len(PROMPT))
        rollback(stages, 1, len(OTHER))
        assert same_bits(run(stages, (0, len(PROMPT), [6])), after)
        assert same_bits(run(stages, (1, len(OTHER), [6])), beside)
        assert not same_bits(after, beside)

    def test_a_state_moves_to_another_slot_of_another_process(self, stages: Stages) -> None:
        run(stages, (0, 0, PROMPT))
        states = [stage.export_kv(0) for stage in stages]
        expected = run(stages, (0, len(PROMPT), [6]))
        with self.open_stages() as others:
            run(others, (2, 0, OTHER))  # it is replaced
            for stage, state in zip(others, states, strict=True):
                assert stage.import_kv(2, state) == len(PROMPT)
            assert same_bits(run(others, (2, len(PROMPT), [6])), expected)

    def test_a_damaged_state_is_refused_and_leaves_the_slot_empty(self, stages: Stages) -> None:
        run(stages, (0, 0, PROMPT))
        whole = run(stages, (1, 0, OTHER))
        state = stages[1].export_kv(0)
        for damaged in (b"", state[:7], state[: len(state) // 2], b"\xff" * len(state)):
            with pytest.raises(RemoteFailure):
                stages[1].import_kv(0, damaged)
        rollback(stages, 0, 0)
        assert same_bits(run(stages, (0, 0, OTHER)), whole)

    def test_a_failed_step_leaves_the_sessions_as_they_were(self, stages: Stages) -> None:
        run(stages, (0, 0, PROMPT))
        expected = run(stages, (0, len(PROMPT), [6]))
        rollback(stages, 0, len(PROMPT))
        first, chunk = stages[0], np.array(range(16), dtype=np.int32)
        full_at = next(position for position in range(0, 1024, 16) if not self.takes(first, position, chunk))
        assert full_at >= 64
        first.rollback(1, 0)
        assert same_bits(run(stages, (0, len(PROMPT), [6])), expected)

    def takes(self, stage: StageBackend, position: int, chunk: Tokens) -> bool:
        """Whether slot 1 has room for a chunk at this position."""
        try:
            stage.forward([BatchSegment(1, position, len(chunk), False)], stage.embed(chunk))
        except ContextFull:
            return False
        return True

    def test_token_ids_are_checked(self, stages: Stages) -> None:
        for token in (-1, stages[0].known_vocab_size):
            with pytest.raises(UsageError):
                stages[0].embed(np.array([token], dtype=np.int32))
        with pytest.raises(StageLoadFailed):
            stages[1].embed(np.array([1], dtype=np.int32))

    def test_draws_are_stateless(self, stages: Stages) -> None:
        logits_V = run(stages, (0, 0, PROMPT))[0]
        settings = SamplingSettings(temperature=1.5, seed=4, num_logprobs=2)
        one, other = stages[1].sampler(settings), stages[1].sampler(settings)
        drawn = [one.choose(logits_V, PROMPT, position).token for position in range(20)]
        assert [other.choose(logits_V, PROMPT, position).token for position in reversed(range(20))] == drawn[::-1]
        assert len(set(drawn)) > 3
        choice = stages[1].sampler(SamplingSettings(num_logprobs=2)).choose(logits_V, PROMPT, len(PROMPT))
        assert choice.token == int(np.argmax(logits_V)) == choice.top[0].token
        assert len(choice.top) == 2
        one.close()
        other.close()

    def test_a_grammar_goes_on_where_it_was(self, stages: Stages) -> None:
        logits_V = run(stages, (0, 0, PROMPT))[0]
        settings = SamplingSettings(grammar='root ::= "a"+ "b"+ "c"')
        whole, history = stages[1].sampler(settings), [1]
        for position in range(1, 6):
            history.append(whole.choose(logits_V, history, position).token)
        for known in range(1, 5):
            rebuilt = stages[1].sampler(settings, tuple(history[1 : 1 + known]))
            assert rebuilt.choose(logits_V, history[: 1 + known], 1 + known).token == history[1 + known]
        with pytest.raises(ShardwiseError):
            stages[1].sampler(SamplingSettings(grammar="root ::= ("))

    def test_closing_twice_is_nothing(self, stages: Stages) -> None:
        for stage in stages:
            stage.close()
            stage.close()
