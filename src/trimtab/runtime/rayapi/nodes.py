"""A node as Ray reports it, in `ray.nodes()` and in the GCS node table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from trimtab.core.frozen import Frozen
from trimtab.model.pool import Labels

HEAD = "node:__internal_head__"  # resource that marks the head node
_KIND, _KIND_LABEL = "accelerator_type:", "ray.io/accelerator-type"


class RayHolder(Frozen):
    """An actor or a placement group that holds resources of a node."""

    kind: str
    name: str
    holds: dict[str, float]
    pid: int | None = None


class RayNode(Frozen):
    """A node. Resources have Ray's names; `free` and what follows are filled in by `RayView` only."""

    node_id: str
    alive: bool = True
    name: str = ""  # its address if it was given none
    host: str = ""
    address: str = ""
    port: int = 0  # of its node manager
    metrics_port: int = 0
    resources: dict[str, float] = field(default_factory=dict)
    labels: Labels = ()
    death_reason: int = 0  # Ray's number, of a dead node
    free: dict[str, float] = field(default_factory=dict)
    holders: tuple[RayHolder, ...] = ()
    draining: bool = False
    deadline: float | None = None  # of the drain, epoch seconds

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> RayNode:
        return cls(
            node_id=str(row.get("NodeID", "")),
            alive=bool(row.get("Alive")),
            name=str(row.get("NodeName") or ""),
            host=str(row.get("NodeManagerHostname") or ""),
            address=str(row.get("NodeManagerAddress") or ""),
            port=int(row.get("NodeManagerPort") or 0),
            metrics_port=max(0, int(row.get("MetricsExportPort") or 0)),
            resources=dict(row.get("Resources") or {}),
            labels=tuple(sorted((str(key), str(value)) for key, value in (row.get("Labels") or {}).items())),
            death_reason=int(row.get("DeathReason") or 0),
        )

    @property
    def given_name(self) -> str:
        return "" if self.name == self.address else self.name

    @property
    def head(self) -> bool:
        return HEAD in self.resources

    @property
    def gpus(self) -> float:
        return float(self.resources.get("GPU", 0.0))

    @property
    def kinds(self) -> tuple[str, ...]:
        return tuple(sorted(name.removeprefix(_KIND) for name in self.resources if name.startswith(_KIND)))

    @property
    def kind_label(self) -> str:
        return dict(self.labels).get(_KIND_LABEL, "")

    @property
    def metrics_url(self) -> str | None:
        """Where it exports metrics, if it does."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.metrics_port}/metrics" if self.metrics_port else None


def ray_nodes(ray: Any) -> list[RayNode]:
    """All nodes of the cluster that this process is connected to, dead ones too."""
    return [RayNode.of(row) for row in ray.nodes()]


def live_nodes(ray: Any) -> list[RayNode]:
    return [node for node in ray_nodes(ray) if node.alive]
