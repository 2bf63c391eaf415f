"""Diagnoses a rollout pool: why it does not scale down, keeps memory, fails requests, or has idle engines.

Checks over the plain data of a pool's status, or of settings alone. Each finding names a cause, the workers or classes
it concerns, and a fix. What must never happen: a finding without a cause that can be acted on, or a guess presented as
an observation; a check whose figure is missing in the status reports nothing.

Severity: a `fault` is a failed engine or request, `stuck` does not change without an action, a `note` explains
something intended or temporary.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trimtab.core.reasons import ReasonCode, counted, some
from trimtab.machines.diagnose.rollout_findings import (
    Data,
    RolloutCheck,
    RolloutFinding,
    RolloutIssue,
    Severity,
    StatusReader,
    reason_of,
)
from trimtab.model.rollout import ReleaseSupport

MOVED_SHARE = 0.05  # of answered requests: more moved ones are reported ...
MIN_MOVED = 10  # ... from this count on
AWAITED_S = 60.0  # wait for weights before it is reported
UNTRUE_STEPS = 2  # consecutive steps without the expected effect
OBEYS = "engines have no authentication: any client can stop them or replace their weights"


def examine(status: Data, holders: Mapping[str, Sequence[int]] | None = None) -> tuple[RolloutFinding, ...]:
    """Findings for a pool, the worst first. `holders`: pids that compute on GPUs here, by GPU, where known."""
    seen = StatusReader(status, holders or {})
    found = [finding for check in CHECKS for finding in check(seen)]
    return ordered(found)


def examine_settings(warnings: Iterable[str], exposed: Iterable[tuple[str, str]] = ()) -> tuple[RolloutFinding, ...]:
    """Findings from settings alone: likely mistakes, and engines at public addresses."""
    found = [_setting(sentence) for sentence in warnings]
    found += [
        RolloutFinding(
            RolloutIssue.exposed,
            Severity.stuck,
            f"{worker} is at {host}, which is no private address; {OBEYS}",
            "give it a loopback or private address; trimtab refuses this one",
            (worker,),
        )
        for worker, host in exposed
    ]
    return ordered(found)


def ordered(found: Iterable[RolloutFinding]) -> tuple[RolloutFinding, ...]:
    weights = list(Severity)
    return tuple(sorted(found, key=lambda finding: weights.index(finding.severity)))


# ---- engines -------------------------------------------------------------------------------------------------------


def none_serving(seen: StatusReader) -> Iterator[RolloutFinding]:
    if seen.of("active"):
        return
    if not seen.workers:
        sentence = "there is no engine"
        fix = "name engines in the job file, or add one: POST /workers"
        yield RolloutFinding(RolloutIssue.none_serving, Severity.stuck, sentence, fix)
        return
    states = {state: len(seen.of(state)) for state in dict.fromkeys(worker["state"] for worker in seen.workers)}
    text = ", ".join(f"{count} {state}" for state, count in states.items())
    severity = Severity.note if set(states) == {"starting"} else Severity.stuck
    sentence = f"no engine serves: {text}"
    fix = "see the other findings for the cause of each"
    yield RolloutFinding(
        RolloutIssue.none_serving, severity, sentence, fix, tuple(worker["name"] for worker in seen.workers)
    )


def engines_in_trouble(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Lost, wedged, faulty or disabled engines."""
    for worker in seen.of("lost", "suspect", "inactive"):
        name, (code, text) = worker["name"], reason_of(worker)
        if code == ReasonCode.restarts_used.value:
            sentence = f"{name}: {text}"
            fix = f"fix the cause, then retry: `trimtab engine undrain {name}`"
            yield RolloutFinding(RolloutIssue.given_up, Severity.fault, sentence, fix, (name,))
        elif worker["state"] == "inactive":
            continue
        elif code == ReasonCode.hung.value:
            sentence = f"{name} does not answer, though its health check may pass: {text}"
            fix = "see its log; restart it if it does not recover"
            yield RolloutFinding(RolloutIssue.engine_wedged, Severity.fault, sentence, fix, (name,))
        elif worker["state"] == "lost":
            ours = worker.get("startable")
            fix = "it is restarted when needed" if ours else "restart it at the same address"
            yield RolloutFinding(RolloutIssue.engine_lost, Severity.fault, f"{name} is lost: {text}", fix, (name,))
        else:
            sentence = f"{name} is suspected: {text}"
            fix = "nothing new is sent there until it answers a probe; see its log"
            yield RolloutFinding(RolloutIssue.engine_faulty, Severity.fault, sentence, fix, (name,))


