"""Prints what an engine's package says that it needs: `engine_needs.py sglang`.

Left out is what has no build for a machine without a GPU, or is pinned where the environment is made.
"""

import importlib.metadata
import re
import sys

LEFT_OUT = re.compile(
    r"^(torch|torchvision|torchaudio|torchcodec|torch[-_]memory[-_]saver|triton|transformers|timm|sgl[-_].*"
    r"|sglang[-_]kernel|flashinfer.*|flash[-_].*|nvidia(?!-ml-py).*|nvshmem.*|cuda.*|quack.*|humming.*|tilelang"
    r"|intel[-_]extension.*)$",
    re.IGNORECASE,
)

for need in importlib.metadata.requires(sys.argv[1]) or ():
    wanted, _, marker = need.partition(";")
    name = re.split(r"[\s\[<>=!~(@]", wanted.strip())[0]
    if "extra ==" not in marker and not LEFT_OUT.match(name):
        print(need)
