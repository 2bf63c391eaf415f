"""What ails a rollout pool: why it does not scale down, why memory is not free, why requests fail, why engines idle.

Checks over the plain data of a pool's status, or of settings alone. Each finding names one cause, whom it concerns and
what to do. What must never happen: a finding without a cause that somebody can act on, or a guess presented as seen; a
figure that the status does not have is not made up, and the check that needs it says nothing.

A finding weighs as much as it stops: a `fault` is an engine or a request that failed, what is `stuck` stays so until
somebody does something, a `note` explains what is as it should be and passes by itself or was asked for.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trimtab.core.reasons import Code
from trimtab.machines.diagnose.rollout_findings import (
    Ailment,
    Check,
    Data,
    Finding,
    Seen,
    Weight,
    reason_of,
    requests_text,
    some,
)
from trimtab.machines.diagnose.rollout_scaling import SCALING_CHECKS
from trimtab.model.rollout import Release

MOVED_SHARE = 0.05  # of those answered: more that moved is worth a word ...
MOVED_LEAST = 10  # ... unless they are few
AWAITED_S = 60.0  # weights that do not come for so long
OBEYS = "an engine obeys whoever reaches it, and can be stopped or given other weights"


def examine(status: Data, holders: Mapping[str, Sequence[int]] | None = None) -> tuple[Finding, ...]:
    """What ails a pool, the worst first. `holders` are the processes that compute on GPUs here, by GPU, where seen."""
    seen = Seen(status, holders or {})
    found = [one for check in CHECKS for one in check(seen)]
    return ordered(found)


def examine_settings(warnings: Iterable[str], exposed: Iterable[tuple[str, str]] = ()) -> tuple[Finding, ...]:
    """What settings alone tell: likely disappointments, and engines at addresses that the world can reach."""
    found = [_setting(sentence) for sentence in warnings]
    found += [
        Finding(
            Ailment.exposed,
            Weight.stuck,
            f"{worker} is at {host}, which is no private address: {OBEYS}",
            "give it a loopback or private address; trimtab refuses this one",
            (worker,),
        )
        for worker, host in exposed
    ]
    return ordered(found)


def ordered(found: Iterable[Finding]) -> tuple[Finding, ...]:
    """The worst first; else as they were found."""
    weights = list(Weight)
    return tuple(sorted(found, key=lambda one: weights.index(one.weight)))


# ---- engines ---------------------------------------------------------------------------------------------------------


def nobody_serves(seen: Seen) -> Iterator[Finding]:
    """Workers are there, and none of them takes requests."""
    if seen.of("active"):
        return
    if not seen.workers:
        yield Finding(
            Ailment.nobody_serves, Weight.stuck, "there is no engine",
            "name engines in the job file, or add one: POST /workers",
        )  # fmt: skip
        return
    states = {state: len(seen.of(state)) for state in dict.fromkeys(one["state"] for one in seen.workers)}
    said = ", ".join(f"{count} {state}" for state, count in states.items())
    weight = Weight.note if set(states) == {"starting"} else Weight.stuck
    yield Finding(
        Ailment.nobody_serves, weight, f"no engine serves: {said}", "the other findings say why of each",
        tuple(one["name"] for one in seen.workers),
    )  # fmt: skip


def engines_in_trouble(seen: Seen) -> Iterator[Finding]:
    """Lost, wedged, faulty, given up: which, and what is to be done."""
    for one in seen.of("lost", "suspect", "inactive"):
        code, said = reason_of(one)
        if code == Code.restarts_used.value:
            yield Finding(
                Ailment.given_up, Weight.fault, f"{one['name']}: {said}",
                f"mend what it says, then `trimtab rollout resume {one['name']}` has it tried again", (one["name"],),
            )  # fmt: skip
        elif one["state"] == "inactive":
            continue
        elif code == Code.hung.value:
            yield Finding(
                Ailment.engine_wedged, Weight.fault,
                f"{one['name']} does not answer, whatever its health check says: {said}",
                "its own log says what it waits for; start it again if it does not come to", (one["name"],),
            )  # fmt: skip
        elif one["state"] == "lost":
            ours = one.get("startable")
            do = "it is started again when it is needed" if ours else "start it again at the same address"
            yield Finding(Ailment.engine_lost, Weight.fault, f"{one['name']} is lost: {said}", do, (one["name"],))
        else:
            yield Finding(
                Ailment.engine_faulty, Weight.fault, f"{one['name']} is suspected: {said}",
                "nothing new goes there until it has answered; its own log says what broke", (one["name"],),
            )  # fmt: skip


def engines_never_reached(seen: Seen) -> Iterator[Finding]:
    """Engines that are to be attached, and are not there."""
    known = {one["name"] for one in seen.workers}
    said = {one.get("worker") or "": one for one in seen.status.get("warnings") or ()}
    for worker, one in said.items():
        if worker not in known and one.get("code") == Code.not_reached.value:
            yield Finding(
                Ailment.engine_awaited, Weight.fault, f"{worker}: {one['sentence']}",
                "start it, or mend its address in the job file", (worker,),
            )  # fmt: skip


def engines_without_weights(seen: Seen) -> Iterator[Finding]:
    """Up, and not serving for want of the trainer's weights: whose turn is it?"""
    for ailment, state, what in (
        (Ailment.weights_old, "stale", "has not the trainer's weights"),
        (Ailment.weights_gone, "empty", "has no weights: they were discarded"),
    ):
        there = seen.of(state)
        failed = [one for one in there if reason_of(one)[0] == Code.refit_failed.value]
        for one in failed:
            yield Finding(
                Ailment.refit_failed, Weight.fault, f"{one['name']}: {reason_of(one)[1]}",
                "refit it again; until then it does not serve, whatever it reports", (one["name"],),
            )  # fmt: skip
        waiting = [one for one in there if one not in failed]
        if not waiting:
            continue
        names = tuple(one["name"] for one in waiting)
        sentence = f"{some(names)} {what} ({reason_of(waiting[0])[1]})"
        if seen.refits or any(one.get("doing") == "refit" for one in waiting):
            yield Finding(ailment, Weight.note, f"{sentence}; a refit is under way", "it ends by itself", names)
        elif seen.owner("refit") == "trainer":
            do = "the trainer has to refit it (a restart, a loss or a sleep that discards takes its weights' word away)"
            yield Finding(
                ailment, Weight.stuck, f"{sentence}; refits are the trainer's, and none is under way", do, names
            )
        else:
            yield Finding(
                ailment, Weight.stuck, f"{sentence}; refits are trimtab's, and none is under way",
                "say where the weights lie: refit.load(path), or start the engines with them", names,
            )  # fmt: skip


