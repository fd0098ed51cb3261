"""Everything about one machine, in order of importance, within a time budget: a `NodeProfile`.

memory that a model may use -> memory bandwidth -> compute -> disk -> layers through the real backend per quantization.
**Promises** each figure carries spread, number of samples, method and date; a figure that cannot be had is left out with
a note, never invented, and so is one that cannot be; rates measured before under the same key come from the cache unless `fresh`.
**Fails when** not even memory bandwidth can be measured. **Called by** the probe worker and the command line.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path

from shardwise.clock import Clock
from shardwise.cluster.machine import usable_memory_bytes
from shardwise.errors import ShardwiseError
from shardwise.machines.profile import DeviceProfile, Measurement, NodeProfile, RateTable
from shardwise.machines.profile_cache import ProfileCache, RateKey
from shardwise.model import describe_model
from shardwise.probe import compute, disk, layers, memory
from shardwise.probe.devices import Accelerator, list_accelerators
from shardwise.probe.folders import resolved
from shardwise.probe.plausible import Ceilings, why_impossible
from shardwise.probe.statistics import measurement
from shardwise.processors import default_threads, usable_cores
from shardwise.records import Record, replace
from shardwise.stage.llama import library

OnProgress = Callable[[str, float], None]
QUANTIZATIONS = ("Q4_K", "Q4_0", "Q4_1", "Q5_K", "Q6_K", "Q8_0", "BF16")
QUICK_QUANTIZATIONS = ("Q4_K",)
_KV_ELEMENT_BYTES = {"f16": 2.0, "q8_0": 34 / 32}
_ALL_GPU_LAYERS = 999


class NodeSettings(Record):
    """What to measure and how long."""

    name: str
    quick: bool = False
    threads: int = 0  # of the backend; 0 = as many as a stage would take
    quantizations: tuple[str, ...] = ()  # () = the usual ones
    model: str = ""  # also real layers of this one
    memory_bytes: int = 0  # 0 = as measured
    disk_folder: str = ""  # or OWN_FOLDER
    cache_folder: str = ""  # of rates; "" = no cache, or OWN_FOLDER
    fresh: bool = False

    @property
    def num_threads(self) -> int:
        return self.threads or default_threads()

    def chosen_quantizations(self) -> tuple[str, ...]:
        return self.quantizations or (QUICK_QUANTIZATIONS if self.quick else QUANTIZATIONS)


class NodeReport(Record):
    """A profile and what stood in the way."""

    profile: NodeProfile
    threads: int
    notes: tuple[str, ...] = ()
    took_s: float = 0.0


class NodeSuite:
    """One run."""

    def __init__(self, settings: NodeSettings, clock: Clock, say: OnProgress) -> None:
        self._settings, self._clock, self._say = settings, clock, say
        self._notes: list[str] = []
        self._library = ""
        self._fixed: dict[int, Measurement | None] = {}
        self._ceilings = {_ALL_GPU_LAYERS: Ceilings()}  # by layers on a GPU

    def run(self) -> NodeReport:
        """Measure; takes under ten seconds with `quick`, under a minute otherwise (on a machine that is free)."""
        settings, started_s = self._settings, self._clock.now_s()
        quick_s = 0.4 if settings.quick else 1.5
        self._say("memory", 0.0)
        total = 96 * 2**20 if settings.quick else 384 * 2**20
        memory_rate = measurement(
            memory.triad_samples(total, settings.num_threads, quick_s, self._clock), memory.METHOD, self._clock
        )
        self._say("compute", 0.08)
        compute_rate = measurement(compute.compute_samples(quick_s / 2, self._clock), compute.METHOD, self._clock)
        self._say("disk", 0.12)
        disk_rate = self._disk()
        accelerators = self._accelerators()
        self._ceilings[0] = Ceilings.of_cpu(memory_rate, compute_rate)
        rates = self._all_rates(gpu_layers=0, device=_cpu_name(settings.num_threads), done=0.2, share=0.8)
        profile = NodeProfile(
            name=settings.name,
            memory_bytes=settings.memory_bytes or usable_memory_bytes(),
            memory_bytes_per_s=memory_rate,
            compute_flops_per_s=compute_rate,
            disk_bytes_per_s=disk_rate,
            num_cores=usable_cores(),
            rates=tuple(rates),
            devices=tuple(device for found in accelerators for device in self._device(found)),
        )
        self._say("done", 1.0)
        took_s = self._clock.now_s() - started_s
        return NodeReport(profile=profile, threads=settings.num_threads, notes=tuple(self._notes), took_s=took_s)

    def _disk(self) -> Measurement | None:
        settings = self._settings
        size = 32 * 2**20 if settings.quick else 256 * 2**20
        folder = resolved(settings.disk_folder)
        try:
            samples, method = disk.disk_samples(folder, size, 2 if settings.quick else 3, self._clock)
        except ShardwiseError as error:
            self._notes.append(error.one_line())
            return None
        return measurement(samples, method, self._clock)

    def _accelerators(self) -> list[Accelerator]:
        try:
            self._library = library.describe()
            return list_accelerators()
        except ShardwiseError as error:
            self._notes.append(error.one_line())
            return []

    def _device(self, found: Accelerator) -> list[DeviceProfile]:
        """A GPU's figures come from its layers: there is no triad on it. Without them it is no device to plan with."""
        rates = self._all_rates(gpu_layers=_ALL_GPU_LAYERS, device=f"{found.kind} {found.name}", done=0.9, share=0.1)
        weights = [rate for rate in rates if not rate.quantization.startswith("KV_")]
        if not weights:
            self._notes.append(f"{found.name} was left out: no layer could be measured on it")
            return []
        best = max(weights, key=lambda rate: rate.weight_bytes_per_s.value)
        fastest = max(weights, key=lambda rate: rate.compute_flops_per_s.value)
        device = DeviceProfile(
            kind=found.kind,
            name=found.name,
            memory_bytes=found.free_bytes,
            memory_bytes_per_s=best.weight_bytes_per_s,
            compute_flops_per_s=fastest.compute_flops_per_s,
            rates=tuple(rates),
        )
        return [device]

    def _all_rates(self, *, gpu_layers: int, device: str, done: float, share: float) -> list[RateTable]:
        """One table a quantization, one for the KV cache, one for the user's model."""
        if not self._library:
            return []
        settings = self._settings
        wanted = [*settings.chosen_quantizations()]
        jobs = len(wanted) + (0 if settings.quick else 1) + bool(settings.model)
        out: list[RateTable] = []
        ceilings = self._ceilings[gpu_layers]
        for index, quantization in enumerate(wanted):
            self._say(f"{quantization} layers", done + share * index / jobs)
            out += self._guarded(lambda q=quantization: self._rates(q, device, gpu_layers), ceilings)  # type: ignore[misc]
        if not settings.quick:
            self._say("KV cache", done + share * len(wanted) / jobs)
            out += self._guarded(lambda: self._kv("f16", device, gpu_layers), ceilings)
        if settings.model and gpu_layers == 0:
            self._say("layers of the model", done + share * (jobs - 1) / jobs)
            for real in self._guarded(self._model_rates, ceilings):
                out = [real, *(table for table in out if table.quantization != real.quantization)]
        return out

    def _rates(self, quantization: str, device: str, gpu_layers: int) -> RateTable:
        settings = self._settings

        def measure() -> RateTable:
            if gpu_layers not in self._fixed:
                budget_s = 0.3 if settings.quick else 1.0
                self._fixed[gpu_layers] = layers.fixed_layer_cost(
                    threads=settings.num_threads, budget_s=budget_s, clock=self._clock, gpu_layers=gpu_layers
                )
            return layers.synthetic_rates(
                quantization,
                threads=settings.num_threads,
                budget_s=2.0 if settings.quick else 4.0,
                fixed_s=self._fixed[gpu_layers],
                clock=self._clock,
                gpu_layers=gpu_layers,
            )

        return self._cached(quantization, device, measure, self._ceilings[gpu_layers])

    def _kv(self, kv_type: str, device: str, gpu_layers: int) -> RateTable:
        def measure() -> RateTable:
            return layers.kv_rates(
                kv_type,
                _KV_ELEMENT_BYTES[kv_type],
                threads=self._settings.num_threads,
                budget_s=2.0,
                clock=self._clock,
                gpu_layers=gpu_layers,
            )

        return self._cached(f"KV_{kv_type.upper()}", device, measure, self._ceilings[gpu_layers])

    def _model_rates(self) -> RateTable:
        settings = self._settings
        folder = resolved(settings.cache_folder or settings.disk_folder, "rates") / "probe-slices"
        model = describe_model(settings.model)
        budget_s = 3.0 if settings.quick else 8.0
        return layers.model_rates(model, folder, threads=settings.num_threads, budget_s=budget_s, clock=self._clock)

    def _cached(self, quantization: str, device: str, measure: Callable[[], RateTable], ceilings: Ceilings) -> RateTable:
        settings = self._settings
        if not settings.cache_folder:
            return measure()
        cache = ProfileCache(resolved(settings.cache_folder, "rates"))
        key = RateKey(device=device, quantization=quantization, library=self._library, kernel="quick" if settings.quick else "")
        known = None if settings.fresh else cache.get(key)
        if known is None and settings.quick and not settings.fresh:
            known = cache.get(replace(key, kernel=""))  # a longer run serves a quick one
        if known is None or why_impossible(known, ceilings):
            known = measure()
            if not why_impossible(known, ceilings):
                cache.put(key, known)
        return known

    def _guarded(self, measure: Callable[[], RateTable], ceilings: Ceilings) -> list[RateTable]:
        try:
            table = measure()
        except ShardwiseError as error:
            self._notes.append(error.one_line())
            return []
        against = why_impossible(table, ceilings)
        if against:
            self._notes.append(against)
        return [] if against else [table]


def _cpu_name(threads: int) -> str:
    """What rates of a CPU depend on."""
    return f"cpu {cpu_model()} {threads} threads"


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor's name as the system tells it."""
    if cpuinfo.exists():
        for line in cpuinfo.read_text(errors="replace").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "Hardware") and value.strip():
                return value.strip()
    return platform.processor() or platform.machine()
