"""One generation on the terminal: launch, stream, table. Used by `run` and `chat`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from shardwise.cli.common import output
from shardwise.cli.ending import cut_line, recovery_line
from shardwise.cli.split_options import equip
from shardwise.cli.tables import boundary_table, predicted_line, stage_table, summary_line
from shardwise.deploy import RunOptions, launch
from shardwise.deploy.result import Measured
from shardwise.session.request import GenerationRequest, check_request
from shardwise.transport.messages import SamplingSettings

if TYPE_CHECKING:
    from shardwise.deploy import Deployment


def start(model: str, options: RunOptions) -> Deployment:
    """Launch with a progress bar."""
    with output().progress() as progress:
        deployment = launch(model, options, on_progress=progress)
    equip(deployment)
    return deployment


def prompt_ids(deployment: Deployment, text: str, *, system: str, raw: bool) -> list[int]:
    """Token ids of what the user typed: as a chat where the model has a template, unless `raw`."""
    if raw or not deployment.model.tokenizer.chat_template:
        return deployment.prompt_ids(text)
    messages = [{"role": "system", "content": system}] if system else []
    return deployment.prompt_ids([*messages, {"role": "user", "content": text}])


def generate_once(
    model: str,
    options: RunOptions,
    text: str,
    *,
    system: str,
    raw: bool,
    max_tokens: int,
    sampling: SamplingSettings,
    stop: tuple[str, ...],
    ignore_eos: bool,
    predict: bool = True,
) -> None:
    """Launch, predict, generate, report."""
    out = output()
    with start(model, options) as deployment:
        request = GenerationRequest(
            prompt=tuple(prompt_ids(deployment, text, system=system, raw=raw)),
            max_tokens=max_tokens,
            sampling=sampling,
            stop=stop,
            ignore_eos=ignore_eos,
        )
        check_request(request, deployment.options.context_tokens)  # before anything is measured for it
        measured = Measured(deployment, request)
        if predict:
            from shardwise.bench.run_prediction import predict_local  # it plans and probes: not before the workers have started

            measured.predicted, why = predict_local(
                deployment.model, deployment.options, prompt_tokens=len(request.prompt), output_tokens=max_tokens
            )
            if why and out.verbose:
                out.note(f"no prediction: {why}")
        for token in measured.stream():
            if not out.json:
                sys.stdout.write(token.text)
                sys.stdout.flush()
        document = measured.document()
    if out.json:
        logprobs = [t for t in measured.tokens if t.logprob is not None]
        extra: dict[str, Any] = (
            {"logprobs": [{"id": t.id, "logprob": t.logprob, "top": t.top} for t in logprobs]} if logprobs else {}
        )
        out.document(document | extra)
        return
    sys.stdout.write("\n")
    if cut := cut_line(measured.tokens, request, deployment.options.context_tokens):
        out.note(cut)
    out.note(f"\n{summary_line(document)}")
    for recovery in deployment.recoveries:
        out.note(recovery_line(recovery))
    if line := predicted_line(document):
        out.note(line)
    out.note(stage_table(document))
    if document["boundaries"]:
        out.note(boundary_table(document))
