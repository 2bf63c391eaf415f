"""A run beside the Ray cluster that is to run it: GPUs, how nodes hold them, memory and object stores."""

from __future__ import annotations

from collections.abc import Iterator

from trimtab.core.frozen import Frozen
from trimtab.plan.check.findings import CheckFinding, Remedy, Severity, releases
from trimtab.plan.check.host_rules import TOKEN_BYTES
from trimtab.plan.check.setup import RunSetup

GB = 2**30


class LiveNode(Frozen):
    """What an alive node says it has, taken or free."""

    name: str
    gpus: int
    memory_gb: float
    object_store_gb: float


def found(run: RunSetup, nodes: tuple[LiveNode, ...]) -> Iterator[CheckFinding]:
    """Nothing without nodes: no cluster was asked for."""
    if not nodes or not run.gpus:
        return
    with_gpus = [node for node in nodes if node.gpus]
    there = sum(node.gpus for node in with_gpus)
    if there < run.gpus:
        yield _finding(
            f"the cluster has {there} GPUs, the run asks for {run.gpus}",
            "its placement group would wait for ever",
            ("gpus",),
            (Remedy({"gpus": there}, "a smaller run"),) if there else (),
        )
        return
    each = run.node_gpus
    wanted, whole = run.gpus // each, sum(node.gpus // each for node in with_gpus)
    if wanted > whole:
        yield _finding(
            f"the run asks for {wanted} times {each} GPUs of one node, the cluster's nodes have that {whole} times",
            f"nodes have {', '.join(str(node.gpus) for node in with_gpus)} GPUs",
            ("gpus", "gpus_per_node"),
        )
    batch = (run.samples or 0) * (run.longest or 0) * TOKEN_BYTES / GB
    store = sum(node.object_store_gb for node in nodes)
    if store and batch > 0.5 * store:
        yield _finding(
            f"a batch takes {batch:.0f} GB of the cluster's object stores of {store:.0f} GB",
            "objects that do not fit are spilled to disk",
            ("prompts", "group"),
            (Remedy({}, "nothing", "start Ray with a larger --object-store-memory, and /dev/shm as large"),),
            "warning",
        )
    smallest = min(with_gpus, key=lambda node: node.memory_gb)
    if run.host_memory and smallest.memory_gb and smallest.memory_gb < 0.5 * run.host_memory:
        yield _finding(
            f"{smallest.name} offers {smallest.memory_gb:.0f} GB of memory, {run.host_memory:.0f} GB are reckoned with",
            "containers have limits of their own",
            ("host_memory",),
            (Remedy({}, "nothing", f"check again with --host-memory-gb {smallest.memory_gb:.0f}"),),
            "warning",
        )


def _finding(
    what: str, why: str, names: tuple[str, ...], cures: tuple[Remedy, ...] = (), severity: str = "error"
) -> CheckFinding:
    level: Severity = "warning" if severity == "warning" else "error"
    held = releases((), "", "")
    return CheckFinding(what, why, names, cures, level, "cluster", "ray", "ray-project/ray gcs.proto", "2026-11", held)
