"""Prints what SGLang says that it needs, less what has no build for a machine without a GPU or is pinned elsewhere."""

import importlib.metadata
import re

LEFT_OUT = re.compile(
    r"^(torch|torchvision|torchaudio|torchcodec|torchao|triton|transformers|sgl[-_]kernel|sglang[-_]kernel|sgl[-_].*"
    r"|flashinfer.*|flash[-_].*|nvidia.*|cuda.*|cutlass.*|quack.*|tilelang|mooncake.*|xgrammar.*cuda|decord2?|kernels"
    r"|apache[-_]tvm.*|smg[-_].*|nixl.*|deep[-_].*|av)$",
    re.IGNORECASE,
)

for need in importlib.metadata.requires("sglang") or ():
    wanted, _, marker = need.partition(";")
    name = re.split(r"[\s\[<>=!~(@]", wanted.strip())[0]
    if "extra ==" not in marker and not LEFT_OUT.match(name):
        print(need)