def engines_never_reached(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Configured engines that were never reached."""
    known = {worker["name"] for worker in seen.workers}
    text = {warning.get("worker") or "": warning for warning in seen.status.get("warnings") or ()}
    for worker, warning in text.items():
        if worker not in known and warning.get("code") == ReasonCode.not_reached.value:
            sentence = f"{worker}: {warning['sentence']}"
            fix = "start it, or correct its address in the job file"
            yield RolloutFinding(RolloutIssue.engine_awaited, Severity.fault, sentence, fix, (worker,))


def engines_without_weights(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Up, but not serving for lack of the trainer's weights."""
    for issue, state, what in (
        (RolloutIssue.weights_old, "stale", "does not have the trainer's weights"),
        (RolloutIssue.weights_gone, "empty", "has no weights: they were discarded"),
    ):
        there = seen.of(state)
        failed = [worker for worker in there if reason_of(worker)[0] == ReasonCode.refit_failed.value]
        for worker in failed:
            name, sentence = worker["name"], f"{worker['name']}: {reason_of(worker)[1]}"
            fix = "refit it again; until then it does not serve, whatever it reports"
            yield RolloutFinding(RolloutIssue.refit_failed, Severity.fault, sentence, fix, (name,))
        waiting = [worker for worker in there if worker not in failed]
        if not waiting:
            continue
        names = tuple(worker["name"] for worker in waiting)
        sentence = f"{some(names)} {what} ({reason_of(waiting[0])[1]})"
        if seen.refits or any(worker.get("doing") == "refit" for worker in waiting):
            yield RolloutFinding(issue, Severity.note, f"{sentence}; a refit is under way", "it ends by itself", names)
        elif seen.owner("refit") == "trainer":
            fix = "the trainer must refit it (after a restart, a loss or a discarding sleep its version is unknown)"
            yield RolloutFinding(
                issue, Severity.stuck, f"{sentence}; refits are owned by the trainer, and none is under way", fix, names
            )
        else:
            sentence = f"{sentence}; refits are owned by trimtab, and none is under way"
            fix = "load the weights: refit.load(path), or start the engines with them"
            yield RolloutFinding(issue, Severity.stuck, sentence, fix, names)


def refits(seen: StatusReader) -> Iterator[RolloutFinding]:
    refit = seen.status.get("refit") or {}
    waiting = tuple(refit.get("waiting") or ())
    if waiting:
        sentence = f"the refit to version {refit.get('version')} waits for {some(waiting)} to pause"
        fix = "its requests are being paused or aborted; if it lasts, check those engines"
        yield RolloutFinding(RolloutIssue.refit_open, Severity.note, sentence, fix, waiting)


def external_actions(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Engines that another client paused, put to sleep, or reclaimed."""
    for worker in seen.workers:
        name, (code, text) = worker["name"], reason_of(worker)
        if worker.get("paused_elsewhere"):
            sentence = f"{name} was paused by another client: nothing is sent there"
            fix = "that client must resume it; a trainer pauses engines during a weight update"
            yield RolloutFinding(RolloutIssue.paused, Severity.note, sentence, fix, (name,))
        elif worker.get("taken"):
            sentence = f"{name} is lent out ({text})"
            fix = f"`trimtab engine undrain {name}` lets it serve again; a pool returns it by itself"
            yield RolloutFinding(RolloutIssue.drained, Severity.note, sentence, fix, (name,))
        elif worker["state"] == "inactive" and worker.get("asleep") and seen.owner("sleep") == "trainer":
            sentence = f"{name} sleeps, and the trainer owns its wake ({code}: {text})"
            fix = "the trainer wakes it, or ownership.sleep: trimtab"
            yield RolloutFinding(RolloutIssue.asleep, Severity.note, sentence, fix, (name,))


def releases(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Engines of an untested or unknown release."""
    unknown = [
        worker
        for worker in seen.workers
        if worker.get("release") in (ReleaseSupport.untried.value, ReleaseSupport.unsaid.value)
    ]
    for note in dict.fromkeys(worker.get("note") or worker["release"] for worker in unknown):
        names = tuple(worker["name"] for worker in unknown if (worker.get("note") or worker["release"]) == note)
        sentence = f"{some(names)}: {note}"
        fix = "watch the first drain, sleep and refit; llama.cpp from a wheel reports no release"
        yield RolloutFinding(RolloutIssue.release_unknown, Severity.note, sentence, fix, names)


def exposed(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Engines that are reachable from other machines."""
    near = []
    for worker in seen.workers:
        name, host = worker["name"], _host(worker.get("url") or "")
        if host is None or host.is_loopback:
            continue
        if host.is_global or host.is_unspecified:
            sentence = f"{name} is at {host}, which is no private address; {OBEYS}"
            fix = "give it a loopback or private address"
            yield RolloutFinding(RolloutIssue.exposed, Severity.stuck, sentence, fix, (name,))
        else:
            near.append(name)
    if near:
        sentence = f"{some(near)} can be reached by every machine of their network; {OBEYS}"
        fix = "nothing, if all machines in it are trusted"
        yield RolloutFinding(RolloutIssue.exposed, Severity.note, sentence, fix, tuple(near))


# ---- memory --------------------------------------------------------------------------------------------------------


def memory(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Engines that sleep and keep their memory."""
    for worker in seen.workers:
        text = seen.memory_kept(worker)
        if not text:
            continue
        held = "; ".join(f"GPU {gpu}: process {some([str(pid) for pid in pids])}" for gpu, pids in seen.holders.items())
        sentence = text + (f"; GPU processes here: {held}" if held else "")
        fix = (
            "start the engine with its memory saver (vLLM --enable-sleep-mode, SGLang --enable-memory-saver), and "
            "check whether another process holds the rest"
        )
        yield RolloutFinding(RolloutIssue.memory_kept, Severity.fault, sentence, fix, (worker["name"],))


# ---- scaling -------------------------------------------------------------------------------------------------------

NOT_DOWN: dict[str, tuple[RolloutIssue, Severity, str]] = {
    ReasonCode.load_fits.value: (
        RolloutIssue.load_does_not_fit,
        Severity.note,
        "nothing: one worker fewer would be above the middle of the thresholds; a higher "
        "requests_per_worker_capacity, if the engines can take it, lets one go",
    ),
    ReasonCode.no_taker.value: (
        RolloutIssue.no_taker,
        Severity.note,
        "set a taker that can use a worker for longer than sleep and wake take, or scale_down_requires_demand: false",
    ),
    ReasonCode.switched_off.value: (
        RolloutIssue.switched_off,
        Severity.note,
        "enable_elastic: true, if that is not meant",
    ),
    ReasonCode.load_unknown.value: (
        RolloutIssue.load_unknown,
        Severity.stuck,
        "an engine's figures are stale or missing: check that its metrics answer (SGLang --enable-metrics)",
    ),
    ReasonCode.policy_fault.value: (
        RolloutIssue.policy_fault,
        Severity.stuck,
        "fix the policy: nothing is scaled until then",
    ),
}


def not_scaling_down(seen: StatusReader) -> Iterator[RolloutFinding]:
    """The load is low, and the workers stay."""
    if not seen.low:
        return
    spare = (
        f"load {seen.metrics['load_ratio']:.2f} is below {seen.elastic['scale_down_threshold']:g}, {seen.serving} serve"
    )
    scaled = seen.by_hand
    if scaled is not None:
        until = f" for {scaled['left_s']:.0f} s more" if scaled.get("left_s") is not None else " until released"
        sentence = (
            f"{spare}: {scaled['workers']} workers were set by hand{until} ({scaled.get('why') or 'no reason given'})"
        )
        fix = "`trimtab engine scale --auto` gives the number back to the policy"
        yield RolloutFinding(RolloutIssue.set_by_hand, Severity.note, sentence, fix)
        return
    if seen.refits:
        sentence = f"{spare}: a refit is under way, and no worker leaves during it"
        yield RolloutFinding(RolloutIssue.refit_holds, Severity.note, sentence, "it continues after the refit")
        return
    holds, max_held = seen.holds, max(seen.holds.values(), default=0)
    if max_held >= seen.serving:
        sentence = f"{spare}: {max_held} are held ready by {some(tuple(holds))}"
        fix = "release the hold (a validation that has ended?)"
        yield RolloutFinding(RolloutIssue.held, Severity.note, sentence, fix, tuple(holds))
        return
    least = seen.rules.min_workers
    if seen.serving <= least:
        sentence = f"{spare}: at least {least} must (min_workers, or the plan's range)"
        fix = "a lower min_workers, if so many are not needed"
        yield RolloutFinding(RolloutIssue.min_workers, Severity.note, sentence, fix)
        return
    yield from _by_decision(seen, spare)


def _by_decision(seen: StatusReader, spare: str) -> Iterator[RolloutFinding]:
    policy = seen.elastic.get("policy")
    if policy == "static":
        sentence = f"{spare}: the policy is static, which never scales by load"
        fix = "`elastic_config: {policy: threshold}` in the job file scales them"
        yield RolloutFinding(RolloutIssue.policy_fixed, Severity.note, sentence, fix)
        return
    if seen.decision is None:
        return
    code, text = reason_of(seen.decision)
    if code in NOT_DOWN:
        issue, severity, fix = NOT_DOWN[code]
        yield RolloutFinding(issue, severity, f"{spare}: {text}", fix)
    elif code == ReasonCode.not_yet.value:
        cooldown_s = float(seen.elastic.get("scale_down_cooldown", 0.0))
        ago_s = min((step["ago_s"] for step in seen.steps if step.get("ago_s") is not None), default=None)
        if ago_s is not None and ago_s < cooldown_s:
            left = f"{cooldown_s - ago_s:.0f} s of scale_down_cooldown {cooldown_s:g} s are left"
            yield RolloutFinding(
                RolloutIssue.cooldown, Severity.note, f"{spare}: {left}", "wait, or a shorter scale_down_cooldown"
            )
        else:
            sentence = f"{spare}: {text}"
            fix = (
                "wait; if it never is so for long enough, the load swings: a shorter min_stable_period, or a lower "
                "scale_down_threshold"
            )
            yield RolloutFinding(RolloutIssue.not_stable, Severity.note, sentence, fix)


def drains_that_do_not_end(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Draining for longer than a drain may take."""
    limit_s = seen.rules.drain_s
    for worker in seen.of("draining"):
        if worker.get("since_s", 0.0) <= limit_s or (worker.get("deadline_s") or 0.0) > 0:
            continue
        running, outside = worker.get("running", 0), worker.get("outside") or 0
        late = f"{worker['name']} has drained for {worker['since_s']:.0f} s, {limit_s:g} s were allowed"
        if worker.get("doing"):
            cause, fix = f"its {worker['doing']} is under way", "it has a deadline of its own"
        elif running and seen.owner("abort") == "trainer":
            cause = f"{counted(running, 'request')} run there, and only the trainer may abort them"
            fix = "the trainer must abort them; with ownership.abort: trimtab they are moved"
        elif outside:
            cause = f"{counted(outside, 'request')} of other clients run there, by its own figures"
            fix = "the other clients must end them: trimtab does not know them"
        elif running:
            cause, fix = (
                f"{counted(running, 'request')} there do not end",
                "see its log; it is marked lost if it stays unresponsive",
            )
        elif seen.refits:
            cause, fix = "it is a member of the open refit", "it continues after the refit"
        else:
            cause, fix = "its own figures are stale, so it is not known to be idle", "check that its metrics answer"
        yield RolloutFinding(RolloutIssue.drain_late, Severity.stuck, f"{late}: {cause}", fix, (worker["name"],))


def not_scaling_up(seen: StatusReader) -> Iterator[RolloutFinding]:
    """The load is high, and no worker is added."""
    if not seen.high or seen.of("starting"):
        return
    most = seen.rules.max_workers
    load = f"load {seen.metrics['load_ratio']:.2f}"
    full = f"{load} is above {seen.elastic['scale_up_threshold']:g}, {seen.serving} serve"
    if seen.serving >= most:
        yield RolloutFinding(
            RolloutIssue.all_in_use, Severity.stuck, f"{full}: at most {most} may", "a higher max_workers"
        )
    elif seen.serving >= seen.range.get("most", seen.serving + 1):
        yield RolloutFinding(
            RolloutIssue.all_in_use, Severity.stuck, f"{full}: no other engine is available", "add engines"
        )


def steps_that_did_not_come_true(seen: StatusReader) -> Iterator[RolloutFinding]:
    """The last steps did not have the expected effect."""
    judged = [step for step in seen.steps if step.get("came_true") is not None]
    untrue = 0
    for step in reversed(judged):
        if step["came_true"]:
            break
        untrue += 1
    if untrue >= UNTRUE_STEPS:
        last = judged[-1]
        sentence = f"the last {untrue} steps did not come true (expected: {last.get('expects') or 'nothing text'})"
        fix = "the wanted workers did not come up, or did not help: check the engines that do not start"
        yield RolloutFinding(RolloutIssue.steps_untrue, Severity.stuck, sentence, fix, tuple(last.get("changed") or ()))


# ---- requests ------------------------------------------------------------------------------------------------------


def queues(seen: StatusReader) -> Iterator[RolloutFinding]:
    full = [
        queue for queue in seen.status.get("queue") or () if queue.get("limit") and queue["waiting"] >= queue["limit"]
    ]
    for queue in full:
        name, why = queue["class"], (queue.get("reason") or {}).get("sentence")
        sentence = (
            f"class {name}: {counted(queue['waiting'], 'request')} wait, the limit of the queue; more are refused"
            + (f" (the oldest waits: {why})" if why else "")
        )
        fix = f"more engines, fewer requests at once, or a higher classes.{name}.queue_limit"
        yield RolloutFinding(RolloutIssue.queue_full, Severity.stuck, sentence, fix, (name,))
    refused = (seen.status.get("counters") or {}).get("refused", 0)
    if refused and not full:
        sentence = f"{counted(refused, 'request')} were refused since the start; there is room now"
        yield RolloutFinding(RolloutIssue.queue_full, Severity.note, sentence, "refused clients get a retry-after time")


def requests_for_later(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Requests that wait for a version that is not published."""
    for queue in seen.status.get("queue") or ():
        reason = queue.get("reason") or {}
        if reason.get("code") == ReasonCode.version_awaited.value and queue.get("oldest_s", 0.0) > AWAITED_S:
            sentence = (
                f"class {queue['class']}: {counted(queue['waiting'], 'request')} wait, "
                f"the oldest for {queue['oldest_s']:.0f} s: {reason['sentence']}"
            )
            fix = "the trainer refits the engines, or clients ask for a version that is served"
            yield RolloutFinding(RolloutIssue.weights_awaited, Severity.stuck, sentence, fix, (queue["class"],))


def requests_that_moved(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Too many requests are aborted and moved."""
    counters = seen.status.get("counters") or {}
    answered = sum(count for name, count in counters.items() if name.startswith("answered_"))
    moved = counters.get("moved", 0) + counters.get("restarted", 0)
    if moved >= MIN_MOVED and moved > MOVED_SHARE * answered:
        sentence = (
            f"{counted(moved, 'request')} were aborted and moved ({counters.get('restarted', 0)} from the prompt), "
            f"of {answered} answered"
        )
        fix = "a longer drain_timeout, if drains aborted them; if engines failed, see the faults"
        yield RolloutFinding(RolloutIssue.moved_often, Severity.note, sentence, fix)


def requests_that_failed(seen: StatusReader) -> Iterator[RolloutFinding]:
    alike: dict[tuple[str, str], list[str]] = {}
    for failure in seen.status.get("failed") or ():
        alike.setdefault((failure["code"], failure.get("worker") or ""), []).append(str(failure["sentence"]))
    for (code, worker), text in alike.items():
        on = f" on {worker}" if worker else ""
        if code == ReasonCode.retries_used.value:
            sentence = f"{counted(len(text), 'request')} failed too often{on} and were given up: {text[-1]}"
            fix = "see that engine's log; `trimtab engine show NAME` shows the history of a request"
            yield RolloutFinding(RolloutIssue.retries_used, Severity.fault, sentence, fix, (worker,) if worker else ())
        else:
            sentence = f"{counted(len(text), 'request')} failed{on}: {code}: {text[-1]}"
            fix = "`trimtab engine show NAME` shows the history of a request"
            yield RolloutFinding(
                RolloutIssue.requests_failed, Severity.fault, sentence, fix, (worker,) if worker else ()
            )
    count = (seen.status.get("counters") or {}).get("answered_failed", 0)
    if count and not alike:
        sentence = f"{counted(count, 'request')} failed since the start"
        fix = "see the error of each answer, and the warnings of `trimtab engine list`"
        yield RolloutFinding(RolloutIssue.requests_failed, Severity.fault, sentence, fix)


def settings(seen: StatusReader) -> Iterator[RolloutFinding]:
    for sentence in seen.status.get("advice") or ():
        yield _setting(str(sentence))


# ---- text ---------------------------------------------------------------------------------------------------------


def _host(url: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The IP address of a url; None for a host name."""
    place = url.partition("://")[2].partition("/")[0]
    host = place.partition("]")[0].removeprefix("[") if place.startswith("[") else place.rpartition(":")[0] or place
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _setting(sentence: str) -> RolloutFinding:
    return RolloutFinding(RolloutIssue.setting, Severity.note, sentence, "see the tuning page of the docs")


CHECKS: tuple[RolloutCheck, ...] = (
    none_serving,
    engines_in_trouble,
    engines_never_reached,
    engines_without_weights,
    refits,
    external_actions,
    releases,
    exposed,
    memory,
    not_scaling_down,
    drains_that_do_not_end,
    not_scaling_up,
    steps_that_did_not_come_true,
    queues,
    requests_for_later,
    requests_that_moved,
    requests_that_failed,
    settings,
)
