"""Node churn: losses, returns, joins and drains, at stated times or at random.

Random churn: a node's time to failure is exponential, a repair takes its time, and the node comes back empty. All of it
is drawn before a run begins, so that every policy meets the same failures.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated, Literal

from trimtab.formats.sections import Amount, Share, Within
from trimtab.replay.common.timing import Distribution, Durations

AN_HOUR = Distribution(3600.0)
NodeEventKind = Literal["lost", "joined", "draining"]


@dataclass(frozen=True)
class ChurnEvent:
    """A change of a node's state. A draining node is lost `notice_s` later."""

    at_s: float
    node: str
    what: NodeEventKind
    notice_s: float = 0.0


@dataclass(frozen=True)
class Churn:
    """Random failures."""

    days_between: Annotated[float, Within(0.001, 1e12)]  # mean time between failures of a node
    repair_s: Durations = AN_HOUR
    drained: Share = 0.0  # share of failures announced by a drain
    notice_s: Amount = 120.0

    def events(self, nodes: list[str], until_s: float, seed: int) -> list[ChurnEvent]:
        """Events in order of time."""
        found = []
        for node in nodes:
            source = random.Random(f"churn {seed} {node}")
            at = 0.0
            while True:
                at += source.expovariate(1.0 / (self.days_between * 86_400.0))
                if at >= until_s:
                    break
                announced = source.random() < self.drained
                found.append(ChurnEvent(at, node, "draining" if announced else "lost", self.notice_s * announced))
                at += (self.notice_s if announced else 0.0) + self.repair_s.draw(source)
                found.append(ChurnEvent(at, node, "joined"))
        return sorted(found, key=lambda event: (event.at_s, event.node))

    def text(self) -> str:
        text = f"each node fails every {self.days_between:g} days on average and is back after {self.repair_s.text()}"
        return text + (f"; {self.drained:.0%} announced {self.notice_s:g} s ahead" if self.drained else "")
