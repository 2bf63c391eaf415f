"""Diagnoses why workloads wait on a Ray cluster: from a snapshot to causes, each with remedies.

Finds the cause of each wait, and whether it can ever end on the nodes that are here and stay. "Never" is said only
where it is proven (`fitting.py`), and no waiting workload is left out. Snapshots come from
`runtime/rayapi/gcs_snapshot.py`, `render/text/why.py` renders findings. The order of checks is the same for all: does
it fit now; would it fit on a node that drains; would it fit on empty nodes; could nodes of the autoscaler take it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from trimtab.core.resources import NOTHING, Resources, amount_text, total
from trimtab.machines.diagnose.findings import (
    UNDER_WAY,
    Diagnosis,
    DiagnosisNote,
    Finding,
    NodeFit,
    NoteKind,
    WaitCause,
)
from trimtab.machines.diagnose.fitting import (
    Blocker,
    FitResult,
    NodeSpace,
    blockers_to_remove,
    holdings_of,
    place,
    rival,
    room_for,
    size_of,
)
from trimtab.machines.diagnose.impossible import impossible
from trimtab.machines.diagnose.snapshot import (
    GcsSnapshot,
    NodeSnapshot,
    NonRayGpuUser,
    PendingStage,
    PendingWorkload,
    PendingWorkloads,
    ResourceRequest,
    WorkloadKind,
    total_requested,
)
from trimtab.model.pool import PlacementStrategy

LONG_S = 30.0  # Ray places what fits within seconds; after this something else is wrong
BLOCKERS_NAMED = 4


def diagnose(snapshot: GcsSnapshot) -> Diagnosis:
    """The cause of every wait, with remedies, and notes."""
    alike: dict[object, list[PendingWorkload]] = {}
    groups = {workload.id for workload in snapshot.waiting if workload.kind is WorkloadKind.group}
    followers: dict[str, list[PendingWorkload]] = {}
    for workload in snapshot.waiting:
        if workload.stage is PendingStage.resources and workload.group in groups:
            followers.setdefault(str(workload.group), []).append(workload)
        else:
            alike.setdefault(_sort(workload), []).append(workload)
    findings = []
    for workloads in alike.values():
        behind = [
            follower
            for workload in workloads
            if workload.kind is WorkloadKind.group
            for follower in followers.get(workload.id, ())
        ]
        findings.append(_finding(snapshot, tuple(workloads), tuple(behind)))
    findings = _pairs(findings)
    findings.sort(key=lambda finding: (not finding.never, finding.cause in UNDER_WAY, finding.since or snapshot.at))
    return Diagnosis(tuple(findings), _notes(snapshot))


def _pairs(findings: list[Finding]) -> list[Finding]:
    """Two workloads that block each other share a finding."""
    merged: list[Finding] = []
    for finding in findings:
        ids = {workload.id for workload in finding.workloads}
        match = next((other for other in merged if other.rival in ids), None)
        if match is None or finding.rival not in {workload.id for workload in match.workloads}:
            merged.append(finding)
        else:
            merged[merged.index(match)] = replace(
                match,
                workloads=(*match.workloads, *finding.workloads),
                blockers=(*match.blockers, *finding.blockers),
                followers=(*match.followers, *finding.followers),
            )
    return merged


def judge(snapshot: GcsSnapshot, waiting: PendingWorkload) -> Finding:
    return _finding(snapshot, (waiting,), ())


def _sort(workload: PendingWorkload) -> object:
    """Workloads with the same key share a finding."""
    node = workload.node if workload.stage is PendingStage.starting or not workload.queued else None
    return (
        workload.kind, workload.job, workload.class_name, workload.requests, workload.stage, workload.strategy,
        workload.pinned, workload.group, workload.bundle, node, workload.restarted, workload.queued,
    )  # fmt: skip


def _finding(snapshot: GcsSnapshot, workloads: PendingWorkloads, followers: PendingWorkloads) -> Finding:
    first = workloads[0]
    if first.stage is PendingStage.inputs:
        sentence = "its arguments are not ready: the tasks that produce them have not ended, or wait themselves"
        found = Finding(WaitCause.inputs, workloads, sentence, remedies=("check the tasks that produce its arguments",))
    elif first.stage is PendingStage.starting:
        found = _starting(snapshot, workloads)
    elif first.group is not None:
        found = _in_group(snapshot, workloads)
    else:
        found = _for_resources(snapshot, workloads)
    return replace(found, followers=followers) if followers else found


# ---- placed, starting ----------------------------------------------------------------------------------------------


def _starting(snapshot: GcsSnapshot, workloads: PendingWorkloads) -> Finding:
    first = workloads[0]
    node = snapshot.node_name(first.node)
    if any(request.amounts.get("gpu") for request in first.requests):
        ids = {workload.id for workload in workloads}
        mine = {index for holder in snapshot.holders if holder.id in ids for index in holder.gpus}
        for gpu_user in snapshot.non_ray_gpu_users:
            same_gpu = not mine or gpu_user.place is None or gpu_user.place in mine
            if gpu_user.node == first.node and gpu_user.node is not None and same_gpu:
                sentence = f"it has GPU {gpu_user.gpu} on {node}, but {gpu_user_text(gpu_user)}; Ray does not know that"
                end = f"process {gpu_user.pid} ends, or the node is started without that GPU (CUDA_VISIBLE_DEVICES)"
                return Finding(WaitCause.gpu_outside, workloads, sentence, remedies=(end,))
    again = "is started again" if first.restarted else "is started"
    sentence = f"it is placed on {node} and {again}: its process or constructor is not ready"
    late = _longest(snapshot, workloads)
    hint = f"its constructor or runtime environment takes long: see the logs of {node} (`ray logs`)"
    remedies = (hint,) if late is not None and late > LONG_S else ()
    return Finding(WaitCause.starting, workloads, sentence, remedies=remedies)


# ---- inside a placement group --------------------------------------------------------------------------------------


def _in_group(snapshot: GcsSnapshot, workloads: PendingWorkloads) -> Finding:
    first = workloads[0]
    group = snapshot.group(first.group)
    asked = total_requested(first.requests)
    if group is None:
        sentence = f"its placement group {(first.group or '')[:12]} does not exist"
        remedy = "cancel it, and submit it to an existing group"
        return Finding(WaitCause.group_gone, workloads, sentence, True, asked, remedies=(remedy,))
    name = f"placement group {group.name or group.id[:12]}"
    bundles: Sequence[int] = range(len(group.bundles)) if first.bundle is None else (first.bundle,)
    bundles = [i for i in bundles if i < len(group.bundles)]
    sizes = [group.bundles[i] for i in bundles]
    # Without a bundle index Ray uses any single bundle, never two of them.
    if not any(asked.within(size) for size in sizes):
        largest = max(sizes, key=lambda size: sum(units for _, units in size), default=NOTHING)
        sentence = f"it asks {asked} in {name}, whose {_bundle(first.bundle)} {largest}"
        return Finding(
            WaitCause.too_big, workloads, sentence, True, asked, remedies=("a bundle as large as what runs in it",)
        )
    if any(asked.within(group.free[i]) for i in bundles):
        sentence = f"there is room for it in {name}: Ray is about to start it"
        return Finding(WaitCause.fits, workloads, sentence, asked=asked, remedies=_if_late(snapshot, workloads))
    inside = [holder for holder in snapshot.holders if holder.group == group.id and holder.bundle in (None, *bundles)]
    held = total([group.bundles[i].minus(group.free[i]) for i in bundles])
    names = _some([f"{holder.kind.value} {holder.name}" for holder in inside]) or "a process that is being started"
    parts = [
        f"{_number(resource, held.get(resource))} of {amount_text(resource, total(sizes).get(resource))}"
        for resource, _ in asked
    ]
    sentence = f"it asks {asked} in {name}, where {_some(parts)} {_is(parts)} taken by {names}"
    remedies = (f"{names} ends", "a group with more bundles")
    blockers = tuple(x.id for x in inside)
    return Finding(WaitCause.group_full, workloads, sentence, False, asked, remedies=remedies, blockers=blockers)


def _bundle(bundle: int | None) -> str:
    return "bundles have at most" if bundle is None else f"bundle {bundle} has"


# ---- waiting for resources -----------------------------------------------------------------------------------------


def _for_resources(snapshot: GcsSnapshot, workloads: PendingWorkloads) -> Finding:
    first = workloads[0]
    allowed = [node for node in snapshot.nodes if first.pinned in (None, node.id)]
    staying = [node for node in allowed if node.drain is None]
    if not allowed and first.pinned is not None:
        sentence = f"it may run on node {first.pinned[:12]} only, which does not exist"
        return Finding(WaitCause.no_node, workloads, sentence, True, remedies=("use soft node affinity",))
    ready = _set_aside(snapshot, first)
    if ready is not None:
        sentence = f"its resources are reserved on {ready.name}: its process is being started"
        return Finding(WaitCause.starting, workloads, sentence, remedies=_if_late(snapshot, workloads))
    now = _fit(first, staying)
    if now.nodes is not None:
        return _fits_now(snapshot, workloads, now)
    rows = _rows(snapshot, first, allowed)
    with_draining = _fit(first, allowed)
    ever = _fit(first, staying, empty=True)
    if with_draining.nodes is not None or (not ever.possible and _fit(first, allowed, empty=True).possible):
        found = _drains(snapshot, workloads, allowed, with_draining, ever.possible)
    elif ever.possible:
        found = _taken(snapshot, workloads, staying)
    else:
        found = impossible(workloads, [node for node in allowed if node.drain is None] or allowed)
    if found.cause is not WaitCause.draining:
        found = _note_draining(snapshot, found, [node for node in allowed if node.drain is not None])
    if found.never:
        found = _unless_nodes_come(snapshot, found, staying)
    kept = sum(1 for request in first.requests if request.node is not None)
    holds = f"it still holds {kept} of its {len(first.requests)} bundles; " if kept else ""
    sentence = f"{holds}{found.sentence}"
    return replace(found, sentence=sentence, rows=rows, asked=_hardest(first, staying or allowed).amounts)


def _spaces(nodes: Iterable[NodeSnapshot], *, empty: bool = False) -> list[NodeSpace]:
    return [NodeSpace(node.id, node.total if empty else node.free, node.labels) for node in nodes]


def _fit(waiting: PendingWorkload, nodes: Iterable[NodeSnapshot], *, empty: bool = False) -> FitResult:
    """Whether it fits. Bundles already placed count as taken also where nodes are assumed empty."""
    spaces = _spaces(nodes, empty=empty)
    kept: dict[str, Resources] = {}
    if empty:
        for request in waiting.requests:
            if request.node is not None:
                kept[request.node] = kept.get(request.node, NOTHING).plus(request.amounts)
    spaces = [NodeSpace(space.node, space.free.minus(kept.get(space.node, NOTHING)), space.labels) for space in spaces]
    return place(waiting.requests, spaces, waiting.strategy)


def _set_aside(snapshot: GcsSnapshot, waiting: PendingWorkload) -> NodeSnapshot | None:
    """The node that has reserved resources for it before Ray says so: more is taken there than holders explain."""
    node = snapshot.node(waiting.node)
    if node is None or waiting.queued or len(waiting.requests) != 1 or not waiting.requests[0].amounts:
        return None
    return node if waiting.requests[0].amounts.within(snapshot.unexplained(node)) else None


def _fits_now(snapshot: GcsSnapshot, workloads: PendingWorkloads, fit: FitResult) -> Finding:
    nodes = dict.fromkeys(snapshot.node_name(node) for node in fit.nodes or ())
    sentence = f"there is room for it on {_some(list(nodes))}: Ray is about to start it"
    if workloads[0].pinned is not None:
        sentence = f"there is room for it on {_some(list(nodes))}, the only node it may use: Ray is about to start it"
    asked = total_requested(workloads[0].requests)
    return Finding(WaitCause.fits, workloads, sentence, asked=asked, remedies=_if_late(snapshot, workloads))


def _drains(
    snapshot: GcsSnapshot, workloads: PendingWorkloads, allowed: list[NodeSnapshot], fit: FitResult, can_stay: bool
) -> Finding:
    going = [node for node in allowed if node.drain is not None]
    if fit.nodes is not None:
        used = [node for node in going if node.id in fit.nodes]
        verb = "would fit"
    else:
        used = _usable(going, workloads[0]) or going
        verb = "would fit, were it empty,"
    names = _some([f"{node.name}, which {drain_text(node, snapshot.at)}" for node in used])
    rest = "no other node has that much free" if can_stay else "no node that stays is large enough"
    remedies = ["a node like it joins"]
    if can_stay:
        remedies.insert(0, "what runs on the other nodes ends")
    sentence = f"it {verb} on {names}; {rest}"
    return Finding(WaitCause.draining, workloads, sentence, not can_stay, remedies=tuple(remedies))


def _note_draining(snapshot: GcsSnapshot, found: Finding, going: list[NodeSnapshot]) -> Finding:
    """Name draining nodes that could take some of it; they are not counted."""
    usable = _usable(going, found.workloads[0])
    if not usable:
        return found
    names = _some([f"{node.name}, which {drain_text(node, snapshot.at)}" for node in usable])
    return replace(found, sentence=f"{found.sentence}; not counted: {names}")


def _space(node: NodeSnapshot) -> NodeSpace:
    return _spaces([node])[0]


def _usable(nodes: list[NodeSnapshot], waiting: PendingWorkload) -> list[NodeSnapshot]:
    """Nodes that could take some request if empty."""
    spaces = _spaces(nodes, empty=True)
    return [node for node, space in zip(nodes, spaces, strict=True) if any(map(space.takes, waiting.requests))]


def _taken(snapshot: GcsSnapshot, workloads: PendingWorkloads, staying: list[NodeSnapshot]) -> Finding:
    """It would fit on empty nodes: name what holds its resources."""
    first = workloads[0]
    others = [
        workload
        for workload in snapshot.waiting
        if workload.stage is PendingStage.resources and workload.group is None and workload.id != first.id
    ]
    match = rival(
        first, others, snapshot, lambda other: _spaces([node for node in staying if other.pinned in (None, node.id)])
    )
    if match is not None:
        other, mine, theirs = match
        own = f"{title(first)} holds {mine.amounts}" if mine.held else f"{title(first)} holds nothing"
        sentence = f"{title(other)} holds {theirs.amounts} and waits for more itself, while {own}"
        if mine.held:
            sentence += ": each holds what the other waits for"
        release = f"{title(other)} releases what it holds, or {title(first)} does, and starts again later"
        at_once = "acquire all resources at once: one placement group for each, or a gang in a pool"
        blocks = tuple(blocker.id for blocker in theirs.held)
        return Finding(
            WaitCause.half_held, workloads, sentence, remedies=(release, at_once), blockers=blocks, rival=other.id
        )
    remedies, leaves = _remedies(snapshot, first, staying)
    lacking = _hardest(first, staying)
    able = _usable(staying, first)
    free, asked = total([node.free for node in able]), total_requested(first.requests)
    names = [name for name, _ in asked]
    if asked.within(free):
        sentence = f"{_of(names, free, able)}, but in pieces: {_pieces(first, lacking, able)}"
        cause = WaitCause.fragmented
    else:
        sentence = f"it asks {asked}, and {_of(names, free, able)}"
        cause = WaitCause.busy
    if first.pinned is not None:
        sentence += ", the only node it may use"
    if any(kind.coming for kind in snapshot.node_types):
        sentence += "; the autoscaler is starting nodes"
    return Finding(cause, workloads, sentence, remedies=remedies, blockers=tuple(blocker.id for blocker in leaves))


def _remedies(
    snapshot: GcsSnapshot, waiting: PendingWorkload, nodes: list[NodeSnapshot]
) -> tuple[tuple[str, ...], tuple[Blocker, ...]]:
    """What would make room, and the blockers to end: others, if that is enough, before its own siblings."""
    # Actors of one class are requested by count; placement groups of a job have nothing else in common.
    siblings = holdings_of(waiting, snapshot).held if waiting.kind is WorkloadKind.actor else ()
    own = {waiting.id, *(blocker.id for blocker in siblings)}
    others = [holder for holder in snapshot.holders if holder.id not in own]
    spaces = _spaces(nodes)
    leaves = blockers_to_remove(waiting, spaces, others) or blockers_to_remove(waiting, spaces, snapshot.holders)
    if not leaves:
        return ("what runs there now ends",), ()
    if all(blocker.id in own for blocker in leaves):
        same = f"all are {waiting.class_name} of one job"
        fewer = f"{_leaving(snapshot, leaves)}; or the program asks for fewer of them: {same}"
        return (fewer, *([] if waiting.pinned else ["a node joins"])), ()
    return (_leaving(snapshot, leaves),), leaves


def _of(names: list[str], free: Resources, nodes: list[NodeSnapshot]) -> str:
    """`1 of 4 gpu is free on 2 nodes`, for all requested resources."""
    whole = total([node.total for node in nodes])
    parts = [f"{_number(name, free.get(name))} of {amount_text(name, whole.get(name))}" for name in names]
    where = nodes[0].name if len(nodes) == 1 else f"{len(nodes)} nodes"
    return f"{_some(parts)} {_is(parts)} free on {where}"


def _is(parts: list[str]) -> str:
    return "is" if len(parts) == 1 and parts[0].startswith("1 ") else "are"


def _number(name: str, units: int) -> str:
    return amount_text(name, units).removesuffix(f" {name}")


def _pieces(waiting: PendingWorkload, request: ResourceRequest, nodes: list[NodeSnapshot]) -> str:
    if waiting.strategy is PlacementStrategy.strict_pack and len(waiting.requests) > 1:
        return f"no node has {total_requested(waiting.requests)} for all of its bundles"
    if not any(_space(node).takes(request) for node in nodes):
        nearest = min(nodes, key=lambda node: sum(units for _, units in request.amounts.minus(node.free)))
        lacks = request.amounts.minus(nearest.free)
        return f"no node has {request.amounts} at once; {nearest.name} comes nearest and lacks {lacks}"
    if waiting.strategy is PlacementStrategy.strict_spread:
        fit = sum(1 for node in nodes if _space(node).takes(request))
        count = len(waiting.requests)
        return f"its {count} bundles need a node each, and {fit} of {len(nodes)} have {request.amounts} free"
    return f"its {len(waiting.requests)} bundles do not fit into them"


def _unless_nodes_come(snapshot: GcsSnapshot, found: Finding, staying: list[NodeSnapshot]) -> Finding:
    """Not "never" where the autoscaler can add a node that fits."""
    first = found.workloads[0]
    if first.pinned is not None or not snapshot.node_types:
        return found
    spaces = _spaces(staying, empty=True)
    for kind in snapshot.node_types:
        more = len(first.requests) if kind.more is None else min(kind.more + kind.coming, len(first.requests))
        spaces += [NodeSpace(f"{kind.name} {i}", kind.total, None) for i in range(more)]
    fit = place(first.requests, spaces, first.strategy)
    if not fit.possible:
        return found
    names = {node.rpartition(" ")[0] for node in fit.nodes or ()} & {kind.name for kind in snapshot.node_types}
    coming = sum(kind.coming for kind in snapshot.node_types if kind.name in names)
    adds = f"is starting {coming}" if coming else "can add one"
    sentence = f"{found.sentence}; the autoscaler {adds} ({_some(sorted(names)) or 'a new node'})"
    return replace(found, cause=WaitCause.nodes_coming, never=False, sentence=sentence)


# ---- node by node --------------------------------------------------------------------------------------------------


def _hardest(waiting: PendingWorkload, nodes: Sequence[NodeSnapshot]) -> ResourceRequest:
    """The request that the fewest nodes can take; of those, the largest."""
    todo = [request for request in waiting.requests if request.node is None] or list(waiting.requests)

    def rank(request: ResourceRequest) -> tuple[int, int, int]:
        spaces, empty = _spaces(nodes), _spaces(nodes, empty=True)
        return (
            sum(space.takes(request) for space in empty),
            sum(space.takes(request) for space in spaces),
            -sum(units for _, units in request.amounts),
        )

    return min(dict.fromkeys(todo), key=rank)


def _rows(snapshot: GcsSnapshot, waiting: PendingWorkload, nodes: Sequence[NodeSnapshot]) -> tuple[NodeFit, ...]:
    """All nodes with the hardest request, the nearest fit first."""
    request = _hardest(waiting, nodes)
    rows = []
    for node in nodes:
        notes = []
        if node.drain is not None:
            notes.append(drain_text(node, snapshot.at))
        if not request.accepts(node.labels):
            notes.append(_labels_text(request, node))
        fits = room_for(request, _space(node))
        if fits and len(waiting.requests) > 1:
            notes.append(f"room for {min(fits, len(waiting.requests))} of its {len(waiting.requests)} bundles")
        lacks, lacks_empty = request.amounts.minus(node.free), request.amounts.minus(node.total)
        rows.append(NodeFit(node.name, node.free, node.total, lacks, lacks_empty, "; ".join(notes)))
    return tuple(sorted(rows, key=lambda row: (size_of(row.lacks_empty), size_of(row.lacks), row.node)))


def _labels_text(request: ResourceRequest, node: NodeSnapshot) -> str:
    keys = dict.fromkeys(
        selector.key for selectors in request.labels for selector in selectors if not selector.matches(node.labels)
    )
    labels = dict(node.labels)
    return ", ".join(f"{key} is {labels[key]}" if key in labels else f"no label {key}" for key in keys)


# ---- text ---------------------------------------------------------------------------------------------------------


def title(workload: PendingWorkload | Blocker) -> str:
    """Display name: `actor Trainer`, `placement group left`."""
    sort = "placement group" if workload.kind is WorkloadKind.group else workload.kind.value
    return f"{sort} {workload.name or workload.id[:12]}"


def drain_text(node: NodeSnapshot, now: float) -> str:
    """`drains, deadline in 40 s (preemption)`."""
    assert node.drain is not None
    text = "drains"
    if node.drain.deadline is not None:
        left = node.drain.deadline - now
        text += f", deadline in {left:.0f} s" if left > 0 else ", its deadline has passed"
    return text + (f" ({node.drain.cause})" if node.drain.cause else "")


def gpu_user_text(gpu_user: NonRayGpuUser) -> str:
    """`process 4711 (python train.py) holds 61 of 80 GiB of it, outside Ray`."""
    process = f"process {gpu_user.pid}" + (f" ({gpu_user.command})" if gpu_user.command else "")
    if not gpu_user.used_bytes:
        return f"{process} uses it, outside Ray"
    of = f" of {gpu_user.of_bytes / 2**30:.3g}" if gpu_user.of_bytes else ""
    return f"{process} holds {gpu_user.used_bytes / 2**30:.3g}{of} GiB of it, outside Ray"


def _leaving(snapshot: GcsSnapshot, blockers: tuple[Blocker, ...]) -> str:
    busy = {holder.group for holder in snapshot.holders if holder.group is not None}
    names = []
    for blocker in blockers:
        idle = " (nothing runs in it)" if blocker.kind is WorkloadKind.group and blocker.id not in busy else ""
        job = snapshot.job(blocker.job)
        ended = " of a job that has ended" if job is not None and job.ended else ""
        names.append(f"{title(blocker)}{ended}{idle}, which holds {blocker.amounts}")
    return f"{_some(names)}, {'ends' if len(names) == 1 else 'end'}"


def _if_late(snapshot: GcsSnapshot, workloads: PendingWorkloads) -> tuple[str, ...]:
    late = _longest(snapshot, workloads)
    if late is None or late <= LONG_S:
        return ()
    return ("Ray should have started it by now: it may be bound to one node, or wait for its process (`ray logs`)",)


def _longest(snapshot: GcsSnapshot, workloads: PendingWorkloads) -> float | None:
    return max((snapshot.at - workload.since for workload in workloads if workload.since is not None), default=None)


def _some(words: Sequence[str]) -> str:
    shown = list(words[:BLOCKERS_NAMED])
    rest = len(words) - len(shown)
    if rest:
        return f"{', '.join(shown)} and {rest} more"
    return f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else "".join(shown)


def _notes(snapshot: GcsSnapshot) -> tuple[DiagnosisNote, ...]:
    notes = [
        DiagnosisNote(NoteKind.draining, f"node {node.name} {drain_text(node, snapshot.at)}")
        for node in snapshot.nodes
        if node.drain is not None
    ]
    for gpu_user in snapshot.non_ray_gpu_users:
        where = f"on {snapshot.node_name(gpu_user.node)}" if gpu_user.node else "of this machine"
        text = f"GPU {gpu_user.gpu} {where}: {gpu_user_text(gpu_user)}; {_counted(snapshot, gpu_user)}"
        notes.append(DiagnosisNote(NoteKind.gpu_outside, text))
    for kind in snapshot.node_types:
        if kind.coming:
            nodes = "a node" if kind.coming == 1 else f"{kind.coming} nodes"
            text = f"the autoscaler is starting {nodes} of kind {kind.name}"
            notes.append(DiagnosisNote(NoteKind.nodes_coming, text))
    notes += [
        DiagnosisNote(NoteKind.given_up, f"{gone.kind.value} {gone.name} was given up by Ray: {gone.why}")
        for gone in snapshot.abandoned
    ]
    notes += [DiagnosisNote(NoteKind.not_seen, fault) for fault in snapshot.faults]
    return tuple(notes)


def _counted(snapshot: GcsSnapshot, gpu_user: NonRayGpuUser) -> str:
    if gpu_user.node is None:
        return "no node of this cluster has that GPU"
    users = [
        holder.name
        for holder in snapshot.holders
        if holder.node == gpu_user.node and gpu_user.place is not None and gpu_user.place in holder.gpus
    ]
    return f"Ray has given it to {_some(users)}" if users else "Ray counts it as its own"
