"""Status of a rollout pool as JSON-compatible data."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from trimtab.core.codec import encode
from trimtab.core.reasons import Reason
from trimtab.model.elastic_config import ElasticConfig
from trimtab.model.rollout import ReleaseSupport, RequestState, WorkerView
from trimtab.runtime.rollout.machine_loop import RolloutCore, WorkerHandle

STEPS_SHOWN = 20
AS_IN_VIEW = (
    "version", "running", "outstanding_tokens", "served", "paused", "paused_elsewhere", "asleep", "taken", "outside",
)  # fmt: skip
AS_IN_SPEC = ("limit", "size", "startable", "can_sleep")
REMARKS = {
    "record": (
        "cannot say their weight version: what the pool recorded counts while their process is the same, and after a "
        "restart they are stale"
    ),
    "nothing": (
        "show neither their weight version nor their process: after a refit they are stale until pool.vouch(worker) "
        "says that they have the weights"
    ),
}


def status(core: RolloutCore, elastic: ElasticConfig) -> dict[str, Any]:
    machine, now = core.machine, core.clock()
    rules = machine.rules
    sample = machine.sample(now)
    return {
        "now": time.time(),
        "version": machine.version,
        "workers": [_worker(core, view, now) for view in machine.workers()],
        "queue": _queue(core, now),
        "requests": {
            state.value: sum(request.state is state for request in machine.requests())
            for state in (RequestState.queued, RequestState.sent, RequestState.streaming, RequestState.moving)
        },
        "steps": [{**encode(step), "ago_s": now - step.at} for step in machine.steps[-STEPS_SHOWN:]],
        "scaling": machine.scaling(),
        "range": {"least": sample.min_workers, "most": sample.max_workers},
        "load": {
            "queued": sample.queued, "running": sample.running, "draining": sample.draining, "fresh": sample.fresh,
            "capacity": sample.capacity,
        },
        "takers": [asdict(taker) for taker in sample.takers],
        "costs": asdict(sample.costs),
        "refit": machine.open_refit(),
        "failed": [
            {**{key: value for key, value in row.items() if key != "at"}, "ago_s": now - row["at"]}
            for row in core.failed
        ],
        "membership": encode(machine.membership()),
        "metrics": machine.metrics(),
        "counters": dict(core.counters),
        "warnings": [
            {"ago_s": now - at, "worker": worker, "sentence": sentence, "code": None if code is None else code.value}
            for at, worker, sentence, code in core.warnings
        ],
        "remarks": _remarks(core),
        "background": _background(core),
        "rules": encode(rules),
        "elastic": {
            key: value if isinstance(value, int | float | str) else getattr(value, "__name__", str(value))
            for key, value in vars(elastic).items()
        },
        "advice": elastic.warnings(),
    }  # fmt: skip


def _remarks(core: RolloutCore) -> list[dict[str, Any]]:
    """What engines lack and how the pool makes up for it, once for all of them."""
    found: dict[str, list[str]] = {}
    for name, handle in core.handles.items():
        known_by = getattr(handle.engine, "weights_known_by", "engine")
        if known_by != "engine" and handle.engine is not None and handle.engine.kind in ("vllm", "sglang"):
            found.setdefault(known_by, []).append(name)
    return [{"sentence": REMARKS[known_by], "workers": names} for known_by, names in sorted(found.items())]


def _background(core: RolloutCore) -> list[dict[str, Any]]:
    backgrounds = [core.background, *(each.background for each in core.launchers() if hasattr(each, "background"))]
    return [row for background in backgrounds for row in background.status()]


def _worker(core: RolloutCore, view: WorkerView, now: float) -> dict[str, Any]:
    handle = core.handles.get(view.worker) or WorkerHandle(view.spec)
    engine, seen, load = handle.engine, handle.state, handle.load
    return {
        "name": view.worker,
        "url": handle.url,
        "kind": "" if engine is None else engine.kind,
        "dialect": "" if seen is None else seen.dialect,
        "state": view.state.value,
        "reason": _reason(view.reason),
        "since_s": now - view.since,
        "reported_version": None if seen is None else seen.version,
        **{name: getattr(view, name) for name in AS_IN_VIEW},
        **{name: getattr(view.spec, name) for name in AS_IN_SPEC},
        "node": handle.node,
        "note": handle.note or getattr(engine, "release_note", ""),
        "release": None if engine is None else getattr(engine, "release", ReleaseSupport.tried).value,
        "weights_known_by": getattr(engine, "weights_known_by", None),
        "refit_ways": list(getattr(engine, "refit_ways", ())),
        "memory": None if handle.slept is None else _reason(handle.slept),
        "doing": None if view.doing is None else view.doing.value,
        "deadline_s": None if view.deadline is None else view.deadline - now,
        "unwell": None if handle.unhealthy_since is None or seen is None else seen.why,
        "load": None
        if load is None
        else {
            "running": load.running, "waiting": load.waiting, "kv_used_share": load.kv_used_share,
            "age_s": now - load.at,
        },
    }  # fmt: skip


def _queue(core: RolloutCore, now: float) -> list[dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {
        class_.name: {
            "class": class_.name, "priority": class_.priority, "limit": class_.queue_limit, "waiting": 0,
            "oldest_s": 0.0, "reason": None,
        }
        for class_ in core.machine.rules.classes
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
