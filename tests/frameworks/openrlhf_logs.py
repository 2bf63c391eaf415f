"""Runs inside .venv-openrlhf: OpenRLHF's own logger prints the steps of a run as its trainer has it print them.

Standard input: JSON, a list of statuses, one a step. Standard output: first, as JSON, the flags that its launcher
takes; then what the logger prints. Both are taken by their files: the package imports engines that are not here.
"""

import ast
import importlib.metadata
import importlib.util
import json
import sys

files = {str(path): path.locate() for path in importlib.metadata.files("openrlhf")}
launcher = ast.parse(files["openrlhf/cli/train_ppo_ray.py"].read_text())
flags = [
    node.args[0].value
    for node in ast.walk(launcher)
    if isinstance(node, ast.Call)
    and getattr(node.func, "attr", "") == "add_argument"
    and isinstance(node.args[0], ast.Constant)
]
print(json.dumps(flags))
spec = importlib.util.spec_from_file_location("logging_utils", files["openrlhf/utils/logging_utils.py"])
logging_utils = importlib.util.module_from_spec(spec)
spec.loader.exec_module(logging_utils)
logger = logging_utils.init_logger("openrlhf.trainer.ppo_trainer_async")
for global_step, log_status in enumerate(json.load(sys.stdin), start=1):
    logger.info(f"Global step {global_step}: {log_status}")
