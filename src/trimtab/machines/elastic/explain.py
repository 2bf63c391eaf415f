"""Reason texts and the view of an elastic group. Decides nothing."""

from __future__ import annotations

from trimtab.core.reasons import Reason, ReasonCode
from trimtab.machines.elastic.state import ElasticMember, ElasticPhase, ElasticState
from trimtab.machines.nodes.state import display_name
from trimtab.model.nodes import MemberState


def node_text(group: ElasticState, node: str) -> str:
    return display_name(node, next((view.facts for view in group.nodes if view.node == node), None))


def draining_reason(group: ElasticState, node: str) -> Reason:
    why = next((f": {view.reason.sentence}" for view in group.nodes if view.node == node), "")
    return Reason(ReasonCode.node_draining, f"node {node_text(group, node)} will go{why}")


def world_reason(group: ElasticState, newcomers: list[ElasticMember], drop: list[ElasticMember]) -> Reason:
    parts = [f"{name} is gone ({reason.sentence})" for name, reason in group.departed]
    parts += [f"{member.id} leaves ({member.reason.sentence})" for member in drop]
    parts += [f"{member.id} is new on node {node_text(group, member.node)}" for member in newcomers]
    if group.world is None:
        code = ReasonCode.began
    elif group.departed:
        code = ReasonCode.redone if group.redo else group.departed[0][1].code
    elif drop:
        code = drop[0].reason.code
    else:
        code = ReasonCode.replaced if any(member.restart_at is not None for member in newcomers) else ReasonCode.grow
    return Reason(code, "; ".join(parts) or "ranks follow the order of nodes")


def too_few_reason(group: ElasticState) -> Reason:
    if group.fatal and not group.ever_started:
        return Reason(ReasonCode.start_failed, group.fatal)
    if group.unreplaced and group.capped:
        return Reason(ReasonCode.cap, f"started again {len(group.restarts)} times: no more are tried for now")
    if group.unreplaced:
        sentence = f"{group.unreplaced[0].member} is replaced in {group.not_before - group.now:.3g} s"
        return Reason(ReasonCode.back_off, sentence)
    pending = [member for member in group.members.values() if member.state is MemberState.pending]
    if pending:
        return Reason(pending[0].reason.code, f"{pending[0].id} is on its way ({pending[0].reason})")
    return Reason(ReasonCode.no_node, "those that run are on nodes that cannot be used now")


def group_view(group: ElasticState, size: int, wanted: int) -> dict[str, object]:
    """A group as plain data, for display and for programs."""
    ranks = {name: rank for rank, name in enumerate(group.world.members)} if group.world is not None else {}
    return {
        "name": group.spec.name,
        "phase": group.phase.value,
        "size": size,
        "wanted": wanted,
        "least": group.spec.min_members,
        "most": group.spec.max_members,
        "asked": group.requested,
        "epoch": group.world.epoch if group.world is not None else 0,
        "step": group.step,
        "change": group.change,
        "restarts": group.restart_count,
        "redone": group.redone_count,
        "waiting": str(group.wait_reason) if group.phase is ElasticPhase.waiting and group.wait_reason else None,
        "wait_deadline": group.wait_deadline if group.phase is ElasticPhase.waiting else None,
        "ended": str(group.end_reason) if group.end_reason is not None else None,
        "members": [
            {
                "id": member.id,
                "state": member.state.value,
                "node": member.node or None,
                "rank": ranks.get(member.id) if member.state in (MemberState.working, MemberState.leaving) else None,
                "since": member.since,
                "reason": {"code": member.reason.code.value, "sentence": member.reason.sentence},
            }
            for member in group.members.values()
        ],
    }