def refits(seen: Seen) -> Iterator[Finding]:
    """A refit that waits for somebody."""
    refit = seen.status.get("refit") or {}
    waiting = tuple(refit.get("waiting") or ())
    if waiting:
        yield Finding(
            Ailment.refit_open, Weight.note,
            f"the refit to version {refit.get('version')} waits for {some(waiting)} to be quiet",
            "requests there are paused or cut; if it lasts, look at those engines", waiting,
        )  # fmt: skip


def others_hands(seen: Seen) -> Iterator[Finding]:
    """Engines that others paused, put to sleep, or took."""
    for one in seen.workers:
        code, said = reason_of(one)
        if one.get("paused_elsewhere"):
            yield Finding(
                Ailment.paused, Weight.note, f"{one['name']} was paused by others: nothing is sent there",
                "whoever paused it resumes it; a trainer does so around a weight update", (one["name"],),
            )  # fmt: skip
        elif one.get("taken"):
            yield Finding(
                Ailment.drained, Weight.note, f"{one['name']} is taken ({said})",
                f"`trimtab rollout resume {one['name']}` lets it serve again; a pool gives it back by itself",
                (one["name"],),
            )  # fmt: skip
        elif one["state"] == "inactive" and one.get("asleep") and seen.owner("sleep") == "trainer":
            yield Finding(
                Ailment.asleep, Weight.note, f"{one['name']} sleeps, and waking it is the trainer's ({code}: {said})",
                "the trainer wakes it, or ownership.sleep: trimtab", (one["name"],),
            )  # fmt: skip


def releases(seen: Seen) -> Iterator[Finding]:
    """Engines whose release was never tried, or is not said."""
    unknown = [one for one in seen.workers if one.get("release") in (Release.untried.value, Release.unsaid.value)]
    for note in dict.fromkeys(one.get("note") or one["release"] for one in unknown):
        names = tuple(one["name"] for one in unknown if (one.get("note") or one["release"]) == note)
        yield Finding(
            Ailment.release_unknown, Weight.note, f"{some(names)}: {note}",
            "watch the first drain, sleep and refit; llama.cpp from a wheel never says one", names,
        )  # fmt: skip


def exposed(seen: Seen) -> Iterator[Finding]:
    """Engines that others than this machine can reach."""
    near = []
    for one in seen.workers:
        host = _host(one.get("url") or "")
        if host is None or host.is_loopback:
            continue
        if host.is_global or host.is_unspecified:
            yield Finding(
                Ailment.exposed, Weight.stuck, f"{one['name']} is at {host}, which is no private address: {OBEYS}",
                "give it a loopback or private address", (one["name"],),
            )  # fmt: skip
        else:
            near.append(one["name"])
    if near:
        yield Finding(
            Ailment.exposed, Weight.note, f"{some(near)} can be reached by every machine of their network: {OBEYS}",
            "nothing, if only machines that you trust are in it", tuple(near),
        )  # fmt: skip


# ---- memory ----------------------------------------------------------------------------------------------------------


