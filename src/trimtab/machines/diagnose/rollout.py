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

from trimtab.core.reasons import ReasonCode
from trimtab.machines.diagnose.rollout_findings import (
    Data,
    RolloutCheck,
    RolloutFinding,
    RolloutIssue,
    Severity,
    StatusReader,
    reason_of,
    requests_text,
    some,
)
from trimtab.machines.diagnose.rollout_scaling import SCALING_CHECKS
from trimtab.model.rollout import ReleaseSupport

MOVED_SHARE = 0.05  # of answered requests: more moved ones are reported ...
MIN_MOVED = 10  # ... from this count on
AWAITED_S = 60.0  # wait for weights before it is reported
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
        yield RolloutFinding(
            RolloutIssue.none_serving,
            Severity.stuck,
            "there is no engine",
            "name engines in the job file, or add one: POST /workers",
        )
        return
    states = {state: len(seen.of(state)) for state in dict.fromkeys(worker["state"] for worker in seen.workers)}
    text = ", ".join(f"{count} {state}" for state, count in states.items())
    severity = Severity.note if set(states) == {"starting"} else Severity.stuck
    yield RolloutFinding(
        RolloutIssue.none_serving,
        severity,
        f"no engine serves: {text}",
        "see the other findings for the cause of each",
        tuple(worker["name"] for worker in seen.workers),
    )


