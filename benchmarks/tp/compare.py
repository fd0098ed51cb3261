"""Side by side with torch's parallelize_module, transformers' tp_plan and diffusers: correctness, load memory, step time.

    python benchmarks/tp/compare.py [--steps 60] [--out FILE.json]

Method: two processes, one thread each, gloo over loopback. For step time both implementations live in the same processes and
their steps alternate, so that whatever else the machine does hits both; medians, and the median of the paired ratios. Memory is
the highest resident memory while loading, above that before, in fresh processes: anonymous, and with file-backed pages, which
the system can drop. diffusers refuses CPU meshes; its list of devices is extended here, in this script only, because everything
below it works on gloo.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORLD = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", default="")
    parser.add_argument("--case")
    options = parser.parse_args()
    if options.case:
        run_rank(options.case, options.steps)
        return
    results: dict[str, Any] = {}
    for case in CASES:
        if options.only in case:
            results[case] = launch(case, options.steps)
            print(case, json.dumps(results[case]), flush=True)
    if options.out:
        options.out.write_text(json.dumps(results, indent=1))


def launch(case: str, steps: int) -> Any:
    """Run a case in WORLD fresh processes; rank 0's answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="tp-bench-") as folder:
        processes = []
        for rank in range(WORLD):
            environment = os.environ | {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD), "LOCAL_WORLD_SIZE": str(WORLD),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1",
                "PYTHONPATH": str(ROOT), "BENCH_FOLDER": folder,
            }  # fmt: skip
            command = [sys.executable, __file__, "--case", case, "--steps", str(steps)]
            processes.append(
                subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            )
        outputs = [process.communicate(timeout=900) for process in processes]
    lines = [line for line in outputs[0][0].splitlines() if line.startswith("RESULT ")]
    if not lines:
        return {"failed": (outputs[0][1].strip().splitlines() or ["no output"])[-1][:300]}
    return json.loads(lines[-1].removeprefix("RESULT "))


def run_rank(case: str, steps: int) -> None:
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    answer = CASES[case](steps)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        print("RESULT " + json.dumps(answer), flush=True)
    torch.distributed.destroy_process_group()


def alternate(steps: int, ours: Callable[[], Any], theirs: Callable[[], Any]) -> dict[str, float]:
    """Medians of both in ms, and of the paired ratio ours / theirs (below 1: ours is faster)."""
    import torch.distributed as dist

    times: tuple[list[float], list[float]] = ([], [])
    for step in range(steps + 5):
        order = ((0, ours), (1, theirs)) if step % 2 == 0 else ((1, theirs), (0, ours))
        taken = [0.0, 0.0]
        for index, function in order:
            dist.barrier()
            start = time.perf_counter()
            function()
            taken[index] = time.perf_counter() - start
        if step >= 5:
            times[0].append(taken[0])
            times[1].append(taken[1])
    ratios = [a / b for a, b in zip(*times, strict=True)]
    return {
        "ours_ms": round(statistics.median(times[0]) * 1e3, 3),
        "theirs_ms": round(statistics.median(times[1]) * 1e3, 3),
        "ratio": round(statistics.median(ratios), 3),
        "n": steps,
    }


def worst(a: Any, b: Any) -> float:
    return float((a.double() - b.double()).abs().max() / b.double().abs().max().clamp(min=1.0))


