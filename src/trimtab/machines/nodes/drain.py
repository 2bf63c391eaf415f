"""When whoever is still on a draining node is evicted: not before others had time to leave, early enough to be saved.

Decides nothing else. Whoever drives the machine of nodes asks it when a node is to be emptied.
"""

from __future__ import annotations

from trimtab.model.pool import PreemptionPolicy

AFTER_S = 30.0  # a node that drains without a deadline: those who leave by themselves have so long
SLACK_S = 5.0  # beyond telling and saving


def evict_after_s(left_s: float | None, policy: PreemptionPolicy) -> float:
    """Seconds from now, with so many left until the deadline (None: there is none).

    Early enough to be told and saved as the policy allows, but never before half of the time is over.
    """
    if left_s is None:
        return AFTER_S
    left_s = max(0.0, left_s)
    return left_s - min(left_s / 2, policy.cancel_timeout_s + policy.save_timeout_s + SLACK_S)
