"""Runs inside .venv-rlinf: feeds configs to RLinf's own placement code and prints where it puts the components.

Standard input: a JSON list of {config, nodes, gpus_per_node, embodied}. Standard output: a JSON list of
{"ranks": {component: [GPU, ...]}, "mode": name, "inference_workers": name} or {"error": text}. The cluster is made of
RLinf's own node classes, without Ray and without GPUs.
"""

import json
import sys

from omegaconf import OmegaConf
from rlinf.scheduler.cluster.node import NodeGroupInfo, NodeInfo
from rlinf.scheduler.hardware import HardwareInfo
from rlinf.scheduler.hardware.accelerators import Accelerator
from rlinf.scheduler.hardware.hardware import HardwareResource
from rlinf.utils.placement import HybridComponentPlacement, ModelParallelComponentPlacement


class StillCluster:
    """What the placement code asks of a cluster, with GPUs that need not exist."""

    def __init__(self, nodes, gpus_per_node):
        gpu = HardwareInfo(type=Accelerator.HW_TYPE, model="NV_GPU")
        infos = [
            NodeInfo(
                node_labels=["cluster"],
                node_rank=rank,
                ray_id=str(rank),
                node_ip=f"10.0.0.{rank}",
                num_cpus=8,
                python_interpreter_path="python",
                default_env_vars={},
                env_vars={},
                hardware_resources=[HardwareResource(type=Accelerator.HW_TYPE, infos=[gpu] * gpus_per_node)],
            )
            for rank in range(nodes)
        ]
        self._group = NodeGroupInfo(label="cluster", nodes=infos, hardware_type=Accelerator.HW_TYPE)
        self.num_accelerators = nodes * gpus_per_node
        self.num_nodes = nodes

    def get_node_group(self, label="cluster"):
        return self._group if label == "cluster" else None


def place(case):
    kind = HybridComponentPlacement if case["embodied"] else ModelParallelComponentPlacement
    placement = kind(OmegaConf.create(case["config"]), StillCluster(case["nodes"], case["gpus_per_node"]))
    ranks = {name: list(placement.get_hardware_ranks(name)) for name in placement._components}
    for name in placement._components:
        placement.get_strategy(name)
    mode, config = placement._placement_mode.name, placement._config
    workers = None
    if mode == "DISAGGREGATED" and "inference" in ranks:  # as its launchers ask for them
        workers = config.inference.group_name
        assert config.inference.load_from_actor is True
        assert config.inference.model.tensor_model_parallel_size == placement.inference_tp_size
    return {"ranks": ranks, "mode": mode, "inference_workers": workers}


def main():
    answers = []
    for case in json.load(sys.stdin):
        try:
            answers.append(place(case))
        except Exception as error:  # noqa: PERF203 - whatever it says is the answer
            answers.append({"error": f"{type(error).__name__}: {error}"})
    print("ANSWERS" + json.dumps(answers))


main()
