"""`python -m tests.cluster.keep_asking URL KEY PROMPT END_FILE`: an OpenAI client that streams one answer after the other until
the file is there; prints how each answer went, as JSON."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import openai

NUM_TOKENS = 150


def main() -> None:
    url, key, prompt, end_file = sys.argv[1:]
    answers = []
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        while not Path(end_file).exists():
            text, last_s, longest_s = "", time.monotonic(), 0.0
            stream = client.completions.create(model="sample", prompt=prompt, max_tokens=NUM_TOKENS, temperature=0, stream=True)
            for chunk in stream:
                now_s = time.monotonic()
                longest_s, last_s = max(longest_s, now_s - last_s), now_s
                text += chunk.choices[0].text if chunk.choices else ""
            answers.append({"text": text, "longest_s": longest_s})
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
