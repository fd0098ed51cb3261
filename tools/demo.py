"""`make demo`: the main job on a real model. Describes it, asks whether to split it over an example home, splits it over
three worker processes on this machine, and checks the answer against the unsplit model, id for id."""

from __future__ import annotations

import sys
from pathlib import Path

import shardwise as sw
from shardwise.cli.main import run
from shardwise.cli.tables import boundary_table, stage_table, summary_line
from shardwise.deploy.result import Measured
from shardwise.errors import ShardwiseError
from shardwise.session.request import GenerationRequest

QUESTION = [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}]
HOME = Path(__file__).resolve().parent.parent / "examples" / "home.toml"


def heading(text: str) -> None:
    print(f"\n== {text}\n", flush=True)


def answer(num_stages: int) -> list[int]:
    """Stream one answer and show where its time went; returns the token ids."""
    with sw.launch_local("sample", num_stages=num_stages, max_sessions=1) as deployment:
        request = GenerationRequest(prompt=tuple(deployment.prompt_ids(QUESTION)), max_tokens=64)
        measured = Measured(deployment, request)
        for token in measured.stream():
            print(token.text, end="", flush=True)
        document = measured.document()
    from rich.console import Console

    console = Console()
    console.print(f"\n\n{summary_line(document)}")
    console.print(stage_table(document))
    if document["boundaries"]:
        console.print(boundary_table(document))
    return [int(token) for token in document["token_ids"]]


def main() -> int:
    heading("1. Describe a model, from its header alone: shardwise describe sample")
    if status := run(["describe", "sample"]):
        return status
    heading("2. Should a 40 GB model be split over this home? shardwise advise llama-3-70b:q4_k_m --cluster examples/home.toml")
    if status := run(["advise", "llama-3-70b:q4_k_m", "--cluster", str(HOME)]):
        return status
    heading("3. The real model on one process")
    whole = answer(1)
    heading("4. The same model split over three processes: shardwise run sample --stages 3")
    split = answer(3)
    heading(f"Same answer, token for token: {'yes' if whole == split else 'NO'}")
    return 0 if whole == split else 5


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ShardwiseError as error:
        print(f"error: {error.one_line()}", file=sys.stderr)
        sys.exit(error.exit_code)
