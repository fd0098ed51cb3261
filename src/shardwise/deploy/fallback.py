"""The model that goes on with a sentence where the split one cannot be had any more: smaller, on one node, same tokenizer."""

from __future__ import annotations

from shardwise.deploy.options import RunOptions
from shardwise.errors import UsageError
from shardwise.model.description import ModelDescription
from shardwise.model.resolve import describe_model, resolve_model
from shardwise.records import replace


def require_fallback(model: ModelDescription, options: RunOptions) -> ModelDescription | None:
    """The policy's fallback model, described; None where there is none.

    `UsageError` where it reads other tokens, has no weights here, or a shorter context: it goes on from the token ids.
    """
    name = options.recovery.fallback_model
    if not name:
        return None
    found = describe_model(resolve_model(name))
    if found.tokenizer.digest != model.tokenizer.digest:
        raise UsageError(
            f"the fallback model {found.name} has another tokenizer than {model.name}",
            where="fallback-model",
            hint="take the same model in a smaller quantization, or a smaller one of its family",
            fallback=found.tokenizer.digest,
            model=model.tokenizer.digest,
        )
    if not found.source.paths:
        raise UsageError(f"the fallback model {found.name} has no weights on this machine", where="fallback-model")
    if 0 < found.context_length < options.context_tokens:
        raise UsageError(
            f"the fallback model {found.name} holds {found.context_length} tokens, --ctx is {options.context_tokens}",
            where="fallback-model",
            hint="lower --ctx or take another model",
        )
    return found


def fallback_options(options: RunOptions) -> RunOptions:
    """One stage, everything else as before."""
    return replace(options, layers=(), num_stages=1)
