"""Token counts of an answer."""

from __future__ import annotations


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, object]:
    """`usage` of chat and text completions."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": 0, "audio_tokens": 0},
        "completion_tokens_details": {"reasoning_tokens": 0, "audio_tokens": 0},
    }
