"""Prints what SGLang says that it needs, less what has no build for a machine without a GPU or is pinned elsewhere."""

import importlib.metadata
import re

LEFT_OUT = re.compile(
    r"^(torch|torchvision|torchaudio|torchcodec|torch[-_]memory[-_]saver|triton|transformers|timm|sgl[-_].*"
    r"|sglang[-_]kernel|flashinfer.*|flash[-_].*|nvidia(?!-ml-py).*|nvshmem.*|cuda.*|quack.*|humming.*|tilelang)$",
    re.IGNORECASE,
)

for need in importlib.metadata.requires("sglang") or ():
    wanted, _, marker = need.partition(";")
    name = re.split(r"[\s\[<>=!~(@]", wanted.strip())[0]
    if "extra ==" not in marker and not LEFT_OUT.match(name):
        print(need)
