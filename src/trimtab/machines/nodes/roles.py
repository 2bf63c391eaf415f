"""Which components get the GPUs of nodes that join or leave: plans before and after, and reports the difference.

Advises what a run should change when its cluster does, component by component with the reason, and whether to stay. It
never touches a run: `trimtab plan` shows the advice. Small moves win: where changed sizes alone come within
the noise of the best plan, groups are kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from trimtab.core.errors import InfeasibleError, InputError, meant
from trimtab.core.frozen import Frozen
from trimtab.core.reasons import Reason, ReasonCode, counted, some
from trimtab.model.plan import ComponentGroup, CurrentPlacement, FrameworkRules, PlacedComponent, Plan
from trimtab.model.workflow import ANY_KIND, Cluster, Node, PlacementJob
from trimtab.plan.placement.boxes import FoundPlan
from trimtab.plan.placement.compare import current_plan
from trimtab.plan.placement.planner import NOISE, best_plan
from trimtab.plan.placement.search import search
from trimtab.plan.placement.timeline import to_plan

NAMED = 6  # in a sentence
SAME_S = 1e-9  # relative: plans closer than this are equally fast


class PlanningContext(Frozen):
    """A job on a cluster. `current`: where it runs now, if known."""

    job: PlacementJob
    rules: FrameworkRules | None = None
    current: CurrentPlacement | None = None


class RoleChange(Frozen):
    """Change of one component. `group_*`: components that share its GPUs, itself included; empty on CPUs."""

    component: str
    gpus_before: int
    gpus_after: int
    kind_before: str
    kind_after: str
    group_before: tuple[str, ...]
    group_after: tuple[str, ...]
    seconds_before: float | None  # for all batches; None where it did not run before
    seconds_after: float
    reason: Reason

    @property
    def changed(self) -> bool:
        return self.reason.code is not ReasonCode.stay


class RoleAdvice(Frozen):
    """What to do about nodes that joined or left.

    `before` is the running plan (None: it did not fit), `after` the advised one; `best` is the best plan of the new
    cluster, which differs from `after` where that comes within the noise of it with a smaller move, or by staying.
    """

    before: Plan | None
    after: Plan
    best: Plan
    can_stay: bool  # the old plan runs unchanged on the new cluster
    changes: tuple[RoleChange, ...]  # in workflow order
    reason: Reason
    notes: tuple[str, ...] = ()

    @property
    def stay(self) -> bool:
        return self.reason.code is ReasonCode.stay


def advise(before: PlanningContext, after: PlanningContext, *, noise: float = NOISE) -> RoleAdvice:
    """What to change now that the cluster of `before` has become that of `after`.

    Raises InfeasibleError where nothing fits on the new cluster, InputError where a job is invalid.
    """
    running, notes = _running(before, noise)
    space, outcome = best_plan(after.job, after.rules)
    assert outcome.best is not None
    best = to_plan(space, outcome.best)
    can_stay = running is not None and _fits(running, after.job.cluster)
    chosen = best
    if running is not None:
        ceiling = best.iteration_seconds * (1 + noise)
        wanted = _shape(running, [component.name for component in space.order])
        alike = [g for g in space.groupings() if set(zip(g.groups, g.kinds, strict=True)) == wanted]
        same_groups = search(space, alike).best if alike else None
        if can_stay and running.iteration_seconds <= ceiling:
            chosen = running
        elif same_groups is not None and same_groups.seconds <= ceiling:
            chosen = to_plan(space, same_groups, _kept_ranks(running, same_groups, before, after))
    changes = tuple(_change(running, chosen, placed) for placed in chosen.components)
    return RoleAdvice(
        before=running,
        after=chosen,
        best=best,
        can_stay=can_stay,
        changes=changes,
        reason=_verdict(running, chosen, best, changes, can_stay, noise),
        notes=(*notes, *_new_kinds(before.job, after.job), *_extrapolated(chosen)),
    )


# ---- clusters ---------------------------------------------------------------------------------------------------


def with_joined(cluster: Cluster, count: int, gpus: int | None = None, kind: str | None = None) -> Cluster:
    """The cluster with `count` more nodes: like most of its nodes, unless stated otherwise."""
    if count < 1:
        raise InputError(f"{count} nodes cannot join", hint="--join 1, or --join 2x8 for two nodes of eight GPUs")
    like = _usual(cluster, kind)
    size = like.gpus if gpus is None else gpus
    known_kind = kind is None or kind == like.gpu
    memory = like.host_memory_gb
    newcomer = replace(
        like,
        gpus=size,
        gpu=like.gpu if kind is None else kind,
        gpu_memory_gb=like.gpu_memory_gb if known_kind else None,
        # Host memory is counted per GPU: a node of another size has its share of it.
        host_memory_gb=memory * size / like.gpus if memory is not None and like.gpus and size else memory,
    )
    names = {node.name for node in cluster.nodes}
    free = (name for number in range(len(names) + count) if (name := f"new{number}") not in names)
    return Cluster((*cluster.nodes, *(replace(newcomer, name=next(free)) for _ in range(count))))


def without(cluster: Cluster, which: int | str) -> Cluster:
    """The cluster without its last nodes (a number), or without the node of that name."""
    if isinstance(which, int):
        if not 1 <= which <= len(cluster.nodes):
            raise InputError(f"{which} of {len(cluster.nodes)} nodes cannot leave")
        left = cluster.nodes[: len(cluster.nodes) - which]
    else:
        names = [node.name for node in cluster.nodes]
        if which not in names:
            hint = meant(which, names, f"its nodes: {some(names, NAMED)}; or say how many leave")
            raise InputError(f"the job's cluster has no node {which}", hint=hint)
        left = tuple(node for node in cluster.nodes if node.name != which)
    if not any(node.gpus for node in left):
        raise InfeasibleError("no GPU would be left in the cluster", hint="a plan needs at least one node with GPUs")
    return Cluster(left)


def as_planned(seen: Sequence[Node], planned: Cluster) -> tuple[Cluster, tuple[str, ...]]:
    """Nodes of a live cluster in the terms of a job file, and notes on assumptions.

    A node reports neither GPU memory nor, often, the GPU kind: both come from the job file where it has a single kind,
    or nodes of the same kind.
    """
    notes: list[str] = []
    kinds = {node.gpu for node in planned.nodes if node.gpus}
    only = next(iter(kinds)) if len(kinds) == 1 else None
    unstated: set[str] = set()
    nodes = []
    for node in seen:
        kind = node.gpu
        if node.gpus and only is not None and kind != only and (not kind or only == ANY_KIND):
            kind = only
        elif node.gpus and not kind:
            unstated.add(node.name)
        elif node.gpus and kind not in kinds:
            notes.append(f"{node.name} has {kind}, which the job file does not name ({some(sorted(kinds), NAMED)})")
        like = next((known for known in planned.nodes if known.gpu == kind and known.gpus), None)
        nodes.append(replace(node, gpu=kind, gpu_memory_gb=like.gpu_memory_gb if like else node.gpu_memory_gb))
    if unstated:
        notes.append(
            f"not said of which kind the GPUs are, and the job file has several: {some(sorted(unstated), NAMED)}"
        )
    return Cluster(tuple(nodes)), tuple(notes)


def _usual(cluster: Cluster, kind: str | None) -> Node:
    """The most frequent node: of that GPU kind if any, else with GPUs if any."""
    of_kind = [node for node in cluster.nodes if node.gpus and node.gpu == kind]
    nodes = of_kind or [node for node in cluster.nodes if node.gpus] or list(cluster.nodes)
    if not nodes:
        return Node("", 0)
    [(usual, _)] = Counter(replace(node, name="") for node in nodes).most_common(1)
    return usual


def _new_kinds(before: PlacementJob, after: PlacementJob) -> tuple[str, ...]:
    """Notes on new GPU kinds: whether anything was measured on them."""
    notes = []
    for kind in after.cluster.kinds:
        if kind in before.cluster.kinds or kind == ANY_KIND:
            continue
        on_gpu = [component for component in after.workflow.components if not component.on_cpu]
        measured = [c.name for c in on_gpu if any(kind in variant.seconds for variant in c.variants)]
        assumed = [c.name for c in on_gpu if c.name not in measured and any(v.points(kind) for v in c.variants)]
        if assumed:
            notes.append(f"not measured on {kind}, and taken to be as fast there as elsewhere: {', '.join(assumed)}")
        if not measured and not assumed:
            notes.append(f"nothing was measured on {kind}: those GPUs stay idle; state `seconds: {{{kind}: ...}}`")
    if after.cluster.gpus == before.cluster.gpus and len(after.cluster.nodes) > len(before.cluster.nodes):
        notes.append("the nodes that join have no GPUs: components on CPUs may use them, their times stay as stated")
    return tuple(notes)


def _extrapolated(plan: Plan) -> tuple[str, ...]:
    names = [placed.name for placed in plan.components if placed.extrapolated]
    return (f"extrapolated beyond what was measured: {', '.join(names)}",) if names else ()


# ---- what changes -----------------------------------------------------------------------------------------------


def _running(before: PlanningContext, noise: float) -> tuple[Plan | None, tuple[str, ...]]:
    """The running plan: as the file places it, else the best plan; None where it does not fit."""
    try:
        space, outcome = best_plan(before.job, before.rules)
    except InfeasibleError as fault:
        return None, (f"before: {fault.what}",)
    assert outcome.best is not None
    if before.current is None:
        return to_plan(space, outcome.best), ("nothing says where it runs now: the best plan of before is taken",)
    own = current_plan(space, before.current, outcome.best)
    if own.plan is None:
        note = f"{before.current.where} cannot be: {own.reason}; the best plan of before is taken"
        return to_plan(space, outcome.best), (note,)
    best = to_plan(space, outcome.best)
    if best.iteration_seconds * (1 + noise) < own.plan.iteration_seconds:
        better = f"{best.describe()}, {best.iteration_seconds:.1f} s"
        return own.plan, (f"a better plan than {before.current.where} was there before: {better}",)
    return own.plan, ()


def _fits(plan: Plan, cluster: Cluster) -> bool:
    need = Counter[str]()
    for group in plan.groups:
        need[group.kind] += len(group.gpus)
    return all(count <= len(cluster.ranks(kind)) for kind, count in need.items())


def _shape(plan: Plan, order: Sequence[str]) -> set[tuple[tuple[int, ...], str]]:
    """A plan's grouping as positions in workflow order, with the kind of each."""
    return {(tuple(sorted(order.index(name) for name in group.components)), group.kind) for group in plan.groups}


