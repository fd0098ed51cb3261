"""The flags that `run`, `chat`, `serve` and `bench` share: the split, memory, sampling."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from shardwise.errors import UsageError
from shardwise.units import parse_rate

if TYPE_CHECKING:
    from shardwise.cluster.follow_policy import FollowPolicy
    from shardwise.deploy.deployment import Deployment
    from shardwise.deploy.options import RunOptions
    from shardwise.session.recovery import RecoveryPolicy
    from shardwise.transport.messages import SamplingSettings

SPLIT, SAMPLING = "Split", "Sampling"

Model = Annotated[str, typer.Argument(help="sample, a .gguf file, hf:org/repo[:file], ...", metavar="MODEL")]
Stages = Annotated[int, typer.Option("--stages", help="Number of about equal stages.", rich_help_panel=SPLIT)]
Layers = Annotated[str, typer.Option("--layers", help="Layers of each stage, e.g. 10,12,8.", rich_help_panel=SPLIT)]
PlanFile = Annotated[Path | None, typer.Option("--plan", help="A plan made by 'plan --json'.", rich_help_panel=SPLIT)]
Nodes = Annotated[
    str, typer.Option("--nodes", help="Nodes of the cluster, one a stage: desk,nas; or plan, or all.", rich_help_panel=SPLIT)
]
ClusterFile = Annotated[
    str,
    typer.Option("--cluster", help="The measured cluster, made by 'probe': plan with it, now and later.", rich_help_panel=SPLIT),
]
Auto = Annotated[
    bool, typer.Option("--auto", help="Move to a better plan when machines come and go; else it is shown.", rich_help_panel=SPLIT)
]
Ctx = Annotated[int, typer.Option("--ctx", "-c", help="Context tokens of a session; 0 = 2048, or what the model allows.")]
Sessions = Annotated[int, typer.Option("--sessions", help="Sessions at once.")]
Threads = Annotated[
    int,
    typer.Option(
        "--threads", "-t", help="Threads of a stage; 0 = its machine's cores but one. Each number rounds in its own way."
    ),
]
KvType = Annotated[str, typer.Option("--kv-type", help="f16 or q8_0.")]
WireDtype = Annotated[str, typer.Option("--wire-dtype", help="f32 (exact) or f16.")]
ChunkTokens = Annotated[int, typer.Option("--chunk-tokens", help="Rows of a prefill chunk; 0 = by quantization.")]
GpuLayers = Annotated[int, typer.Option("--gpu-layers", "-ngl", help="Layers of a stage on its GPU.")]
Blas = Annotated[str, typer.Option("--blas", help="auto, on or off.")]
Deterministic = Annotated[bool, typer.Option("--deterministic", help="Tokens do not depend on who else is there.")]
Paranoid = Annotated[bool, typer.Option("--paranoid", help="Check every byte of every slice at this start.")]

FAULTS = "Faults"
RecoveryGrade = Annotated[str, typer.Option("--recovery", help="exact, fast, auto or off.", rich_help_panel=FAULTS)]
Replicate = Annotated[
    str, typer.Option("--replicate", help="A spare of every stage: none, standby or hot.", rich_help_panel=FAULTS)
]
Rebalance = Annotated[
    bool, typer.Option("--rebalance", help="Move layers away from a stage that has become slow.", rich_help_panel=FAULTS)
]
FallbackModel = Annotated[
    str, typer.Option("--fallback", help="A smaller MODEL for one node when nothing else helps.", rich_help_panel=FAULTS)
]
CheckpointEvery = Annotated[
    int, typer.Option("--checkpoint-every", help="Copy a session's KV every N tokens; 0 = never.", rich_help_panel=FAULTS)
]
CheckpointDir = Annotated[
    str, typer.Option("--checkpoint-dir", help="Keep these copies here; default: in memory.", rich_help_panel=FAULTS)
]
JournalDir = Annotated[
    str, typer.Option("--journal", help="Directory in which sessions outlive this process.", rich_help_panel=FAULTS)
]

MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens to generate at most.")]
Temperature = Annotated[float, typer.Option("--temperature", "--temp", help="0 = greedy.", rich_help_panel=SAMPLING)]
TopK = Annotated[int, typer.Option("--top-k", help="0 = off.", rich_help_panel=SAMPLING)]
TopP = Annotated[float, typer.Option("--top-p", rich_help_panel=SAMPLING)]
MinP = Annotated[float, typer.Option("--min-p", rich_help_panel=SAMPLING)]
TypicalP = Annotated[float, typer.Option("--typical-p", rich_help_panel=SAMPLING)]
RepeatPenalty = Annotated[float, typer.Option("--repeat-penalty", rich_help_panel=SAMPLING)]
PresencePenalty = Annotated[float, typer.Option("--presence-penalty", rich_help_panel=SAMPLING)]
FrequencyPenalty = Annotated[float, typer.Option("--frequency-penalty", rich_help_panel=SAMPLING)]
RepeatLastN = Annotated[
    int, typer.Option("--repeat-last-n", help="Tokens that penalties look at; -1 = all.", rich_help_panel=SAMPLING)
]
Seed = Annotated[int, typer.Option("--seed", "-s", rich_help_panel=SAMPLING)]
LogitBias = Annotated[
    list[str] | None, typer.Option("--logit-bias", help="TOKEN_ID(+|-)BIAS, repeatable.", rich_help_panel=SAMPLING)
]
Grammar = Annotated[str, typer.Option("--grammar", help="GBNF text.", rich_help_panel=SAMPLING)]
GrammarFile = Annotated[Path | None, typer.Option("--grammar-file", rich_help_panel=SAMPLING)]
JsonSchema = Annotated[str, typer.Option("--json-schema", help="JSON schema the answer must follow.", rich_help_panel=SAMPLING)]
Stop = Annotated[list[str] | None, typer.Option("--stop", help="End at this text, repeatable.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Go on past the end-of-text token.")]


WeightsFrom = Annotated[
    list[str] | None, typer.Option("--weights-from", help="Folder made by 'pack' that the nodes see (a NAS), repeatable.")
]
FetchRate = Annotated[str, typer.Option("--fetch-rate", help="Limit on fetching weights from other nodes, e.g. 50 MB/s.")]


def fetch_rate(text: str) -> float:
    """`50 MB/s` -> bytes per second; "" -> 0, no limit."""
    return parse_rate(text, field="fetch-rate") if text else 0.0


def parse_layers(text: str) -> tuple[int, ...]:
    """`10,12,8` -> (10, 12, 8)."""
    if not text:
        return ()
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--layers {text}", where="layers", hint="numbers with commas, e.g. 10,12,8") from None


def recovery_policy(recovery: str, replicate: str, rebalance: bool, fallback: str) -> RecoveryPolicy:
    """`RecoveryPolicy` from flags, checked."""
    from shardwise.session.recovery import RecoveryPolicy

    for name, value, allowed in (
        ("recovery", recovery, ("exact", "fast", "auto", "off")),
        ("replicate", replicate, ("none", "standby", "hot")),
    ):
        if value not in allowed:
            raise UsageError(f"--{name} {value}", where=name, hint=f"one of {', '.join(allowed)}")
    return RecoveryPolicy(recovery=recovery, replicate=replicate, rebalance=rebalance, fallback_model=fallback)


def split_layers(text: str, plan: Path | None) -> tuple[int, ...]:
    """Layers of each stage from `--layers` or the stages of a `--plan` file."""
    if plan is None:
        return parse_layers(text)
    if text:
        raise UsageError("both --layers and --plan", where="plan", hint="give one of them")
    try:
        document = msgspec.json.decode(plan.read_bytes())
        layers = tuple(end - start for start, end in (stage["layers"] for stage in document["stages"]))
    except (OSError, msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise UsageError(f"cannot read the plan: {error}", where=str(plan), hint="made by 'shardwise plan --json'") from error
    from shardwise.planner.runnable import require_one_pipeline

    require_one_pipeline(document, str(plan))
    return layers


def split_nodes(text: str, plan: Path | None) -> tuple[str, ...]:
    """`--nodes`: `desk,nas`; `plan`: those of the `--plan` file; `all`: all nodes of the cluster in turn; nothing: none."""
    if text == "all":
        return ("*",)
    if text != "plan":
        return tuple(name for name in text.split(",") if name)
    if plan is None:
        raise UsageError("--nodes plan without a plan", where="nodes", hint="add --plan FILE, made by 'shardwise plan --json'")
    from shardwise.deploy.on_cluster import plan_nodes

    return plan_nodes(plan)


def follow_policy(cluster: str, auto: bool, plan: Path | None) -> FollowPolicy:
    """What to do when machines come and go; a `--plan` says what is to be minimized."""
    from shardwise.cluster.follow_policy import FollowPolicy
    from shardwise.planner.plan_file import load_plan

    if auto and not cluster:
        hint = "add --cluster FILE, made by 'shardwise probe --out FILE'"
        raise UsageError("--auto without measurements of the machines", where="auto", hint=hint)
    objective = load_plan(plan).objective if plan is not None and cluster else FollowPolicy().objective
    return FollowPolicy(auto=auto, cluster_file=cluster, objective=objective)


def equip(deployment: Deployment) -> None:
    """On a cluster: machines that join are measured when a plan needs them, and what is done about them is told."""
    from functools import partial

    from shardwise.cli.common import output
    from shardwise.deploy.options import main_quantization
    from shardwise.probe.newcomers import measure_newcomers

    follower = deployment.follower
    if follower is None:
        return
    quantization = main_quantization(deployment.model)
    measure = partial(measure_newcomers, deployment.engine, deployment.driver_host)
    follower.measure = partial(measure, threads=deployment.options.threads, quantization=quantization)
    follower.on_note = lambda note: output().note(note.text)


def run_options(**given: Any) -> RunOptions:
    """`RunOptions` from flags."""
    from shardwise.deploy.options import RunOptions

    return RunOptions(**given)


def sampling_settings(
    *,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    typical_p: float,
    repeat_penalty: float,
    presence_penalty: float,
    frequency_penalty: float,
    repeat_last_n: int,
    seed: int,
    logit_bias: list[str] | None,
    grammar: str,
    grammar_file: Path | None,
    json_schema: str,
    num_logprobs: int = -1,
) -> SamplingSettings:
    """`SamplingSettings` from flags, checked."""
    from shardwise.transport.messages import SamplingSettings

    for name, value, low, high in (
        ("temperature", temperature, 0.0, 100.0),
        ("top-p", top_p, 0.0, 1.0),
        ("min-p", min_p, 0.0, 1.0),
        ("typical-p", typical_p, 0.0, 1.0),
        ("repeat-penalty", repeat_penalty, 0.01, 100.0),
    ):
        if not low <= value <= high:
            raise UsageError(f"--{name} {value}", where=name, hint=f"{low:g} to {high:g}")
    return SamplingSettings(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repeat_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        penalty_last_tokens=repeat_last_n,
        seed=seed,
        logit_bias=tuple(_bias(text) for text in logit_bias or ()),
        grammar=_grammar(grammar, grammar_file, json_schema),
        num_logprobs=num_logprobs,
    )


def _bias(text: str) -> tuple[int, float]:
    for sign in "+-":
        token, found, bias = text.partition(sign)
        if found and token.isdigit():
            try:
                return int(token), float(sign + bias)
            except ValueError:
                break
    raise UsageError(f"--logit-bias {text}", where="logit-bias", hint="TOKEN_ID+BIAS or TOKEN_ID-BIAS, e.g. 15043-1.5")


def _grammar(text: str, file: Path | None, schema: str) -> str:
    if sum((bool(text), file is not None, bool(schema))) > 1:
        raise UsageError("only one of --grammar, --grammar-file and --json-schema", where="grammar")
    if file is not None:
        try:
            return file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"cannot read the grammar: {error}", where=str(file)) from error
    if schema:
        from shardwise.server.json_grammar import schema_to_gbnf

        try:
            return schema_to_gbnf(msgspec.json.decode(schema))
        except msgspec.DecodeError as error:
            raise UsageError(f"--json-schema is not JSON: {error}", where="json-schema") from error
    return text
