"""`python -m tests.cluster.ask URL KEY PROMPT`: an OpenAI client that waits until the server is ready; prints the text."""

from __future__ import annotations

import sys
import time

import openai


def main() -> None:
    url, key, prompt = sys.argv[1:]
    end = time.monotonic() + 90
    with openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60) as client:
        while True:
            try:
                answer = client.completions.create(model="sample", prompt=prompt, max_tokens=32, temperature=0)
                break
            except (openai.APIConnectionError, openai.InternalServerError):  # not there yet, or 503 while it loads
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)
    sys.stdout.write(answer.choices[0].text)


if __name__ == "__main__":
    main()
