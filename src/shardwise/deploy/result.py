"""The measured result of one generation, in the shape of INTERFACES' JSON of `run`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shardwise.errors import UsageError
from shardwise.records import plain
from shardwise.session.request import GenerationRequest, Token
from shardwise.transport.messages import Quantiles, Stats

if TYPE_CHECKING:
    from shardwise.deploy.deployment import Deployment


class Measured:
    """Runs one request and keeps what `run` reports."""

    def __init__(self, deployment: Deployment, request: GenerationRequest) -> None:
        self._deployment, self._request = deployment, request
        self.tokens: list[Token] = []
        self.predicted: dict[str, Any] | None = None  # set by whoever predicted the run
        deployment.stats(reset=True)

    def stream(self) -> Iterator[Token]:
        """The tokens, kept as they come."""
        for token in self._deployment.stream(self._request):
            self.tokens.append(token)
            yield token

    def document(self) -> dict[str, Any]:
        """The JSON document; call it after the last token."""
        if not self.tokens:
            raise UsageError("nothing was generated", where="prompt")
        deployment, tokens = self._deployment, self.tokens
        generated = [t for t in tokens if t.finish_reason != "cancelled"]
        gaps = [b.elapsed_s - a.elapsed_s for a, b in itertools.pairwise(generated)]
        first_s = generated[0].elapsed_s
        stats = deployment.stats()
        model = deployment.model
        return {
            "text": "".join(t.text for t in tokens),
            "token_ids": [t.id for t in generated if not (t.finish_reason == "stop" and t.id in deployment.tokenizer.eog_ids)],
            "prompt_tokens": len(self._request.prompt),
            "finish_reason": tokens[-1].finish_reason,
            "strategy": "single_node" if len(stats) == 1 else "layer_wise",
            "time_to_first_token_s": first_s,
            "inter_token_s": _percentiles(gaps),
            "decode_tokens_per_s": len(gaps) / sum(gaps) if gaps and sum(gaps) > 0 else 0.0,
            "prefill_tokens_per_s": len(self._request.prompt) / first_s,
            "stages": stage_figures(deployment, stats),
            "boundaries": boundary_figures(deployment, stats),
            "predicted": self.predicted,
            "recoveries": [plain(r) for r in deployment.recoveries],
            "model": {
                "name": model.name,
                "revision_digest": model.revision_digest,
                "tokenizer_digest": model.tokenizer.digest,
                "quantization": model.quantization,
            },
        }


def _percentiles(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)

    def at(share: float) -> float:
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0

    return {"p50": at(0.5), "p95": at(0.95), "p99": at(0.99)}


def _short(quantiles: Quantiles) -> dict[str, float]:
    return {"p50": quantiles.p50, "p95": quantiles.p95, "p99": quantiles.p99}


def stage_figures(deployment: Deployment, stats: list[Stats]) -> list[dict[str, Any]]:
    """One object a stage."""
    return [
        {
            "node": status.node,
            "pid": figures.pid,
            "layers": list(status.layers),
            "weight_bytes": status.weight_bytes,
            "kv_bytes": status.kv_bytes,
            "peak_memory_bytes": figures.peak_memory_bytes,
            "compute_s": {
                "prefill_total": figures.prefill.total,
                "decode_p50": figures.decode.p50,
                "decode_p95": figures.decode.p95,
            },
            "wait_s": _short(figures.wait),
            "queue_s": _short(figures.queue),
        }
        for status, figures in zip(deployment.stages, stats, strict=True)
    ]


def boundary_figures(deployment: Deployment, stats: list[Stats]) -> list[dict[str, Any]]:
    """One object a hop: stage to stage with activations, and from the last stage back to the first with the token.

    `transfer_s` runs from the sender's clock to the receiver's, corrected by the offsets that the driver estimated.
    """
    if len(stats) < 2:
        return []
    hidden, dtype = deployment.model.hidden_size, deployment.options.wire_dtype
    offsets = deployment.driver.clock_offset_s
    out = []
    for sender in stats:
        receiver = stats[(sender.stage + 1) % len(stats)]
        shift_s = offsets.get(receiver.stage, 0.0) - offsets.get(sender.stage, 0.0)
        ring = receiver.stage == 0
        tensor = {"shape": [1], "dtype": "i32"} if ring else {"shape": [1, hidden], "dtype": dtype}
        out.append(
            {
                "from": sender.stage,
                "to": receiver.stage,
                "tensor": tensor,
                "bytes_per_token": sender.decode_sent_bytes / sender.decode_steps_sent if sender.decode_steps_sent else 0.0,
                "transfer_s": {
                    "p50": max(0.0, receiver.transfer.p50 - shift_s),
                    "p95": max(0.0, receiver.transfer.p95 - shift_s),
                },
                "copy_s": {"p50": sender.copy.p50},
                "sync_wait_s": {"p50": receiver.wait.p50, "p95": receiver.wait.p95},
            }
        )
    return out
