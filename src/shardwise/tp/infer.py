"""Finds a plan for a module that has none, and proves it on numbers before offering it.

Data flow: one forward with gradients on gives, for each linear layer, the linear layers that its input comes from (walking
the autograd graph back until the next linear layer). Layers are grouped by their name's pattern (`layers.*.mlp.up`). For each
pattern in order of execution, "outputs of the layers before it, inputs of this one" is a candidate pair; it is *tried*: the
module really split over two ranks (as threads) must give the unsharded output. Fused projections are tried as 2, 3 and more
blocks. Embeddings and the last head are tried on their own.

Promises: an offered plan gave the unsharded output on random input at degree 2, each pair alone and all together. What stays
whole is listed with its reason. Fails when: the module cannot run on the example (its own error).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from shardwise.errors import ShardwiseError, UsageError
from shardwise.tp.dims import is_transposed
from shardwise.tp.simulate import simulate
from shardwise.tp.styles import PackedColwiseParallel, PackedRowwiseParallel

TOLERANCE = 1e-4
"""Relative to the largest output: fp32 sums in another order stay below 1e-5, a wrong pairing is off by tenths."""

Plan = dict[str, Any]
Run = Callable[[nn.Module], Any]


@dataclass(frozen=True)
class InferredPlan:
    """A plan that passed, and what stays whole and why (pattern -> reason)."""

    plan: Plan
    left_whole: Mapping[str, str]
    checks: int


@dataclass
class _Trace:
    """Linear patterns in order of execution, and the patterns each one's input comes from."""

    order: list[str] = field(default_factory=list)
    sources: dict[str, set[str]] = field(default_factory=dict)


def infer_plan(model: nn.Module, run: Run | None = None, *, example: Any = None, degree: int = 2) -> InferredPlan:
    """A plan for `model`. run: calls the module on some input and gives a tensor (or a tuple, list, dict of tensors);
    example: instead of it, the positional inputs (a tensor or a tuple)."""
    if run is None:
        if example is None:
            raise UsageError("infer_plan needs an example input or a function that runs the module")
        inputs = example if isinstance(example, tuple) else (example,)
        run = _runner(inputs)
    return _Search(model, run, degree).search()


def _runner(inputs: tuple[Any, ...]) -> Run:
    return lambda module: module(*inputs)


