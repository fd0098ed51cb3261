"""What may differ between two peers, as data: one rule for each field of `Hello`.

`equal`: another value is refused. `epoch`: must be equal too, and the hint depends on who is older. `told`: may differ;
both values are reported in `Welcome`. Reasons: docs/adr/0042-handshake.md.
"""

from __future__ import annotations

from shardwise.records import Record


class Rule(Record):
    """One field. `name` is what people read; `hint` tells what to do when it differs."""

    field: str
    kind: str  # equal | epoch | told
    name: str
    hint: str = ""


_SAME_MODEL = "give every node the same model: run 'shardwise pack' once and deploy its manifest"
_SAME_PLAN = "start all stages from the same plan"
_SAME_INSTALL = "install the same shardwise and llama-cpp-python everywhere, e.g. with 'make setup' of the same commit"

RULES: tuple[Rule, ...] = (
    Rule(field="protocol_version", kind="equal", name="protocol version", hint="install the same shardwise on both sides"),
    Rule(field="deployment", kind="equal", name="deployment", hint="use this deployment's own workers"),
    Rule(field="epoch", kind="epoch", name="deployment epoch"),
    Rule(field="revision_digest", kind="equal", name="model revision", hint=_SAME_MODEL),
    Rule(field="tokenizer_digest", kind="equal", name="tokenizer", hint=_SAME_MODEL),
    Rule(field="quantization_digest", kind="equal", name="quantization layout", hint=_SAME_MODEL),
    Rule(field="quantization", kind="equal", name="quantization", hint=_SAME_MODEL),
    Rule(field="layers", kind="equal", name="layer ranges", hint=_SAME_PLAN),
    Rule(field="wire_dtype", kind="equal", name="wire dtype", hint="use the same --wire-dtype everywhere"),
    Rule(field="context_tokens", kind="equal", name="context length", hint="use the same --ctx everywhere"),
    Rule(field="kv_type", kind="equal", name="KV type", hint="use the same --kv-type everywhere"),
    Rule(field="backend", kind="equal", name="backend build", hint=_SAME_INSTALL),
    # Last of the refusing ones: it differs whenever one of the above does, and then they explain it.
    Rule(field="manifest_digest", kind="equal", name="manifest", hint="deploy the same manifest to every node"),
    Rule(field="device", kind="told", name="device"),
    Rule(field="shardwise_version", kind="told", name="shardwise version"),
    Rule(field="platform", kind="told", name="platform"),
    Rule(field="node", kind="told", name="node"),
    Rule(field="stage", kind="told", name="stage"),
)

HINT_PEER_STALE = "the peer is of an earlier launch: stop that worker, it has been replaced"
HINT_OWN_STALE = "this worker is of an earlier launch and has been replaced: stop it"
