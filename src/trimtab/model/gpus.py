"""What a kind of GPU can do: rates, memory and links, as published."""

from __future__ import annotations

from trimtab.core.frozen import Frozen

BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "fp4": 4, "nvfp4": 4, "int4": 4}


class GpuKind(Frozen):
    """Dense peak rates; links are bytes per second of one GPU in one direction; GB of memory are 2^30 bytes."""

    name: str
    bf16_tflops: float
    fp8_tflops: float
    fp4_tflops: float
    memory_gb: float
    bandwidth_gbs: float
    intra_node_gbs: float
    inter_node_gbs: float
    gpus_per_node: int = 8
    host_gbs: float = 32.0
    host_memory_gb: float = 1024.0
    """Of a node, as servers with this kind are usually sold."""
    source: str = ""

    def flops(self, precision: str) -> float:
        """Peak FLOP/s; weights in 4-bit integers are multiplied in bf16."""
        if precision in ("fp4", "nvfp4"):
            return self.fp4_tflops * 1e12
        return (self.fp8_tflops if precision in ("fp8", "int8") else self.bf16_tflops) * 1e12

    @property
    def bandwidth(self) -> float:
        return self.bandwidth_gbs * 1e9

    def link(self, gpus: int) -> float:
        """Bytes per second between GPUs of a group of so many."""
        return (self.intra_node_gbs if gpus <= self.gpus_per_node else self.inter_node_gbs) * 1e9

    def ring(self, gpus: int) -> float:
        """The same of a collective over whole nodes, whose every GPU has a network card of its own."""
        return min(self.intra_node_gbs * 1e9, self.link(gpus) * self.gpus_per_node)
