"""Result types of a diagnosis: causes, per-node fit, remedies.

A cause is a constant for programs; a finding adds a sentence. `why.py` makes them, `render/text/why.py` renders them. A
finding is about waiting workloads; a note is about something else and is never counted as a wait.
"""

from __future__ import annotations

import enum

from trimtab.core.frozen import Frozen
from trimtab.core.resources import NOTHING, Resources
from trimtab.machines.diagnose.snapshot import PendingWorkloads


class WaitCause(str, enum.Enum):
    """Why a workload waits: stable constants."""

    # never, on the nodes that are here and stay
    too_big = "TOO_BIG"  # requests more on one node than any empty node has
    no_resource = "NO_RESOURCE"  # requests a resource that no node has
    no_label = "NO_LABEL"  # no node has the labels
    too_few_nodes = "TOO_FEW_NODES"  # STRICT_SPREAD needs more nodes than can take a bundle
    too_big_together = "TOO_BIG_TOGETHER"  # each bundle fits somewhere, but not all of them
    no_node = "NO_NODE"  # the only node it may use does not exist
    group_gone = "GROUP_GONE"  # its placement group does not exist
    # never, or not now: the finding says which
    draining = "DRAINING"  # would fit on a draining node
    # not now
    fragmented = "FRAGMENTED"  # enough is free, but spread over several nodes
    half_held = "HALF_HELD"  # another waiting workload holds what it needs
    busy = "BUSY"  # running workloads hold what it needs
    group_full = "GROUP_FULL"  # its bundle of the placement group is taken
    gpu_outside = "GPU_OUTSIDE"  # a process outside Ray uses its GPU
    nodes_coming = "NODES_COMING"  # only new nodes can take it, and the autoscaler can add them
    # under way
    inputs = "INPUTS"  # its arguments are not ready
    starting = "STARTING"  # placed; its process or constructor is not ready
    fits = "FITS"  # it fits: Ray places it at its next try


class NoteKind(str, enum.Enum):
    """Kinds of notes."""

    draining = "NODE_DRAINING"
    gpu_outside = "GPU_OUTSIDE"
    given_up = "GIVEN_UP"  # Ray does not retry; the submitter got an error
    nodes_coming = "NODES_COMING"
    not_seen = "NOT_SEEN"  # something could not be read


UNDER_WAY = (WaitCause.starting, WaitCause.fits)


class NodeFit(Frozen):
    """A node and a request: what is free there, and what the request lacks."""

    node: str
    free: Resources
    total: Resources
    lacks: Resources = NOTHING  # now
    lacks_empty: Resources = NOTHING  # if nothing else were on the node
    note: str = ""


class Finding(Frozen):
    """Why similar workloads wait. `never`: they cannot start on the nodes that are here and stay."""

    cause: WaitCause
    workloads: PendingWorkloads
    sentence: str
    never: bool = False
    asked: Resources = NOTHING  # by the request that the rows are about
    rows: tuple[NodeFit, ...] = ()
    remedies: tuple[str, ...] = ()  # the best first
    blockers: tuple[str, ...] = ()  # ids of workloads that would have to end
    followers: PendingWorkloads = ()  # wait only for these
    rival: str | None = None  # HALF_HELD: id of the other waiting workload

    @property
    def count(self) -> int:
        return sum(workload.count for workload in (*self.workloads, *self.followers))

    @property
    def since(self) -> float | None:
        """When the first of them began to wait, if known."""
        return min((workload.since for workload in self.workloads if workload.since is not None), default=None)


class DiagnosisNote(Frozen):
    """Something worth knowing."""

    kind: NoteKind
    sentence: str


class Diagnosis(Frozen):
    """Findings (never first, then the oldest), and notes."""

    findings: tuple[Finding, ...]
    notes: tuple[DiagnosisNote, ...] = ()

    @property
    def waits(self) -> int:
        return sum(finding.count for finding in self.findings)

    @property
    def never(self) -> int:
        return sum(finding.count for finding in self.findings if finding.never)