def _kept_ranks(
    plan: Plan, found: FoundPlan, before: PlanningContext, after: PlanningContext
) -> tuple[tuple[int, ...], ...] | None:
    """Ranks for the same groups in other sizes with as few moves as possible; None: a new layout.

    Ranks count through the nodes, so they mean the same GPUs only while the old nodes come first; and a framework may
    need contiguous groups.
    """
    old, new = before.job.cluster, after.job.cluster
    if after.rules is not None or new.nodes[: len(old.nodes)] != old.nodes:
        return None
    had = {group.components: group.gpus for group in plan.groups}
    names = [component.name for component in after.job.workflow.in_order()]
    members = [tuple(names[i] for i in table.members) for table in found.grouping.tables]
    kept = [had[name][:size] for name, size in zip(members, found.sizes, strict=True)]
    taken = {rank for ranks in kept for rank in ranks}
    free = {kind: [rank for rank in new.ranks(kind) if rank not in taken] for kind in new.kinds}
    ranks = []
    for table, size, own in zip(found.grouping.tables, found.sizes, kept, strict=True):
        more, free[table.kind] = free[table.kind][: size - len(own)], free[table.kind][size - len(own) :]
        ranks.append(tuple(sorted((*own, *more))))
    return tuple(ranks)


def _change(before: Plan | None, after: Plan, now: PlacedComponent) -> RoleChange:
    then = before.placed(now.name) if before else None
    group_before, group_after = _group(before, now.name), _group(after, now.name)
    return RoleChange(
        component=now.name,
        gpus_before=len(then.gpus) if then else 0,
        gpus_after=len(now.gpus),
        kind_before=group_before.kind if group_before else ANY_KIND,
        kind_after=group_after.kind if group_after else ANY_KIND,
        group_before=group_before.components if group_before else (),
        group_after=group_after.components if group_after else (),
        seconds_before=then.seconds if then else None,
        seconds_after=now.seconds,
        reason=_why(before, after, then, now, group_before, group_after),
    )