def llama(hidden: int = 512, layers: int = 4, kind: str = "llama") -> Any:
    import torch
    import transformers as tf

    sizes = {
        "vocab_size": 2000, "hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": layers,
        "num_attention_heads": hidden // 64, "num_key_value_heads": hidden // 64, "max_position_embeddings": 512,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    config = tf.Phi3Config(**sizes) if kind == "phi3" else tf.LlamaConfig(**sizes)
    torch.manual_seed(0)
    return tf.AutoModelForCausalLM.from_config(config).eval()


def torch_plan(model: Any) -> None:
    """torch's own way for a Llama: one parallelize_module call per layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (WORLD,))
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    for layer in model.model.layers:
        plan = {name: ColwiseParallel() for name in names}
        plan |= {"self_attn.o_proj": RowwiseParallel(), "mlp.down_proj": RowwiseParallel()}
        parallelize_module(layer, mesh, plan)


LAYERS_PLAN = {
    "model.layers.*.self_attn.q_proj": "colwise", "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise", "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise", "model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise",
}  # fmt: skip


def against_torch(steps: int) -> dict[str, Any]:
    """The same split of the same Llama: prefill of 64 tokens, decode of one, and a training step."""
    import torch

    from shardwise.tp import TensorParallelConfig, apply_tensor_parallel

    reference = llama()
    ours = apply_tensor_parallel(copy.deepcopy(reference), TensorParallelConfig(WORLD), LAYERS_PLAN)
    theirs = copy.deepcopy(reference)
    torch_plan(theirs)
    out: dict[str, Any] = {}
    for name, shape in (("prefill_64", (1, 64)), ("decode_1", (1, 1))):
        ids = torch.randint(3, 2000, shape, generator=torch.Generator().manual_seed(1))
        with torch.inference_mode():
            want = reference(ids).logits
            out[f"{name}_error_ours"] = worst(ours(ids).logits, want)
        with torch.no_grad():
            out[f"{name}_error_theirs"] = worst(theirs(ids).logits, want)
            out[name] = alternate(steps, lambda ids=ids: ours(ids), lambda ids=ids: theirs(ids))
    ids = torch.randint(3, 2000, (1, 64), generator=torch.Generator().manual_seed(1))

    def train(model: Any) -> None:
        model.zero_grad()
        model(ids, labels=ids).loss.backward()

    out["train_64"] = alternate(max(10, steps // 3), lambda: train(ours), lambda: train(theirs))
    return out


def _transformers_model(folder: str) -> Any:
    import transformers as tf
    from transformers.distributed import DistributedConfig

    return tf.AutoModelForCausalLM.from_pretrained(
        folder, distributed_config=DistributedConfig(tp_plan="auto", tp_size=WORLD)
    ).eval()


def against_transformers(steps: int, kind: str = "llama") -> dict[str, Any]:
    import torch

    from shardwise.tp import PackedColwiseParallel, TensorParallelConfig, apply_tensor_parallel

    folder = os.environ["BENCH_FOLDER"]
    reference = llama(kind=kind)
    if torch.distributed.get_rank() == 0:
        reference.save_pretrained(folder)
    torch.distributed.barrier()
    theirs = _transformers_model(folder)
    plan: dict[str, Any] | None = None
    if kind == "phi3":
        plan = dict(reference.tp_plan) | {
            "model.layers.*.self_attn.qkv_proj": PackedColwiseParallel([1, 1, 1]), "model.layers.*.self_attn.o_proj": "rowwise",
            "model.layers.*.mlp.gate_up_proj": PackedColwiseParallel([1, 1]), "model.layers.*.mlp.down_proj": "rowwise",
        }  # fmt: skip
    ours = apply_tensor_parallel(copy.deepcopy(reference), TensorParallelConfig(WORLD), plan)
    out: dict[str, Any] = {}
    for name, shape in (("prefill_64", (1, 64)), ("decode_1", (1, 1))):
        ids = torch.randint(3, 2000, shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            want = reference(ids).logits
            out[f"{name}_error_ours"] = worst(ours(ids).logits, want)
            out[f"{name}_error_theirs"] = worst(theirs(ids).logits, want)
            out[name] = alternate(steps, lambda ids=ids: ours(ids), lambda ids=ids: theirs(ids))
    return out


def against_transformers_fused(steps: int) -> dict[str, Any]:
    return against_transformers(steps, "phi3")


def transformers_gqa(steps: int) -> dict[str, Any]:
    """Fewer KV heads than ranks: one KV head on two ranks, with the model's own plan."""
    import torch
    import transformers as tf

    from shardwise.tp import TensorParallelConfig, apply_tensor_parallel

    folder = os.environ["BENCH_FOLDER"]
    torch.manual_seed(0)
    sizes = {"vocab_size": 200, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    reference = tf.LlamaForCausalLM(tf.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=1)).eval()
    if torch.distributed.get_rank() == 0:
        reference.save_pretrained(folder)
    torch.distributed.barrier()
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        want = reference(ids).logits
        out: dict[str, Any] = {
            "ours": worst(apply_tensor_parallel(copy.deepcopy(reference), TensorParallelConfig(WORLD))(ids).logits, want)
        }
        try:
            out["theirs"] = worst(_transformers_model(folder)(ids).logits, want)
        except Exception as error:  # noqa: BLE001 - whatever they raise is the finding
            out["theirs"] = f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
    return out


@contextmanager
def peak_resident(out: dict[str, float]) -> Iterator[None]:
    """Writes the peaks above the start, in MiB: anonymous, and anonymous plus file-backed."""

    def now() -> tuple[float, float]:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        anonymous, mapped = (int(fields[name].split()[0]) / 1024 for name in ("RssAnon", "RssFile"))
        return anonymous, anonymous + mapped

    stop, start = threading.Event(), now()
    top = [*start]

    def look() -> None:
        top[:] = [max(a, b) for a, b in zip(top, now(), strict=True)]

    def watch() -> None:
        while not stop.wait(0.001):
            look()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield
    stop.set()
    thread.join()
    look()
    out["peak_anonymous_mib"], out["peak_resident_mib"] = (round(a - b, 1) for a, b in zip(top, start, strict=True))


def load_memory(steps: int, ours: bool = True, mapped: bool = False) -> dict[str, float]:
    """Loading a Llama of 276 MiB (fp32), half of it per rank. Rank 0 made the files, so rank 1 measures."""
    import torch
    import transformers as tf

    from shardwise.tp import TensorParallelConfig, empty_model, load_sharded

    folder = os.environ["BENCH_FOLDER"]
    if torch.distributed.get_rank() == 0:
        llama(1024, 5).save_pretrained(folder, max_shard_size="100MB")
    torch.distributed.barrier()
    out: dict[str, float] = {}
    config = tf.AutoConfig.from_pretrained(folder)
    _warm()
    if ours:
        model = empty_model(lambda: tf.AutoModelForCausalLM.from_config(config)).eval()
        with peak_resident(out):
            load_sharded(model, folder, TensorParallelConfig(WORLD), mapped=mapped)
    else:
        with peak_resident(out):
            _transformers_model(folder)
    figures = torch.tensor(list(out.values()))
    torch.distributed.broadcast(figures, 1)
    model_mib = sum(f.stat().st_size for f in Path(folder).glob("*.safetensors")) / 2**20
    return {"model_mib": round(model_mib, 1)} | {n: round(v, 1) for n, v in zip(out, figures.tolist(), strict=True)}


def load_memory_mapped(steps: int) -> dict[str, float]:
    return load_memory(steps, mapped=True)


def _warm() -> None:
    """Imports that would count as memory of loading."""
    import safetensors.torch  # noqa: F401
    import transformers.modeling_utils  # noqa: F401
    from torch.distributed.tensor import DTensor  # noqa: F401
    from transformers.models.llama import modeling_llama  # noqa: F401


def load_memory_transformers(steps: int) -> dict[str, float]:
    return load_memory(steps, ours=False)


def against_diffusers(steps: int) -> dict[str, Any]:
    """Flux2 with its own plan: step time, and whether the packed weight comes back as it was."""
    import diffusers.hooks.tensor_parallel as theirs_module
    import torch
    from diffusers import TensorParallelConfig as TheirConfig
    from tests.tp.cases_diffusion import build
    from torch.distributed.device_mesh import init_device_mesh

    from shardwise.tp import TensorParallelConfig, apply_tensor_parallel, gather

    theirs_module._SUPPORTED_TP_DEVICES = ("cpu", *theirs_module._SUPPORTED_TP_DEVICES)
    reference, run, _ = build("flux2")
    ours = apply_tensor_parallel(copy.deepcopy(reference), TensorParallelConfig(WORLD))
    theirs = copy.deepcopy(reference)
    config = TheirConfig(tp_degree=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    config.setup(torch.distributed.get_rank(), WORLD, torch.device("cpu"), mesh)
    theirs_module.apply_tensor_parallel(theirs, config, reference._tp_plan)
    out: dict[str, Any] = {}
    with torch.no_grad():
        want = run(reference)
        out["error_ours"], out["error_theirs"] = worst(run(ours), want), worst(run(theirs), want)
        out["forward"] = alternate(steps, lambda: run(ours), lambda: run(theirs))
    name = "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight"
    original = reference.state_dict()[name]
    out["packed_weight_back_ours"] = bool(torch.equal(gather(ours)[name], original))
    out["packed_weight_back_theirs"] = bool(torch.equal(theirs.state_dict()[name].full_tensor(), original))
    for model in (reference, ours, theirs):
        run(model).square().sum().backward()
    norm = "transformer_blocks.0.attn.norm_q.weight"
    grads = [dict(m.named_parameters())[norm].grad for m in (reference, ours, theirs)]
    local = grads[2].to_local() if hasattr(grads[2], "to_local") else grads[2]
    out["qk_norm_grad_error_ours"], out["qk_norm_grad_error_theirs"] = worst(grads[1], grads[0]), worst(local, grads[0])
    return out


CASES: dict[str, Callable[[int], Any]] = {
    "torch parallelize_module, Llama": against_torch,
    "transformers tp_plan, Llama": against_transformers,
    "transformers tp_plan, Phi-3 fused": against_transformers_fused,
    "transformers tp_plan, one KV head on two ranks": transformers_gqa,
    "load memory, ours": load_memory,
    "load memory, ours mapped": load_memory_mapped,
    "load memory, transformers": load_memory_transformers,
    "diffusers, Flux2": against_diffusers,
}


if __name__ == "__main__":
    main()