def memory(seen: Seen) -> Iterator[Finding]:
    """Engines that sleep and keep their memory."""
    for one in seen.workers:
        said = seen.memory_kept(one)
        if not said:
            continue
        held = "; ".join(f"GPU {gpu}: process {some([str(pid) for pid in pids])}" for gpu, pids in seen.holders.items())
        yield Finding(
            Ailment.memory_kept, Weight.fault, said + (f"; on this machine's GPUs compute {held}" if held else ""),
            "start the engine with its memory saver (vLLM --enable-sleep-mode, SGLang --enable-memory-saver), and see "
            "whether another process holds the rest", (one["name"],),
        )  # fmt: skip


# ---- requests --------------------------------------------------------------------------------------------------------


def queues(seen: Seen) -> Iterator[Finding]:
    """Requests are refused, or were."""
    full = [one for one in seen.status.get("queue") or () if one.get("limit") and one["waiting"] >= one["limit"]]
    for one in full:
        name, why = one["class"], (one.get("reason") or {}).get("sentence")
        yield Finding(
            Ailment.queue_full, Weight.stuck,
            f"class {name}: {requests_text(one['waiting'])} wait, which is all it may have; more are refused"
            + (f" (the oldest waits: {why})" if why else ""),
            f"more engines, fewer requests at once, or a higher classes.{name}.queue_limit", (name,),
        )  # fmt: skip
    refused = (seen.status.get("counters") or {}).get("refused", 0)
    if refused and not full:
        yield Finding(
            Ailment.queue_full, Weight.note,
            f"{requests_text(refused)} were refused since the start; there is room now",
            "clients that are refused are told when to come back",
        )  # fmt: skip


def requests_for_later(seen: Seen) -> Iterator[Finding]:
    """Requests that wait for weights which nobody brings."""
    for one in seen.status.get("queue") or ():
        reason = one.get("reason") or {}
        if reason.get("code") == Code.version_awaited.value and one.get("oldest_s", 0.0) > AWAITED_S:
            yield Finding(
                Ailment.weights_awaited, Weight.stuck,
                f"class {one['class']}: {requests_text(one['waiting'])} wait, the oldest for {one['oldest_s']:.0f} s: "
                f"{reason['sentence']}",
                "the trainer refits the engines, or clients ask for a version that is served", (one["class"],),
            )  # fmt: skip


def requests_that_moved(seen: Seen) -> Iterator[Finding]:
    """So many are cut and go on elsewhere that it costs."""
    counters = seen.status.get("counters") or {}
    answered = sum(count for name, count in counters.items() if name.startswith("answered_"))
    moved = counters.get("moved", 0) + counters.get("restarted", 0)
    if moved >= MOVED_LEAST and moved > MOVED_SHARE * answered:
        yield Finding(
            Ailment.moved_often, Weight.note,
            f"{requests_text(moved)} were cut and went on elsewhere ({counters.get('restarted', 0)} from the prompt), "
            f"of {answered} answered",
            "where drains cut them, a longer drain_timeout; where engines broke, what the faults say",
        )  # fmt: skip


def requests_that_failed(seen: Seen) -> Iterator[Finding]:
    """Requests that ended without an answer: why, and on which worker."""
    alike: dict[tuple[str, str], list[str]] = {}
    for one in seen.status.get("failed") or ():
        alike.setdefault((one["code"], one.get("worker") or ""), []).append(str(one["sentence"]))
    for (code, worker), said in alike.items():
        on = f" on {worker}" if worker else ""
        if code == Code.retries_used.value:
            yield Finding(
                Ailment.retries_used, Weight.fault,
                f"{requests_text(len(said))} broke too often{on} and were given up: {said[-1]}",
                "that engine's log says what it broke on; `trimtab rollout status NAME` tells a request's story",
                (worker,) if worker else (),
            )  # fmt: skip
        else:
            yield Finding(
                Ailment.requests_failed, Weight.fault, f"{requests_text(len(said))} failed{on}: {code}: {said[-1]}",
                "`trimtab rollout status NAME` tells a request's story", (worker,) if worker else (),
            )  # fmt: skip
    count = (seen.status.get("counters") or {}).get("answered_failed", 0)
    if count and not alike:
        yield Finding(
            Ailment.requests_failed, Weight.fault, f"{requests_text(count)} failed since the start",
            "each answer says why; so do the warnings of `trimtab rollout status`",
        )  # fmt: skip


def settings(seen: Seen) -> Iterator[Finding]:
    """Settings that are likely to disappoint."""
    for sentence in seen.status.get("advice") or ():
        yield _setting(str(sentence))


# ---- words -----------------------------------------------------------------------------------------------------------


def _host(url: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address of a url; None where it is a name."""
    place = url.partition("://")[2].partition("/")[0]
    host = place.partition("]")[0].removeprefix("[") if place.startswith("[") else place.rpartition(":")[0] or place
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None


def _setting(sentence: str) -> Finding:
    return Finding(Ailment.setting, Weight.note, sentence, "the tuning page of the docs has a row for each")


CHECKS: tuple[Check, ...] = (
    nobody_serves,
    engines_in_trouble,
    engines_never_reached,
    engines_without_weights,
    refits,
    others_hands,
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
