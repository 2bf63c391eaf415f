"""The nouns of a diagnosis: causes, what each node has and lacks, what would free it.

A cause is a constant for programs; a finding adds the sentence for people. `why.py` makes them, `render/text/why.py`
shows them. A finding is about things that wait; a note is about something that nobody waits for yet, and never counts.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trimtab.core.resources import NOTHING, Resources
from trimtab.machines.diagnose.snapshot import PendingWorkload


class WaitCause(str, enum.Enum):
    """Why something waits: stable constants."""

    # never, on the nodes that are here and stay
    too_big = "TOO_BIG"  # asks more on one node than any node has, were it empty
    no_resource = "NO_RESOURCE"  # asks a resource that no node has
    no_label = "NO_LABEL"  # no node has the labels
    too_few_nodes = "TOO_FEW_NODES"  # STRICT_SPREAD asks more nodes than can take a bundle
    too_big_together = "TOO_BIG_TOGETHER"  # each bundle fits somewhere, all of them do not
    no_node = "NO_NODE"  # the only node it may use is not there
    group_gone = "GROUP_GONE"  # the placement group it is to run in is not there
    # never, or not now: the finding says which
    draining = "DRAINING"  # would fit on a node that will go
    # not now
    fragmented = "FRAGMENTED"  # enough is free, but in pieces on several nodes
    half_held = "HALF_HELD"  # somebody who waits for more himself holds what it needs
    busy = "BUSY"  # others hold what it needs
    group_full = "GROUP_FULL"  # its bundle of the placement group is taken
    gpu_outside = "GPU_OUTSIDE"  # it has a GPU that a process outside Ray holds
    nodes_coming = "NODES_COMING"  # only new nodes can take it, and the autoscaler can add such
    # under way
    inputs = "INPUTS"  # its arguments are not there yet
    starting = "STARTING"  # it has its place; its process or constructor is not ready
    fits = "FITS"  # there is room: Ray places it at its next try


class NoteKind(str, enum.Enum):
    """What is worth knowing though nobody waits for it."""

    draining = "NODE_DRAINING"
    gpu_outside = "GPU_OUTSIDE"
    given_up = "GIVEN_UP"  # Ray does not try any more, and whoever asked was told
    nodes_coming = "NODES_COMING"
    not_seen = "NOT_SEEN"  # something could not be looked at


UNDER_WAY = (WaitCause.starting, WaitCause.fits)


@dataclass(frozen=True)
class NodeFit:
    """One node beside one ask: what is free there, and what the ask lacks."""

    node: str  # its name
    free: Resources
    total: Resources
    lacks: Resources = NOTHING  # now
    lacks_empty: Resources = NOTHING  # if nothing else were on the node
    note: str = ""


@dataclass(frozen=True)
class Finding:
    """Why some things alike wait. `never`: they cannot start on the nodes that are here and stay."""

    cause: WaitCause
    workloads: tuple[PendingWorkload, ...]
    sentence: str
    never: bool = False
    asked: Resources = NOTHING  # by the ask that the rows are about
    rows: tuple[NodeFit, ...] = ()
    remedies: tuple[str, ...] = ()  # what would help, the best first
    blockers: tuple[str, ...] = ()  # ids of those who would have to end
    followers: tuple[PendingWorkload, ...] = ()  # wait for these, and for nothing else
    rival: str | None = None  # HALF_HELD: the id of the other one that waits

    @property
    def count(self) -> int:
        """How many things wait for this cause."""
        return sum(workload.count for workload in (*self.workloads, *self.followers))

    @property
    def since(self) -> float | None:
        """When the first of them began to wait, where that is known."""
        return min((workload.since for workload in self.workloads if workload.since is not None), default=None)


@dataclass(frozen=True)
class DiagnosisNote:
    """Something worth knowing."""

    kind: NoteKind
    sentence: str


@dataclass(frozen=True)
class Diagnosis:
    """What a survey comes to: findings (those that never end first, then the oldest), and notes."""

    findings: tuple[Finding, ...]
    notes: tuple[DiagnosisNote, ...] = ()

    @property
    def waits(self) -> int:
        """How many things wait."""
        return sum(finding.count for finding in self.findings)

    @property
    def never(self) -> int:
        """How many of them cannot start."""
        return sum(finding.count for finding in self.findings if finding.never)