def engines_in_trouble(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Lost, wedged, faulty or disabled engines."""
    for worker in seen.of("lost", "suspect", "inactive"):
        code, text = reason_of(worker)
        if code == ReasonCode.restarts_used.value:
            yield RolloutFinding(
                RolloutIssue.given_up,
                Severity.fault,
                f"{worker['name']}: {text}",
                f"fix the cause, then retry: `trimtab rollout resume {worker['name']}`",
                (worker["name"],),
            )
        elif worker["state"] == "inactive":
            continue
        elif code == ReasonCode.hung.value:
            yield RolloutFinding(
                RolloutIssue.engine_wedged,
                Severity.fault,
                f"{worker['name']} does not answer, though its health check may pass: {text}",
                "see its log; restart it if it does not recover",
                (worker["name"],),
            )
        elif worker["state"] == "lost":
            ours = worker.get("startable")
            fix = "it is restarted when needed" if ours else "restart it at the same address"
            yield RolloutFinding(
                RolloutIssue.engine_lost, Severity.fault, f"{worker['name']} is lost: {text}", fix, (worker["name"],)
            )
        else:
            yield RolloutFinding(
                RolloutIssue.engine_faulty,
                Severity.fault,
                f"{worker['name']} is suspected: {text}",
                "nothing new is sent there until it answers a probe; see its log",
                (worker["name"],),
            )


def engines_never_reached(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Configured engines that were never reached."""
    known = {worker["name"] for worker in seen.workers}
    text = {warning.get("worker") or "": warning for warning in seen.status.get("warnings") or ()}
    for worker, warning in text.items():
        if worker not in known and warning.get("code") == ReasonCode.not_reached.value:
            yield RolloutFinding(
                RolloutIssue.engine_awaited,
                Severity.fault,
                f"{worker}: {warning['sentence']}",
                "start it, or correct its address in the job file",
                (worker,),
            )


def engines_without_weights(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Up, but not serving for lack of the trainer's weights."""
    for issue, state, what in (
        (RolloutIssue.weights_old, "stale", "does not have the trainer's weights"),
        (RolloutIssue.weights_gone, "empty", "has no weights: they were discarded"),
    ):
        there = seen.of(state)
        failed = [worker for worker in there if reason_of(worker)[0] == ReasonCode.refit_failed.value]
        for worker in failed:
            yield RolloutFinding(
                RolloutIssue.refit_failed,
                Severity.fault,
                f"{worker['name']}: {reason_of(worker)[1]}",
                "refit it again; until then it does not serve, whatever it reports",
                (worker["name"],),
            )
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
            yield RolloutFinding(
                issue,
                Severity.stuck,
                f"{sentence}; refits are owned by trimtab, and none is under way",
                "load the weights: refit.load(path), or start the engines with them",
                names,
            )


def refits(seen: StatusReader) -> Iterator[RolloutFinding]:
    refit = seen.status.get("refit") or {}
    waiting = tuple(refit.get("waiting") or ())
    if waiting:
        yield RolloutFinding(
            RolloutIssue.refit_open,
            Severity.note,
            f"the refit to version {refit.get('version')} waits for {some(waiting)} to pause",
            "its requests are being paused or aborted; if it lasts, check those engines",
            waiting,
        )


def external_actions(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Engines that another client paused, put to sleep, or reclaimed."""
    for worker in seen.workers:
        code, text = reason_of(worker)
        if worker.get("paused_elsewhere"):
            yield RolloutFinding(
                RolloutIssue.paused,
                Severity.note,
                f"{worker['name']} was paused by another client: nothing is sent there",
                "that client must resume it; a trainer pauses engines during a weight update",
                (worker["name"],),
            )
        elif worker.get("taken"):
            yield RolloutFinding(
                RolloutIssue.drained,
                Severity.note,
                f"{worker['name']} is lent out ({text})",
                f"`trimtab rollout resume {worker['name']}` lets it serve again; a pool returns it by itself",
                (worker["name"],),
            )
        elif worker["state"] == "inactive" and worker.get("asleep") and seen.owner("sleep") == "trainer":
            yield RolloutFinding(
                RolloutIssue.asleep,
                Severity.note,
                f"{worker['name']} sleeps, and the trainer owns its wake ({code}: {text})",
                "the trainer wakes it, or ownership.sleep: trimtab",
                (worker["name"],),
            )


def releases(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Engines of an untested or unknown release."""
    unknown = [
        worker
        for worker in seen.workers
        if worker.get("release") in (ReleaseSupport.untried.value, ReleaseSupport.unsaid.value)
    ]
    for note in dict.fromkeys(worker.get("note") or worker["release"] for worker in unknown):
        names = tuple(worker["name"] for worker in unknown if (worker.get("note") or worker["release"]) == note)
        yield RolloutFinding(
            RolloutIssue.release_unknown,
            Severity.note,
            f"{some(names)}: {note}",
            "watch the first drain, sleep and refit; llama.cpp from a wheel reports no release",
            names,
        )


def exposed(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Engines that are reachable from other machines."""
    near = []
    for worker in seen.workers:
        host = _host(worker.get("url") or "")
        if host is None or host.is_loopback:
            continue
        if host.is_global or host.is_unspecified:
            yield RolloutFinding(
                RolloutIssue.exposed,
                Severity.stuck,
                f"{worker['name']} is at {host}, which is no private address; {OBEYS}",
                "give it a loopback or private address",
                (worker["name"],),
            )
        else:
            near.append(worker["name"])
    if near:
        yield RolloutFinding(
            RolloutIssue.exposed,
            Severity.note,
            f"{some(near)} can be reached by every machine of their network; {OBEYS}",
            "nothing, if all machines in it are trusted",
            tuple(near),
        )


# ---- memory --------------------------------------------------------------------------------------------------------


def memory(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Engines that sleep and keep their memory."""
    for worker in seen.workers:
        text = seen.memory_kept(worker)
        if not text:
            continue
        held = "; ".join(f"GPU {gpu}: process {some([str(pid) for pid in pids])}" for gpu, pids in seen.holders.items())
        yield RolloutFinding(
            RolloutIssue.memory_kept,
            Severity.fault,
            text + (f"; GPU processes here: {held}" if held else ""),
            "start the engine with its memory saver (vLLM --enable-sleep-mode, SGLang --enable-memory-saver), and "
            "check whether another process holds the rest",
            (worker["name"],),
        )


# ---- requests ------------------------------------------------------------------------------------------------------


def queues(seen: StatusReader) -> Iterator[RolloutFinding]:
    full = [
        queue for queue in seen.status.get("queue") or () if queue.get("limit") and queue["waiting"] >= queue["limit"]
    ]
    for queue in full:
        name, why = queue["class"], (queue.get("reason") or {}).get("sentence")
        yield RolloutFinding(
            RolloutIssue.queue_full,
            Severity.stuck,
            f"class {name}: {requests_text(queue['waiting'])} wait, the limit of the queue; more are refused"
            + (f" (the oldest waits: {why})" if why else ""),
            f"more engines, fewer requests at once, or a higher classes.{name}.queue_limit",
            (name,),
        )
    refused = (seen.status.get("counters") or {}).get("refused", 0)
    if refused and not full:
        yield RolloutFinding(
            RolloutIssue.queue_full,
            Severity.note,
            f"{requests_text(refused)} were refused since the start; there is room now",
            "refused clients get a retry-after time",
        )


def requests_for_later(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Requests that wait for a version that is not published."""
    for queue in seen.status.get("queue") or ():
        reason = queue.get("reason") or {}
        if reason.get("code") == ReasonCode.version_awaited.value and queue.get("oldest_s", 0.0) > AWAITED_S:
            yield RolloutFinding(
                RolloutIssue.weights_awaited,
                Severity.stuck,
                f"class {queue['class']}: {requests_text(queue['waiting'])} wait, "
                f"the oldest for {queue['oldest_s']:.0f} s: {reason['sentence']}",
                "the trainer refits the engines, or clients ask for a version that is served",
                (queue["class"],),
            )


def requests_that_moved(seen: StatusReader) -> Iterator[RolloutFinding]:
    """Too many requests are aborted and moved."""
    counters = seen.status.get("counters") or {}
    answered = sum(count for name, count in counters.items() if name.startswith("answered_"))
    moved = counters.get("moved", 0) + counters.get("restarted", 0)
    if moved >= MIN_MOVED and moved > MOVED_SHARE * answered:
        yield RolloutFinding(
            RolloutIssue.moved_often,
            Severity.note,
            f"{requests_text(moved)} were aborted and moved ({counters.get('restarted', 0)} from the prompt), "
            f"of {answered} answered",
            "a longer drain_timeout, if drains aborted them; if engines failed, see the faults",
        )


def requests_that_failed(seen: StatusReader) -> Iterator[RolloutFinding]:
    alike: dict[tuple[str, str], list[str]] = {}
    for failure in seen.status.get("failed") or ():
        alike.setdefault((failure["code"], failure.get("worker") or ""), []).append(str(failure["sentence"]))
    for (code, worker), text in alike.items():
        on = f" on {worker}" if worker else ""
        if code == ReasonCode.retries_used.value:
            yield RolloutFinding(
                RolloutIssue.retries_used,
                Severity.fault,
                f"{requests_text(len(text))} failed too often{on} and were given up: {text[-1]}",
                "see that engine's log; `trimtab rollout status NAME` shows the history of a request",
                (worker,) if worker else (),
            )
        else:
            yield RolloutFinding(
                RolloutIssue.requests_failed,
                Severity.fault,
                f"{requests_text(len(text))} failed{on}: {code}: {text[-1]}",
                "`trimtab rollout status NAME` shows the history of a request",
                (worker,) if worker else (),
            )
    count = (seen.status.get("counters") or {}).get("answered_failed", 0)
    if count and not alike:
        yield RolloutFinding(
            RolloutIssue.requests_failed,
            Severity.fault,
            f"{requests_text(count)} failed since the start",
            "see the error of each answer, and the warnings of `trimtab rollout status`",
        )


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
    *SCALING_CHECKS,
    queues,
    requests_for_later,
    requests_that_moved,
    requests_that_failed,
    settings,
)
