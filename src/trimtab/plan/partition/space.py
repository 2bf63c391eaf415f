"""A pipeline job as arrays: cost and fit of every stage on every class of hosts, cost of every cut.

A class is a set of interchangeable hosts: equal profiles, memory and links. Searches work on counts of classes and on
cuts: cut j lies after layer j, a stage is the pair of cuts (a, b) and holds layers a+1 to b. Chooses nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.model.pipeline import DeviceType, Host, HostLink, PipelineJob

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

MIB = float(2**20)
TIE = 1e-9
"""Relative tolerance of equal values."""

UNLIMITED = float(np.finfo(np.float64).max)
"""A bottleneck that allows everything finite."""


@dataclass(frozen=True)
class ClassLinks:
    """Links between classes: Mbit/s and latency in seconds. Rows send, columns receive."""

    mbps: Floats
    latency: Floats


@dataclass(frozen=True)
class PartitionSpace:
    """The arrays of a job for given classes of hosts.

    `seconds[t, a, b]` compute time, `fits[t, a, b]` whether the stage is allowed (memory; only a < b), `cut[j, u, v]`
    transfer over cut j from class u to class v, `enter[t]` and `leave[t]` the two ends.
    """

    layers: int
    counts: tuple[int, ...]
    seconds: Floats
    fits: Bools
    cut: Floats
    enter: Floats
    leave: Floats
    max_devices: int

    @property
    def classes(self) -> int:
        return len(self.counts)


def stage_bytes(job: PipelineJob) -> Floats:
    """Memory of a stage (a, b) in bytes; infinite where a >= b or a cut is not allowed."""
    layers = job.model.layers
    crossing = crossing_bytes(job)
    held = np.concatenate(([0.0], np.cumsum(np.asarray(job.model.mem_mb, dtype=np.float64)))) * MIB
    first = np.arange(layers + 1) == 0
    taken_in = crossing * np.where(first, 1.0, 1.0 + job.buffers_in)
    given_out = crossing * (1.0 + job.buffers_out)
    need = held[None, :] - held[:, None] + taken_in[:, None] + given_out[None, :]
    need[np.tril_indices(layers + 1)] = np.inf
    if job.cut_every > 1:
        inside = np.arange(layers + 1) % job.cut_every != 0
        need[inside, :] = need[:, inside] = np.inf
    return np.asarray(need, dtype=np.float64)


def crossing_bytes(job: PipelineJob) -> Floats:
    """Bytes of a microbatch that cross each cut; cut 0 is the input, the last one the result."""
    counts = [job.model.parameters_in, *job.model.parameters_out]
    return np.array([float(count) * job.element_bytes * job.batch_size for count in counts])


def capacity_bytes(job: PipelineJob, kind: DeviceType) -> float:
    """Memory of a device that a stage may use."""
    return kind.mem_mb * MIB * (1.0 - job.headroom)


def transfer_seconds(crossing: float, mbps: float, latency: float) -> float:
    """Transfer time. Zero bytes need no link; without bandwidth nothing else arrives."""
    if crossing == 0:
        return 0.0
    return latency + crossing / (mbps * MIB / 8) if mbps > 0 else np.inf


def link_table(job: PipelineJob) -> dict[tuple[str, str], HostLink]:
    """Links by host pair, in both directions."""
    return {pair: link for link in job.links for pair in (link.hosts, link.hosts[::-1])}


def join_of(job: PipelineJob, links: dict[tuple[str, str], HostLink], a: Host, b: Host) -> tuple[float, float]:
    """Mbit/s and latency between two hosts: the stated link, or the slower of their types."""
    link = links.get((a.name, b.name))
    by_type = min(job.type_of(a.name).bw_mbps, job.type_of(b.name).bw_mbps)
    if link is None:
        return by_type, 0.0
    return (by_type if link.bw_mbps is None else link.bw_mbps), link.latency_s


def host_classes(job: PipelineJob) -> list[list[Host]]:
    """The hosts that can hold layers, in classes of interchangeable hosts; hosts in file order.

    A first stage on the source's class may as well be on the source itself, which needs no input transfer; likewise a
    last stage on the sink's class. Only where both are in one class a schedule cannot always have both: then each is a
    class of its own.
    """
    classes = _classes(job, ())
    ends = [name for name in (job.source, job.sink) if name is not None]
    if len(ends) == 2 and any({host.name for host in members}.issuperset(ends) for members in classes):
        return _classes(job, tuple(ends))
    return classes


def _classes(job: PipelineJob, alone: tuple[str, ...]) -> list[list[Host]]:
    """Classes of hosts, with the hosts in `alone` in classes of their own.

    Comparing with the first member of a class is enough: exchanging it with each of the others generates every
    exchange.
    """
    kinds = {kind.name: kind for kind in job.types}
    links = link_table(job)
    seen: dict[tuple[object, ...], list[list[Host]]] = {}
    for host in job.hosts:
        kind = kinds[host.type]
        if len(kind.time_s) != job.model.layers or not kind.time_s:
            continue
        alike = seen.setdefault((kind.bw_mbps, kind.mem_mb, kind.time_s), [])
        for members in alike:
            first = members[0]
            if host.name in alone or first.name in alone or not _interchangeable(job, links, first, host):
                continue
            members.append(host)
            break
        else:
            alike.append([host])
    return [members for alike in seen.values() for members in alike]


def hosts_for(job: PipelineJob, classes: list[list[Host]], stages: list[int]) -> list[Host]:
    """A host for every stage, of its class: the ends where they save a transfer, else in file order."""
    chosen: dict[int, Host] = {}
    for at, name in ((0, job.source), (len(stages) - 1, job.sink)):
        for host in classes[stages[at]]:
            if host.name == name:
                chosen[at] = host
    taken = {host.name for host in chosen.values()}
    unused = [iter([host for host in members if host.name not in taken]) for members in classes]
    return [chosen[at] if at in chosen else next(unused[t]) for at, t in enumerate(stages)]


def _interchangeable(job: PipelineJob, links: dict[tuple[str, str], HostLink], a: Host, b: Host) -> bool:
    if not links:
        return True
    others = (h for h in job.hosts if h.name not in (a.name, b.name))
    return all(join_of(job, links, a, h) == join_of(job, links, b, h) for h in others)


def space_of(job: PipelineJob, classes: list[list[Host]]) -> PartitionSpace:
    """The arrays of a job, with the links of the first two members of its classes."""
    links = link_table(job)
    size = len(classes)
    joins = ClassLinks(np.zeros((size, size)), np.zeros((size, size)))
    for u, senders in enumerate(classes):
        for v, receivers in enumerate(classes):
            # A class of one host never sends to itself; that entry is not used.
            receiver = receivers[-1] if u == v else receivers[0]
            joins.mbps[u, v], joins.latency[u, v] = join_of(job, links, senders[0], receiver)
    return arrays(job, classes, joins)


def arrays(job: PipelineJob, classes: list[list[Host]], joins: ClassLinks) -> PartitionSpace:
    """The arrays of a job for classes with these links."""
    layers, size = job.model.layers, len(classes)
    kinds = {kind.name: kind for kind in job.types}
    by_class = [kinds[members[0].type] for members in classes]
    crossing = crossing_bytes(job)
    need = stage_bytes(job)
    seconds = np.zeros((size, layers + 1, layers + 1))
    fits = np.zeros((size, layers + 1, layers + 1), dtype=np.bool_)
    for t, kind in enumerate(by_class):
        elapsed = np.concatenate(([0.0], np.cumsum(np.asarray(kind.time_s, dtype=np.float64))))
        # Differences of running sums may be -1e-17 where layers take no time.
        seconds[t] = np.maximum(elapsed[None, :] - elapsed[:, None], 0.0)
        fits[t] = need < capacity_bytes(job, kind)
    with np.errstate(divide="ignore", invalid="ignore"):
        cut = joins.latency[None] + crossing[:, None, None] / (joins.mbps[None] * MIB / 8)
    cut[crossing == 0] = 0.0
    ends = [_end(job, classes, host, float(crossing[at])) for host, at in ((job.source, 0), (job.sink, layers))]
    most = min(job.max_devices or layers, layers, sum(len(members) for members in classes))
    counts = tuple(min(len(members), most) for members in classes)
    return PartitionSpace(layers, counts, seconds, fits, cut, ends[0], ends[1], most)


def _end(job: PipelineJob, classes: list[list[Host]], name: str | None, crossing: float) -> Floats:
    """Transfer time of the first or last stage on each class from the source or to the sink."""
    if name is None:
        return np.zeros(len(classes))
    links = link_table(job)
    end = next(host for host in job.hosts if host.name == name)
    return np.array(
        [
            0.0
            if any(member.name == name for member in members)
            else transfer_seconds(crossing, *join_of(job, links, end, members[0]))
            for members in classes
        ]
    )
