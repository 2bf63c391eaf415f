"""Ray's private API is called in one room, and a node of Ray has one type."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import trimtab
from trimtab.runtime.rayapi.nodes import HEAD, RayNode

PACKAGE = Path(trimtab.__file__).parent
ROOM = PACKAGE / "runtime" / "rayapi"
PRIVATE = re.compile(
    r"ray\._|ray import _|\b_raylet\b|\b_private\b|_global_node|cluster_utils|core\.generated"
    r"|\._actor_id|\._conn_str|(ActorClass|RemoteFunction)\._"
)
OWN = re.compile(r"self\._private\b")  # an attribute of ours
NODE_ROW = re.compile(r"\"(NodeID|NodeName|NodeManager\w+|MetricsExportPort|Alive)\"")
TEMPLATES = {PACKAGE / "formats" / "export" / "slurm.py"}  # writes scripts for machines without trimtab


def test_ray_s_private_api_is_called_in_one_room_only() -> None:
    assert [place for place in _found(PRIVATE) if ROOM not in place[0].parents] == []


def test_rows_of_ray_s_node_table_are_read_in_one_module_only() -> None:
    assert {path for path, _ in _found(NODE_ROW)} - TEMPLATES == {ROOM / "nodes.py"}


def test_every_call_of_ray_s_private_api_names_the_releases_it_was_seen_with() -> None:
    unnamed = [
        f"{path.name}: {node.name}"
        for path, text in ((path, path.read_text()) for path in sorted(ROOM.glob("*.py")))
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef | ast.ClassDef)
        if PRIVATE.search(ast.get_source_segment(text, node) or "")
        if not re.search(r"een with Ray \d+\.\d+", ast.get_docstring(node) or "")
    ]
    assert unnamed == []


def test_a_node_is_read_from_what_ray_reports() -> None:
    row = {
        "NodeID": "ab12", "Alive": True, "NodeName": "10.0.0.1", "NodeManagerHostname": "gpu-1",
        "NodeManagerAddress": "10.0.0.1", "NodeManagerPort": 7, "MetricsExportPort": 8080,
        "Resources": {HEAD: 1.0, "GPU": 2.0, "accelerator_type:H100": 1.0}, "Labels": {"b": "2", "a": "1"},
    }  # fmt: skip
    node = RayNode.of(row)
    assert (node.node_id, node.alive, node.head, node.gpus, node.kinds) == ("ab12", True, True, 2.0, ("H100",))
    assert (node.given_name, node.labels) == ("", (("a", "1"), ("b", "2")))  # its name is only its address
    assert node.metrics_url == "http://10.0.0.1:8080/metrics"
    bare = RayNode.of({"NodeID": "ab12", "Alive": False, "MetricsExportPort": -1, "DeathReason": 3})
    assert (bare.alive, bare.head, bare.gpus, bare.metrics_url, bare.death_reason) == (False, False, 0.0, None, 3)


def _found(pattern: re.Pattern[str]) -> list[tuple[Path, str]]:
    return [
        (path, line.strip())
        for path in sorted(PACKAGE.rglob("*.py"))
        for line in path.read_text().splitlines()
        if pattern.search(OWN.sub("", line))
    ]
