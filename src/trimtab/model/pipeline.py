"""Pipelines: a chain of layers, device types, hosts, the links between them, and a schedule over them.

Loaders build a `PipelineJob`, the planner turns it into a `PartitionAnswer`. No planning decisions are made here. Units
are in the names; MB are 2^20 bytes and Mbps 2^20 bits a second, as in the files.
"""

from __future__ import annotations

from typing import Literal

from trimtab.core.frozen import Frozen

Objective = Literal["throughput", "latency"]


class ModelChain(Frozen):
    """A model whose layers run in sequence. `parameters_*` count elements of one item of a microbatch."""

    name: str
    mem_mb: tuple[float, ...]
    parameters_in: int
    parameters_out: tuple[int, ...]

    @property
    def layers(self) -> int:
        return len(self.mem_mb)


class DeviceType(Frozen):
    """A type of device. Without `time_s` it was not profiled: it holds no layer, but may be source or sink."""

    name: str
    bw_mbps: float
    mem_mb: float
    time_s: tuple[float, ...] = ()


class Host(Frozen):
    """A usable device, under the name that the runtime resolves."""

    name: str
    type: str


class HostLink(Frozen):
    """The link between two hosts, in both directions. `bw_mbps` `None`: as their types say."""

    hosts: tuple[str, str]
    bw_mbps: float | None = None
    latency_s: float = 0.0


class PipelineJob(Frozen):
    """Input of the partition planner.

    `element_bytes` is the size of an element of the microbatch; `headroom` the share of each device's memory to keep
    free. Data start at `source` and results end at `sink`; where these are not named, both ends are free. A stage may
    only end after a multiple of `cut_every` layers.
    """

    model: ModelChain
    types: tuple[DeviceType, ...]
    hosts: tuple[Host, ...]
    batch_size: int = 8
    element_bytes: int = 4
    buffers_in: int = 2
    buffers_out: int = 2
    headroom: float = 0.0
    links: tuple[HostLink, ...] = ()
    source: str | None = None
    sink: str | None = None
    max_devices: int | None = None
    cut_every: int = 1

    def type_of(self, host: str) -> DeviceType:
        name = next(h.type for h in self.hosts if h.name == host)
        return next(t for t in self.types if t.name == name)


class PipelineStage(Frozen):
    """Layers `first` to `last` (from 1, inclusive) on one host.

    `transfer_seconds` is the time to send its output on: 0 after the last stage unless a sink is named.
    """

    host: str
    type: str
    first: int
    last: int
    compute_seconds: float
    transfer_seconds: float
    memory_bytes: float
    memory_available_bytes: float


class Schedule(Frozen):
    """Stages in layer order. `input_seconds`: time to bring the input in, where a source is named."""

    stages: tuple[PipelineStage, ...]
    input_seconds: float = 0.0

    @property
    def bottleneck_seconds(self) -> float:
        """Time between two microbatches in the steady state."""
        times = [self.input_seconds]
        for stage in self.stages:
            times += (stage.compute_seconds, stage.transfer_seconds)
        return max(times)

    @property
    def latency_seconds(self) -> float:
        """Time of one microbatch through an empty pipeline."""
        return self.input_seconds + sum(s.compute_seconds + s.transfer_seconds for s in self.stages)


class FrontierPoint(Frozen):
    """The smallest bottleneck with at most `devices` devices."""

    devices: int
    bottleneck_seconds: float


class PipelineLimit(Frozen):
    """What limits a pipeline: compute of a stage, or a transfer. `stage` counts from 0; -1 is the input."""

    what: Literal["compute", "transfer"]
    stage: int
    seconds: float


class PartitionAnswer(Frozen):
    """A schedule with its proof.

    `lower_bound_seconds` bounds the objective: bottleneck or latency. `optimal`: the schedule reaches it.
    `ties_proven`: no schedule as good has a lower latency or, then, fewer devices. `limits`: what to improve first.
    """

    job: PipelineJob
    objective: Objective
    schedule: Schedule
    lower_bound_seconds: float
    optimal: bool
    ties_proven: bool
    limits: tuple[PipelineLimit, ...]
    method: str
    frontier: tuple[FrontierPoint, ...] = ()
    assumptions: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def throughput(self) -> float | None:
        """Items a second in the steady state; `None` where nothing takes time."""
        bottleneck = self.schedule.bottleneck_seconds
        return self.job.batch_size / bottleneck if bottleneck > 0 else None
