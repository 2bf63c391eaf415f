"""Diagnoses why a rollout pool does not scale with its load: no scale-down, a drain without end, no scale-up.

The causes are those of the scaling policy's last decision and of what overrides it: a manual count, a hold, a refit,
the limits.
"""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.core.reasons import ReasonCode
from trimtab.machines.diagnose.rollout_findings import (
    RolloutCheck,
    RolloutFinding,
    RolloutIssue,
    Severity,
    StatusReader,
    reason_of,
    requests_text,
    some,
)

UNTRUE_STEPS = 2  # consecutive steps without the expected effect

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
        yield RolloutFinding(
            RolloutIssue.set_by_hand,
            Severity.note,
            f"{spare}: {scaled['workers']} workers were set by hand{until} ({scaled.get('why') or 'no reason given'})",
            "`trimtab rollout scale --release` gives the number back to the policy",
        )
        return
    if seen.refits:
        yield RolloutFinding(
            RolloutIssue.refit_holds,
            Severity.note,
            f"{spare}: a refit is under way, and no worker leaves during it",
            "it continues after the refit",
        )
        return
    holds, max_held = seen.holds, max(seen.holds.values(), default=0)
    if max_held >= seen.serving:
        yield RolloutFinding(
            RolloutIssue.held,
            Severity.note,
            f"{spare}: {max_held} are held ready by {some(tuple(holds))}",
            "release the hold (a validation that has ended?)",
            tuple(holds),
        )
        return
    least = seen.rules.min_workers
    if seen.serving <= least:
        yield RolloutFinding(
            RolloutIssue.min_workers,
            Severity.note,
            f"{spare}: at least {least} must (min_workers, or the plan's range)",
            "a lower min_workers, if so many are not needed",
        )
        return
    yield from _by_decision(seen, spare)


def _by_decision(seen: StatusReader, spare: str) -> Iterator[RolloutFinding]:
    policy = seen.elastic.get("policy")
    if policy == "static":
        yield RolloutFinding(
            RolloutIssue.policy_fixed,
            Severity.note,
            f"{spare}: the policy is static, which never scales by load",
            "`elastic_config: {policy: threshold}` in the job file scales them",
        )
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
            yield RolloutFinding(
                RolloutIssue.not_stable,
                Severity.note,
                f"{spare}: {text}",
                "wait; if it never is so for long enough, the load swings: a shorter min_stable_period, or a lower "
                "scale_down_threshold",
            )


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
            cause = f"{requests_text(running)} run there, and only the trainer may abort them"
            fix = "the trainer must abort them; with ownership.abort: trimtab they are moved"
        elif outside:
            cause = f"{requests_text(outside)} of other clients run there, by its own figures"
            fix = "the other clients must end them: trimtab does not know them"
        elif running:
            cause, fix = (
                f"{requests_text(running)} there do not end",
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
        yield RolloutFinding(
            RolloutIssue.steps_untrue,
            Severity.stuck,
            f"the last {untrue} steps did not come true (expected: {last.get('expects') or 'nothing text'})",
            "the wanted workers did not come up, or did not help: check the engines that do not start",
            tuple(last.get("changed") or ()),
        )


SCALING_CHECKS: tuple[RolloutCheck, ...] = (
    not_scaling_down,
    drains_that_do_not_end,
    not_scaling_up,
    steps_that_did_not_come_true,
)
