"""What a rollout pool looks like, as plain data for commands, pages and checks."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from trimtab.core.codec import encode
from trimtab.core.reasons import Reason
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import ReleaseSupport, RequestState, WorkerView
from trimtab.runtime.rollout.machine_loop import RolloutCore

STEPS_SHOWN = 20


def status(core: RolloutCore, elastic: ElasticConfig) -> dict[str, Any]:
    """All that people ask about."""
    machine, now = core.machine, core.clock()
    rules = machine.rules
    sample = machine.sample(now)
    return {
        "now": time.time(),
        "version": machine.version,
        "workers": [_worker(core, one, now) for one in machine.workers()],
        "queue": _queue(core, now),
        "requests": {
            state.value: sum(one.state is state for one in machine.requests())
            for state in (RequestState.queued, RequestState.sent, RequestState.streaming, RequestState.moving)
        },
        "steps": [{**encode(one), "ago_s": now - one.at} for one in machine.steps[-STEPS_SHOWN:]],
        "scaling": machine.scaling(),
        "range": {"least": sample.min_workers, "most": sample.max_workers},
        "load": {
            "queued": sample.queued, "running": sample.running, "draining": sample.draining, "fresh": sample.fresh,
            "capacity": sample.capacity,
        },
        "takers": [asdict(one) for one in sample.takers],
        "costs": asdict(sample.costs),
        "refit": machine.open_refit(),
        "failed": [
            {**{key: value for key, value in one.items() if key != "at"}, "ago_s": now - one["at"]}
            for one in core.failed
        ],
        "membership": encode(machine.membership()),
        "metrics": machine.metrics(),
        "counters": dict(core.counters),
        "warnings": [
            {"ago_s": now - at, "worker": who, "sentence": said, "code": None if code is None else code.value}
            for at, who, said, code in core.warnings
        ],
        "background": _background(core),
        "rules": encode(rules),
        "elastic": {
            key: value if isinstance(value, int | float | str) else getattr(value, "__name__", str(value))
            for key, value in vars(elastic).items()
        },
        "advice": elastic.warnings(),
    }  # fmt: skip


def _background(core: RolloutCore) -> list[dict[str, Any]]:
    """What runs beside: the pool's, and that of whatever starts engines for it."""
    launchers = {id(one.launcher): one.launcher for one in core.hands.values() if one.launcher is not None}
    beside = [core.background, *(one.background for one in launchers.values() if hasattr(one, "background"))]
    return [row for one in beside for row in one.status()]


def _worker(core: RolloutCore, view: WorkerView, now: float) -> dict[str, Any]:
    hand = core.hands.get(view.worker)
    engine = None if hand is None else hand.engine
    seen = None if hand is None else hand.state
    load = None if hand is None else hand.load
    return {
        "name": view.worker,
        "url": "" if hand is None else hand.url,
        "kind": "" if engine is None else engine.kind,
        "dialect": "" if seen is None else seen.dialect,
        "state": view.state.value,
        "reason": _reason(view.reason),
        "since_s": now - view.since,
        "version": view.version,
        "reported_version": None if seen is None else seen.version,
        "running": view.running,
        "outstanding_tokens": view.outstanding_tokens,
        "limit": view.spec.limit,
        "size": view.spec.size,
        "served": view.served,
        "node": "" if hand is None else hand.node,
        "note": "" if hand is None else hand.note,
        "release": None if engine is None else getattr(engine, "release", ReleaseSupport.tried).value,
        "startable": view.spec.startable,
        "can_sleep": view.spec.can_sleep,
        "paused": view.paused,
        "paused_elsewhere": view.paused_elsewhere,
        "asleep": view.asleep,
        "taken": view.taken,
        "outside": view.outside,
        "memory": None if hand is None or hand.slept is None else _reason(hand.slept),
        "doing": None if view.doing is None else view.doing.value,
        "deadline_s": None if view.deadline is None else view.deadline - now,
        "unwell": None if hand is None or hand.unwell_since is None or seen is None else seen.why,
        "load": None
        if load is None
        else {
            "running": load.running, "waiting": load.waiting, "kv_used_share": load.kv_used_share,
            "age_s": now - load.at,
        },
    }  # fmt: skip


def _queue(core: RolloutCore, now: float) -> list[dict[str, Any]]:
    """What waits, by class."""
    found: dict[str, dict[str, Any]] = {
        one.name: {
            "class": one.name, "priority": one.priority, "limit": one.queue_limit, "waiting": 0, "oldest_s": 0.0,
            "reason": None,
        }
        for one in core.machine.rules.classes
    }  # fmt: skip
    for request in core.machine.requests():
        if request.state is RequestState.queued:
            row = found[request.spec.class_]
            row["waiting"] += 1
            if now - request.since >= row["oldest_s"]:
                row["oldest_s"], row["reason"] = now - request.since, _reason(request.reason)
    return list(found.values())


def _reason(reason: Reason) -> dict[str, str]:
    return {"code": reason.code.value, "sentence": reason.sentence}