class _Search:
    def __init__(self, model: nn.Module, run: Run, degree: int) -> None:
        self.model, self.run, self.degree = model, run, degree
        self.checks = 0
        self.plan: Plan = {}
        self.left: dict[str, str] = {}
        was_training = model.training
        model.eval()
        try:
            self.trace = trace_linears(model, run)
            with torch.no_grad():
                self.want = flat_tensors(run(model))
        finally:
            model.train(was_training)

    def search(self) -> InferredPlan:
        used: set[str] = set()
        for target in self.trace.order:
            sources = self.trace.sources[target] - {target}
            if not sources or target in used or sources & used:
                continue
            # layers fed by the same ones (the two outputs of a joint attention) can only change together
            alike = [other for other in self.trace.order if self.trace.sources[other] - {other} == sources]
            for targets in [[target], alike] if len(alike) > 1 else [[target]]:
                if self._try_pair(sources, targets):
                    used |= sources | set(targets)
                    break
        for pattern in self.trace.order:
            if pattern not in used and pattern not in self.left:
                self.left[pattern] = "its output does not lead to a layer that can take it split"
        self._try_alone()
        if self.plan and not self._passes(self.plan):
            raise UsageError("the parts of the plan pass alone but not together", where=type(self.model).__name__)
        left = {pattern: reason for pattern, reason in self.left.items() if pattern not in self.plan}
        return InferredPlan(self.plan, left, self.checks)

    def _try_pair(self, sources: set[str], targets: list[str]) -> bool:
        reason = ""
        for candidate in self._candidates(sorted(sources), targets):
            reason = self._failure(candidate)
            if not reason:
                self.plan |= candidate
                return True
        if reason:
            for name in (*targets, *sorted(sources)):
                self.left.setdefault(name, f"splitting {', '.join(sorted(sources))} before {targets[0]} fails: {reason}")
        return False

    def _candidates(self, sources: list[str], targets: list[str]) -> Iterable[Plan]:
        """Plain first; then the sources as fused projections; then joined branches into a packed target."""
        plain: Plan = dict.fromkeys(sources, "colwise") | dict.fromkeys(targets, "rowwise")
        yield plain
        if len(targets) > 1:
            return
        target = targets[0]
        declared: Plan = {s: PackedColwiseParallel() for s in sources if hasattr(self._module(s), "_tp_packed_col_blocks")}
        if hasattr(self._module(target), "_tp_packed_row_blocks"):
            declared[target] = PackedRowwiseParallel()
        if declared:
            yield plain | declared
        inputs = self._width(target, inputs=True)
        for source in sources:
            outputs = self._width(source, inputs=False)
            for parts in range(2, 9):
                if outputs == parts * inputs or (len(sources) == 1 and outputs % parts == 0 and parts in (2, 3)):
                    yield plain | {source: PackedColwiseParallel([1] * parts)}
            rest = outputs - inputs
            if rest > 0 and rest % 2 == 0 and rest // 2 != inputs:  # queries as wide as the target, fewer keys and values
                yield plain | {source: PackedColwiseParallel([inputs, rest // 2, rest // 2])}
        widths = sorted({self._width(source, inputs=False) for source in sources})
        for first in widths:
            if inputs - first in widths:
                yield plain | {target: PackedRowwiseParallel([first, inputs - first])}

    def _module(self, pattern: str) -> nn.Module:
        return next(module for name, module in self.model.named_modules() if block_pattern(name) == pattern)

    def _width(self, pattern: str, *, inputs: bool) -> int:
        module = self._module(pattern)
        weight: torch.Tensor = module.weight
        return int(weight.shape[1 if inputs != is_transposed(module) else 0])

    def _try_alone(self) -> None:
        """Embeddings by vocabulary, and a head that nothing follows with its output gathered."""
        for name, module in self.model.named_modules():
            if isinstance(module, nn.Embedding) and not self._failure({block_pattern(name): "embedding_rowwise"}):
                self.plan[block_pattern(name)] = "embedding_rowwise"
        last = self.trace.order[-1] if self.trace.order else None
        if last and last not in self.plan and "*" not in last and not self._failure({last: "colwise_gather_output"}):
            self.plan[last] = "colwise_gather_output"

    def _failure(self, candidate: Plan) -> str:
        """'' if the candidate, together with the plan so far, gives the unsharded output."""
        self.checks += 1
        try:
            results = simulate(self.model, self.plan | candidate, self._evaluated, degree=self.degree, timeout_s=30.0)
        except ShardwiseError as error:
            return error.one_line()
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0][:160]}"
        worst = max(_difference(flat_tensors(result), self.want) for result in results)
        return "" if worst <= TOLERANCE else f"the output differs by {worst:.1e} of its size"

    def _passes(self, plan: Plan) -> bool:
        return not self._failure(plan)

    def _evaluated(self, module: nn.Module) -> Any:
        module.eval()
        return self.run(module)


def block_pattern(name: str) -> str:
    """`blocks.3.net.2` -> `blocks.*.net.2`: the first number counts equal blocks, later ones tell apart what is in them."""
    parts = name.split(".")
    first = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return ".".join("*" if index == first else part for index, part in enumerate(parts))


def trace_linears(model: nn.Module, run: Run) -> _Trace:
    """Which linear layers feed which, from the autograd graph of one forward."""
    trace = _Trace()
    producers: dict[Any, str] = {}
    patterns = {module: block_pattern(name) for name, module in model.named_modules() if _is_linear(module)}
    hooks = []

    def before(module: nn.Module, args: tuple[Any, ...]) -> None:
        pattern = patterns[module]
        if pattern not in trace.sources:
            trace.order.append(pattern)
            trace.sources[pattern] = set()
        if args and isinstance(args[0], torch.Tensor):
            trace.sources[pattern] |= _producers_behind(args[0].grad_fn, producers)

    def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, torch.Tensor) and output.grad_fn is not None:
            producers[output.grad_fn] = patterns[module]

    for module in patterns:
        hooks += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    frozen = [p for p in model.parameters() if not p.requires_grad and p.is_floating_point()]
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        with torch.enable_grad():
            run(model)
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in frozen:
            parameter.requires_grad_(False)
    return trace


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or is_transposed(module)


def _producers_behind(start: Any, producers: Mapping[Any, str]) -> set[str]:
    """Linear layers reached from a graph node without passing through another one."""
    found: set[str] = set()
    seen, queue = set(), [start]
    while queue:
        node = queue.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node in producers:
            found.add(producers[node])
        else:
            queue += [following for following, _ in node.next_functions]
    return found


def flat_tensors(value: Any) -> list[torch.Tensor]:
    """Every floating-point tensor in a module's answer, in order."""
    if isinstance(value, torch.Tensor):
        return [value.detach()] if value.is_floating_point() else []
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in flat_tensors(item)]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in flat_tensors(item)]
    return []


def _difference(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    if [t.shape for t in got] != [t.shape for t in want] or not want:
        return float("inf")
    worst = 0.0
    for a, b in zip(got, want, strict=True):
        if b.numel():
            value = float((a - b).abs().max() / b.abs().max().clamp(min=1e-6))
            worst = max(worst, value if value == value else float("inf"))
    return worst
