"""A pipeline job as arrays, and the exact minimum bottleneck of its schedules.

A class is a set of interchangeable hosts: equal profiles, memory and links. Searches work on counts of classes and on
cuts: cut j lies after layer j, a stage is the pair of cuts (a, b) and holds layers a+1 to b.

A bottleneck is the time of some stage or transfer, so there are finitely many candidates, and bisection finds the
minimum with a reachability test for each: which vectors of used devices reach which cut, if only stages and transfers
within the candidate are allowed. Such a set is one big integer with a bit for every vector: adding a device of a class
is a shift, a union is an `or`. Nothing is rounded: the answer is one of the candidates.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from trimtab.core.frozen import Frozen
from trimtab.model.pipeline import DeviceType, Host, HostLink, PipelineJob

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]
Ints = npt.NDArray[np.int64]

MIB = float(2**20)
TIE = 1e-9
"""Relative tolerance of equal values."""

UNLIMITED = float(np.finfo(np.float64).max)
"""A bottleneck that allows everything finite."""


class PartitionSpace(Frozen):
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
    return kind.mem_mb * MIB * (1.0 - job.headroom)


def transfer_seconds(crossing: float, mbps: float, latency: float) -> float:
    """Transfer time. Zero bytes need no link; without bandwidth nothing else arrives."""
    if crossing == 0:
        return 0.0
    return latency + crossing / (mbps * MIB / 8) if mbps > 0 else np.inf


def link_table(job: PipelineJob) -> dict[tuple[str, str], HostLink]:
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
    layers, size = job.model.layers, len(classes)
    mbps, latency = np.zeros((size, size)), np.zeros((size, size))  # rows send, columns receive
    for u, senders in enumerate(classes):
        for v, receivers in enumerate(classes):
            # A class of one host never sends to itself; that entry is not used.
            receiver = receivers[-1] if u == v else receivers[0]
            mbps[u, v], latency[u, v] = join_of(job, links, senders[0], receiver)
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
        cut = latency[None] + crossing[:, None, None] / (mbps[None] * MIB / 8)
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


class DeviceVectors(Frozen):
    """Numbering of vectors of used devices: one digit for each class.

    `growing[t]` has the bits of the vectors to which a device of class t can be added.
    """

    strides: tuple[int, ...]
    size: int
    growing: tuple[int, ...]
    totals: npt.NDArray[np.int16]
    everything: int


def vectors_of(space: PartitionSpace) -> DeviceVectors:
    strides, size = [], 1
    for count in space.counts:
        strides.append(size)
        size *= count + 1
    grids = np.ix_(*[np.arange(count + 1, dtype=np.int16) for count in reversed(space.counts)])
    totals = sum(grids, np.zeros((), dtype=np.int16)).reshape(-1)
    below_max = totals < space.max_devices
    growing = []
    for t, count in enumerate(space.counts):
        digit = np.broadcast_to(grids[len(space.counts) - 1 - t], [c + 1 for c in reversed(space.counts)]).reshape(-1)
        flags = np.packbits(below_max & (digit < count), bitorder="little")
        growing.append(int.from_bytes(flags.tobytes(), "little"))
    return DeviceVectors(tuple(strides), size, tuple(growing), totals, (1 << size) - 1)


def flags_of(bits: int, size: int) -> npt.NDArray[np.uint8]:
    """The bytes of a set; bit i of the set is bit i % 8 of byte i // 8."""
    return np.frombuffer(bits.to_bytes((size + 7) // 8, "little"), dtype=np.uint8)


class AllowedCuts(Frozen):
    """What a bottleneck allows: for each class and cut the cuts at which a stage that ends there may begin."""

    starts: list[list[list[int]]]
    senders: list[list[list[int]]]
    enter: list[bool]
    leave: list[bool]


def allowed(space: PartitionSpace, bottleneck: float) -> AllowedCuts:
    """Stages and transfers within the bottleneck."""
    starts = []
    for t in range(space.classes):
        ends, begins = np.nonzero((space.fits[t] & (space.seconds[t] <= bottleneck)).T)
        at = np.searchsorted(ends, np.arange(space.layers + 2)).tolist()
        listed = begins.tolist()
        starts.append([listed[at[b] : at[b + 1]] for b in range(space.layers + 1)])
    passes = space.cut <= bottleneck
    senders = [[np.flatnonzero(passes[j, :, v]).tolist() for v in range(space.classes)] for j in range(space.layers)]
    return AllowedCuts(starts, senders, (space.enter <= bottleneck).tolist(), (space.leave <= bottleneck).tolist())


def reached(space: PartitionSpace, vectors: DeviceVectors, may: AllowedCuts) -> int:
    """The vectors of devices with which all layers can be placed."""
    classes = range(space.classes)
    ready = [[vectors.growing[t] & 1 if may.enter[t] else 0 for t in classes]]
    last: list[int] = []
    for b in range(1, space.layers + 1):
        last = []
        for t in classes:
            found = 0
            for a in may.starts[t][b]:
                found |= ready[a][t]
            last.append(found << vectors.strides[t])
        if b < space.layers:
            row = []
            for v in classes:
                found = 0
                for u in may.senders[b][v]:
                    found |= last[u]
                row.append(found & vectors.growing[v])
            ready.append(row)
    out = 0
    for t in classes:
        if may.leave[t]:
            out |= last[t]
    return out


def completable(space: PartitionSpace, vectors: DeviceVectors, may: AllowedCuts) -> list[list[int]]:
    """For each cut and class: the vectors, used up to a stage that ends there, with which the rest can be placed."""
    classes = range(space.classes)
    layers = space.layers
    out = [[0] * space.classes for _ in range(layers + 1)]
    out[layers] = [vectors.everything if may.leave[t] else 0 for t in classes]
    # finish[a][t]: vectors before a stage on class t that begins at cut a.
    finish = [[0] * space.classes for _ in range(layers + 1)]
    for b in range(layers, 0, -1):
        if b < layers:
            row = out[b]
            for v in classes:
                for u in may.senders[b][v]:
                    row[u] |= finish[b][v]
        for t in classes:
            before = (out[b][t] >> vectors.strides[t]) & vectors.growing[t]
            if before:
                for a in may.starts[t][b]:
                    finish[a][t] |= before
    out[0] = [finish[0][t] if may.enter[t] else 0 for t in classes]
    return out


def candidates(space: PartitionSpace) -> Floats:
    inner = space.cut[1 : space.layers].reshape(-1)
    values = np.concatenate([space.seconds[space.fits], inner, space.enter, space.leave])
    return np.unique(values[np.isfinite(values)])


def first_true(count: int, holds: Callable[[int], bool]) -> int:
    """The first of so many indices for which something holds, as it does for all after it; `count` if for none."""
    return bisect_left(range(count), True, key=holds)


def least_bottleneck(space: PartitionSpace, vectors: DeviceVectors) -> float | None:
    """The minimum bottleneck of any schedule; None if there is no schedule."""
    values = candidates(space)
    least = first_true(len(values), lambda at: bool(reached(space, vectors, allowed(space, values[at]))))
    return float(values[least]) if least < len(values) else None


def fewest_devices(space: PartitionSpace, vectors: DeviceVectors, may: AllowedCuts) -> int | None:
    """The fewest devices that can hold all layers under what is allowed."""
    found = reached(space, vectors, may)
    if not found:
        return None
    flags = np.unpackbits(flags_of(found, vectors.size), count=vectors.size, bitorder="little").view(np.bool_)
    return int(vectors.totals[flags].min())