def _why(
    before: Plan | None,
    after: Plan,
    then: PlacedComponent | None,
    now: PlacedComponent,
    was: ComponentGroup | None,
    becomes: ComponentGroup | None,
) -> Reason:
    name, gpus = now.name, len(now.gpus)
    if before is None or then is None:
        return Reason(ReasonCode.grow, f"{name} can run now, on {counted(gpus, 'GPU') if gpus else 'CPUs'}")
    had = len(then.gpus)
    sharing = _sharing_text(name, was, becomes)
    takes = f"it takes {now.seconds:.1f} s there instead of {then.seconds:.1f} s"
    if gpus > had:
        cause = f"{_bottleneck_text(before, was)}; {takes}" if was is not None and was == _bottleneck(before) else takes
        return Reason(ReasonCode.grow, f"{name} grows from {had} to {counted(gpus, 'GPU')}{sharing}: {cause}")
    if gpus < had:
        growing = [c.name for c in after.components if len(c.gpus) > len(before.placed(c.name).gpus)]
        cause = "an iteration is shortest with these shares"
        if growing:
            cause = f"{' and '.join(growing)} can use them better"
        sentence = f"{name} shrinks from {had} to {counted(gpus, 'GPU')}{sharing}: {cause}; {takes}"
        return Reason(ReasonCode.shrink, sentence)
    if sharing:
        return Reason(ReasonCode.regroup, f"{name} keeps {counted(gpus, 'GPU')}{sharing}")
    return Reason(ReasonCode.stay, f"{name} stays as it is")


