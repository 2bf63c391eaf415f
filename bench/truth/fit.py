"""Fits the constants of the estimates: the least mean error of logarithms, one constant after another, in three stages.

Serving points give the constants of decoding; weight syncs those of refits; trainers' micro-batches and steps of RL, with
decoding fixed, the others. Each constant is held near its start by a weak prior, so that few rows cannot carry it away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from bench.truth import rows
from trimtab.plan.estimate.constants import Constants
from trimtab.plan.estimate.serving import Work
from trimtab.plan.estimate.step import refit_seconds, step_time
from trimtab.plan.estimate.training import pass_time

START = Constants()
SERVING = (
    *("weight_share", "expert_share", "cache_share", "compute_share", "overlap", "layer_us", "moe_layer_us"),
    *("step_ms", "sequence_us", "hop_us", "link_share"),
)
SYNCS = ("broadcast_s", "broadcast_s_per_gb", "packed_s", "packed_s_per_gb", "ipc_s", "ipc_s_per_gb", "delta_s", "delta_s_per_gb")
TRAINING = ("train_share", "narrow_hidden", "expert_train_share", "attention_share", "train_link_share")
STEPS = ("rollout_factor", "async_steady", "forward_factor", "update_s", "host_share", "fixed_s", "sample_ms", "token_us")
MOST = {"overlap": 1.0, "async_steady": 1.0, **dict.fromkeys(("rollout_factor",), 3.0)}
SHARE = 0.92
CAP = 1.0
"""Errors of logarithms count up to here: a row that is off by a factor of e is no reason to bend the rest."""
PRIOR = 0.01
"""Weight of a constant's distance from its start, in squared logarithms, against the mean error."""

Errors = NDArray[np.float64]


def search(
    start: Constants, names: Sequence[str], error: Callable[[Constants], Errors], rounds: int, prior: float = 0.0
) -> Constants:
    """Move one constant after another while that lowers the mean absolute error."""

    def loss(c: Constants) -> float:
        away = sum(np.log(getattr(c, name) / getattr(start, name)) ** 2 for name in names)
        return float(np.mean(np.minimum(np.abs(error(c)), CAP)) + prior * away)

    best, least = start, loss(start)
    steps = dict.fromkeys(names, 0.4)
    for _ in range(rounds):
        for name in names:
            for sign in (1, -1):
                value = float(getattr(best, name) * np.exp(sign * steps[name]))
                value = min(value, MOST.get(name, SHARE if name.endswith("share") else np.inf))
                moved = replace(best, **{name: value})
                now = loss(moved)
                if now < least - 1e-7:
                    best, least = moved, now
                    steps[name] *= 1.3
                    break
            else:
                steps[name] *= 0.6
        if max(steps.values()) < 0.01:
            break
    return best


def serving_errors(c: Constants, work: Work, measured: Errors) -> Errors:
    return np.asarray(np.log(work.seconds(c) / measured))


def fit(without: str | None = None, start: Constants = START, *, serving: Constants | None = None) -> Constants:
    """All constants, fitted without the rows of one family of models."""
    found = serving or fit_serving(without, start)
    found = fit_syncs(without, found)
    return fit_steps(without, found)


def fit_serving(without: str | None, start: Constants) -> Constants:
    points, work = rows.serving_points()
    kept = np.array([point.family != without for point in points])
    measured = np.array([point.value for point in points])[kept]
    own = Work(*(getattr(work, name)[kept] for name in Work.__dataclass_fields__))
    return search(start, SERVING, lambda c: serving_errors(c, own, measured), rounds=100)


def fit_syncs(without: str | None, start: Constants) -> Constants:
    kept = [(point, how, run) for point, how, run in rows.sync_points() if rows.family(point.family) != without]

    def error(c: Constants) -> Errors:
        took = [refit_seconds(run.model, run.engine, how, c, shared=False) for _, how, run in kept]
        return np.log(np.array(took) / np.array([point.value for point, _, _ in kept]))

    return search(start, SYNCS, error, rounds=60, prior=PRIOR)


def fit_steps(without: str | None, start: Constants) -> Constants:
    steps = [row for row in rows.step_rows()[0] if row.family != without]
    trainers = [entry for entry in rows.trainer_points() if entry[0].family != without and "B200" not in entry[0].label]
    releases = sorted({row.run.release for row in steps})

    def error(c: Constants) -> Errors:
        of_steps = [np.log(step_time(row.run, c).seconds / row.seconds) for row in steps]
        of_trainers = [
            np.log(pass_time(trainer, tokens, trainer.micro_tokens, 1.0, c, backward=True).seconds / point.value)
            for point, trainer, tokens, _ in trainers
        ]
        return np.array([*of_steps, *(0.3 * value for value in of_trainers)])

    found = search(start, (*TRAINING, *STEPS, "packed_s", "packed_s_per_gb", "ipc_s", "ipc_s_per_gb"), error, rounds=25, prior=PRIOR)
    factors = []
    for release in releases:
        own = [np.log(row.seconds / step_time(row.run, found).seconds) for row in steps if row.run.release == release]
        # Shrunk towards 1: as if four more rows agreed with the model.
        factors.append((release, float(np.exp(np.median(own) * len(own) / (len(own) + 4)))))
    return replace(found, releases=tuple(factors))