def _bottleneck_text(plan: Plan, group: ComponentGroup) -> str:
    """Why more GPUs help: the iteration waits for this group."""
    busy, whole = _busy(plan, group), plan.iteration_seconds
    who = "it" if len(group.components) == 1 else f"{', '.join(group.components)} take turns on the same GPUs and"
    if len(plan.groups) == 1 and len(group.components) > 1:
        return f"everything takes turns on the same GPUs, {busy:.1f} of {whole:.1f} s"
    return f"{who} held up the iteration, busy {busy:.1f} of {whole:.1f} s"


def _sharing_text(name: str, was: ComponentGroup | None, becomes: ComponentGroup | None) -> str:
    """Components that share its GPUs, and the GPU kind, where these changed."""
    if was is None or becomes is None:
        return ""
    others = [other for other in becomes.components if other != name]
    announced = ""
    if was.components != becomes.components:
        announced = f", shared with {', '.join(others)}" if others else ", of its own"
    return announced + (f", on {becomes.kind}" if was.kind != becomes.kind else "")


def _group(plan: Plan | None, name: str) -> ComponentGroup | None:
    return next((group for group in plan.groups if name in group.components), None) if plan else None


def _bottleneck(plan: Plan) -> ComponentGroup:
    return max(plan.groups, key=lambda group: _busy(plan, group))


def _busy(plan: Plan, group: ComponentGroup) -> float:
    return sum(c.seconds + c.switch_seconds for c in plan.components if c.name in group.components)


def _verdict(
    before: Plan | None, after: Plan, best: Plan, changes: tuple[RoleChange, ...], can_stay: bool, noise: float
) -> Reason:
    seconds = after.iteration_seconds
    if before is None:
        return Reason(ReasonCode.grow, f"nothing fitted before; now an iteration takes {seconds:.1f} s")
    was = before.iteration_seconds
    if after is before:
        gain = 1 - best.iteration_seconds / was if was else 0.0
        if gain <= SAME_S:
            return Reason(ReasonCode.stay, f"stay: no plan of the new cluster is faster than the {was:.1f} s of now")
        return Reason(
            ReasonCode.stay,
            f"stay: the best plan of the new cluster saves {gain:.1%}; real runs do not show less than {noise:.0%}",
        )
    grow = [c for c in changes if c.gpus_after > c.gpus_before]
    shrink = [c for c in changes if c.gpus_after < c.gpus_before]
    whole = f"an iteration takes {seconds:.1f} s instead of {was:.1f} s"
    if seconds > was * (1 + SAME_S) or (shrink and not grow):
        what = f"{_names(shrink)} {_verb(shrink, 'give')} GPUs back" if shrink else "fewer GPUs are shared by more"
        forced = "" if can_stay else "; as it is it does not fit any more"
        return Reason(ReasonCode.shrink, f"{what}: {whole}{forced}")
    if grow:
        less = f" ({1 - seconds / was:.0%} less)" if was else ""
        return Reason(ReasonCode.grow, f"{_names(grow)} {_verb(grow, 'get')} the GPUs: {whole}{less}")
    return Reason(ReasonCode.regroup, f"the same GPUs are shared otherwise: {whole}")


def _names(changes: Sequence[RoleChange]) -> str:
    return ", ".join(change.component for change in changes)


def _verb(changes: Sequence[RoleChange], verb: str) -> str:
    return verb + "s" if len(changes) == 1 else verb
