"""Runs a schedule: the blocks of a PyTorch model as a pipeline of Ray actors, one per stage.

Feeds microbatches, collects the results in order, compares them with the model run whole in this process, and measures
the steady-state period against the schedule's bottleneck. It decides nothing about the schedule. Every wait has a
deadline; when it returns, raises or is interrupted, its actors are gone, and so is the Ray that it started.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from trimtab.core.errors import InputError, UnreachableError
from trimtab.core.frozen import Frozen
from trimtab.model.pipeline import PipelineStage, Schedule
from trimtab.runtime.pipeline.stage import StageActor, StageError, StageSettings, StageTimes
from trimtab.runtime.procs.interrupts import reliable_interrupts
from trimtab.runtime.rayapi.connect import connected, import_ray
from trimtab.runtime.rayapi.nodes import live_nodes

if TYPE_CHECKING:
    from trimtab.profile.block_chain import BlockChain

OutputComparison = Literal["equal", "close", "different", "not compared"]

# Calls between processes take a millisecond or two: emulated steps should be much longer.
EMULATED_BOTTLENECK_S = 0.1
START_TIMEOUT_S = 120.0


class StageRun(Frozen):
    """Planned and measured times of a stage, for one microbatch."""

    host: str
    first: int
    last: int
    planned_compute_s: float
    planned_transfer_s: float
    compute_s: float  # median, what its blocks really took; 0 without blocks
    starved_s: float  # in the whole run, waiting for input
    blocked_s: float  # in the whole run, waiting for the next stage


class PipelineRun(Frozen):
    """A run of a schedule. Times of an emulated run are in planned seconds, whatever the stretch."""

    stages: tuple[StageRun, ...]
    batch_size: int
    microbatches: int
    emulated: bool
    stretch: float
    predicted_period_s: float
    measured_period_s: float
    output: OutputComparison
    largest_difference: float

    @property
    def predicted_throughput(self) -> float:
        """Planned items per second; infinite if the plan says that nothing takes time."""
        return self.batch_size / self.predicted_period_s if self.predicted_period_s else float("inf")

    @property
    def measured_throughput(self) -> float:
        return self.batch_size / self.measured_period_s if self.measured_period_s else float("inf")

    @property
    def ratio(self) -> float:
        return self.predicted_period_s / self.measured_period_s if self.measured_period_s else float("inf")


def run_pipeline(
    schedule: Schedule,
    chain: BlockChain | None = None,
    make_input: Callable[[int], Any] | None = None,
    *,
    batch_size: int = 8,
    buffers_in: int = 2,
    buffers_out: int = 2,
    microbatches: int = 24,
    emulate: bool = False,
    stretch: float | None = None,
    devices: Mapping[str, str] | None = None,
    address: str | None = None,
    threads: int = 1,
    timeout_s: float | None = None,
    progress: Callable[[str], None] = lambda sentence: None,
) -> PipelineRun:
    """Run a schedule and measure it.

    `chain` and `make_input` come from `profile.block_chain`; without them only an emulation is possible, which then
    moves no data. `stretch` slows emulated time down; by default the bottleneck lasts at least 0.1 s, and long enough
    for this machine to compute a microbatch meanwhile. `devices` names the torch device of a host that is not the CPU.
    `timeout_s` bounds every single wait.
    """
    counts = {"buffers in": (buffers_in, 1), "buffers out": (buffers_out, 1)}
    counts |= {"microbatches": (microbatches, 2), "threads": (threads, 1)}
    _check(schedule, chain, make_input is not None, emulate, counts)
    for word, number in (("stretch", stretch), ("timeout", timeout_s)):
        if number is not None and not 0 < number < float("inf"):
            raise InputError(f"the {word} is more than 0, not {number}")
    bottleneck = schedule.bottleneck_seconds
    inputs: list[Any] = [0]
    expected: list[Any] = []
    whole_s = 0.0
    packed: list[bytes | None] = [None] * len(schedule.stages)
    if chain is not None and make_input is not None:
        # Before the model runs here: what a block keeps from a run must not be pickled along.
        packed = [_packed(chain, stage) for stage in schedule.stages]
        progress("running the model whole, for comparison")
        inputs, expected, whole_s = _whole(chain, make_input, min(3, microbatches), threads)
    if not emulate:
        stretch = 1.0
    elif stretch is None:
        # All stages may share one core; then a microbatch of the whole model has to fit into a step.
        minimum = max(EMULATED_BOTTLENECK_S, 1.5 * whole_s)
        stretch = max(1.0, minimum / bottleneck) if bottleneck else 1.0
    if timeout_s is None:
        timeout_s = max(60.0, 4 * stretch * schedule.latency_seconds, 10 * whole_s)
    common = StageSettings(
        name="",
        buffers_in=buffers_in,
        buffers_out=buffers_out,
        timeout_s=timeout_s,
        threads=threads,
        imports=chain.imports if chain is not None else "",
        python_path=(os.getcwd(), *(entry for entry in sys.path if entry)),
    )
    with connected(address=address, cpus=len(schedule.stages) + 1) as ray, reliable_interrupts() as heed:
        progress(f"starting {len(schedule.stages)} stages")
        actors: list[Any] = []
        try:
            for index, stage in enumerate(schedule.stages):
                planned = replace(common, device=(devices or {}).get(stage.host, "cpu"))
                settings = _settings(schedule, index, planned, stretch if emulate else None)
                node = _node(ray, stage.host, address) if address and not emulate else None
                actors.append(_start(ray, settings, node))
            _load(ray, actors, schedule, packed, timeout_s)
            results, done_at, times = _drive(ray, actors, schedule, inputs, microbatches, timeout_s, progress, heed)
        finally:
            for actor in actors:
                ray.kill(actor, no_restart=True)
    outcome, difference = _compared(results, expected)
    # The first results come while the pipeline fills and the blocks warm up.
    skipped = min(len(schedule.stages), (microbatches - 1) // 3)
    period = (done_at[-1] - done_at[skipped]) / (microbatches - 1 - skipped) / stretch
    return PipelineRun(
        stages=tuple(
            StageRun(
                stage.host,
                stage.first,
                stage.last,
                stage.compute_seconds,
                stage.transfer_seconds,
                median(taken.compute_s) if chain is not None else 0.0,
                taken.starved_s / stretch,
                taken.blocked_s / stretch,
            )
            for stage, taken in zip(schedule.stages, times, strict=True)
        ),
        batch_size=batch_size,
        microbatches=microbatches,
        emulated=emulate,
        stretch=stretch,
        predicted_period_s=bottleneck,
        measured_period_s=period,
        output=outcome,
        largest_difference=difference,
    )


def _check(
    schedule: Schedule, chain: BlockChain | None, has_input: bool, emulate: bool, counts: Mapping[str, tuple[int, int]]
) -> None:
    if not schedule.stages:
        raise InputError("the schedule has no stage to run")
    expected = 1
    for stage in schedule.stages:
        if stage.first != expected or stage.last < stage.first:
            raise InputError(f"{stage.host} has layers {stage.first} to {stage.last} where layer {expected} comes next")
        expected = stage.last + 1
    if chain is not None and len(chain.blocks) != expected - 1:
        raise InputError(
            f"the schedule has {expected - 1} layers, the model has {len(chain.blocks)} blocks",
            hint="plan with the profile of this very model",
        )
    if not emulate and (chain is None or not has_input):
        raise InputError(
            "running needs the model and its input", hint="--factory file.py:factory --input 128,2048; or --emulate"
        )
    if chain is not None and not has_input:
        raise InputError("the model's input is missing", hint="--input 128,2048, or --input package.module:make_input")
    for what, (value, minimum) in counts.items():
        if value < minimum:
            raise InputError(f"a run needs {minimum} {what} or more, not {value}")


def _whole(
    chain: BlockChain, make_input: Callable[[int], Any], count: int, threads: int
) -> tuple[list[Any], list[Any], float]:
    """Inputs as the first block takes them, the whole chain's result for each, and its seconds."""
    from trimtab.profile import block_chain

    torch = block_chain.import_torch()
    before = torch.get_num_threads()
    # As many threads as a stage has: kernels split sums by threads, and another order of summation gives other bits.
    torch.set_num_threads(threads)
    try:
        made = [make_input(number) for number in range(count)]
        with torch.inference_mode():
            begun = [chain.begin(item) for item in made]
        results: list[Any] = []
        seconds: list[float] = []
        for item in made:
            began_at = time.perf_counter()
            results.append(chain.run(item))
            seconds.append(time.perf_counter() - began_at)
        return begun, results, min(seconds)
    except (InputError, KeyboardInterrupt):
        raise
    except Exception as fault:
        raise InputError(f"the model failed on its input: {type(fault).__name__}: {fault}") from None
    finally:
        torch.set_num_threads(before)


def _settings(schedule: Schedule, index: int, planned: StageSettings, stretch: float | None) -> StageSettings:
    """Settings of one stage; `stretch` is None if time is real."""
    stage = schedule.stages[index]
    last = index == len(schedule.stages) - 1
    into = schedule.stages[index - 1].transfer_seconds if index else schedule.input_seconds
    own = replace(
        planned,
        name=f"stage {index + 1} ({stage.host})",
        # The plan gives the first stage no input buffers: at most one microbatch waits there.
        buffers_in=planned.buffers_in if index else 1,
    )
    if stretch is None:
        return own
    return replace(
        own,
        receive_s=into * stretch,
        compute_s=stage.compute_seconds * stretch,
        send_s=stage.transfer_seconds * stretch if last else None,
    )


def _start(ray: Any, settings: StageSettings, node: str | None) -> Any:
    options: dict[str, Any] = {"max_concurrency": 4, "num_cpus": 1, "num_gpus": int(settings.device != "cpu")}
    if node is not None:
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
    return ray.remote(StageActor).options(**options).remote(settings)


def _node(ray: Any, host: str, address: str) -> str:
    node = next((node.node_id for node in live_nodes(ray) if host in (node.name, node.host, node.address)), None)
    if node is None:
        raise UnreachableError(
            f"no node of the cluster at {address} is called {host}",
            hint="hosts are named as Ray names its nodes: `ray list nodes`; --emulate needs none of them",
        )
    return node


def _packed(chain: BlockChain, stage: PipelineStage) -> bytes:
    try:
        return bytes(import_ray().cloudpickle.dumps(tuple(chain.blocks[stage.first - 1 : stage.last])))
    except InputError:
        raise
    except Exception as fault:
        raise InputError(f"layers {stage.first} to {stage.last} cannot be sent: {fault}") from None


def _load(
    ray: Any, actors: Sequence[Any], schedule: Schedule, packed: Sequence[bytes | None], timeout_s: float
) -> None:
    waiting = {actor.load.remote(packed[index]): index for index, actor in enumerate(actors)}
    ready, late = ray.wait(list(waiting), num_returns=len(waiting), timeout=max(START_TIMEOUT_S, timeout_s))
    for ref in ready:
        _got(ray, ref, schedule, waiting[ref])
    if late:
        raise UnreachableError(
            f"stage {waiting[late[0]] + 1} ({schedule.stages[waiting[late[0]]].host}) did not start in time",
            hint=f"{len(actors)} stages need as many free CPUs in the cluster",
        )


def _drive(
    ray: Any,
    actors: Sequence[Any],
    schedule: Schedule,
    inputs: Sequence[Any],
    count: int,
    timeout_s: float,
    progress: Callable[[str], None],
    heed: Callable[[], None],
) -> tuple[list[Any], list[float], list[StageTimes]]:
    """Feed, collect, and watch every stage, all in one loop."""
    running = {
        actor.run.remote(count, actors[index + 1] if index + 1 < len(actors) else None): index
        for index, actor in enumerate(actors)
    }
    stored = [ray.put(item) for item in inputs]
    times: dict[int, StageTimes] = {}
    results: list[Any] = []
    done_at: list[float] = []
    fed = 0
    feeding = actors[0].take.remote(0, [stored[0]])
    giving = actors[-1].give.remote()
    while running or len(results) < count:
        waiting = [*running, *(ref for ref in (feeding, giving) if ref is not None)]
        ready: list[Any] = []
        deadline = time.monotonic() + timeout_s
        while not ready and time.monotonic() < deadline:
            heed()
            ready, _ = ray.wait(waiting, num_returns=1, timeout=min(1.0, timeout_s))
        if not ready:
            raise UnreachableError(
                f"the pipeline stood still for {timeout_s:g} s after {len(results)} of {count} microbatches",
                hint="--timeout allows a longer wait",
            )
        ref = ready[0]
        if ref in running:
            times[running[ref]] = _got(ray, ref, schedule, running[ref], running)
            del running[ref]
        elif ref is feeding:
            _got(ray, ref, schedule, 0, running)
            fed += 1
            feeding = actors[0].take.remote(fed, [stored[fed % len(stored)]]) if fed < count else None
        else:
            number, carried, at = _got(ray, ref, schedule, len(actors) - 1, running)
            if number != len(results):
                raise UnreachableError(f"microbatch {number + 1} came out where {len(results) + 1} was due")
            results.append(getattr(carried, "value", None))
            done_at.append(at)
            progress(f"{len(results)} of {count} microbatches")
            giving = actors[-1].give.remote() if len(results) < count else None
    return results, done_at, [times[index] for index in range(len(actors))]


def _got(ray: Any, ref: Any, schedule: Schedule, index: int, running: Mapping[Any, int] | None = None) -> Any:
    try:
        return ray.get(ref)
    except Exception as fault:
        _raise_first_fault(ray, fault, schedule, index, running or {})


def _raise_first_fault(
    ray: Any, fault: Exception, schedule: Schedule, index: int, running: Mapping[Any, int]
) -> NoReturn:
    """Raise the fault of the stage where it began: a stage that dies makes those before it fail, too."""
    faults = [(index, fault)]
    ended, _ = ray.wait(list(running), num_returns=len(running), timeout=1.5) if running else ([], [])
    faults += [(running[ref], other) for ref in ended if (other := _fault_of(ray, ref)) is not None]

    def order(entry: tuple[int, Exception]) -> int:
        cause = getattr(entry[1], "cause", None) or entry[1]
        if isinstance(cause, ray.exceptions.RayActorError):
            return 0
        if isinstance(cause, StageError):
            return 3 if cause.passed_on else 2
        return 1

    first_index, first = min(faults, key=order)
    cause = getattr(first, "cause", None) or first
    host = schedule.stages[first_index].host
    if isinstance(cause, ray.exceptions.RayActorError):
        reason = "its process died"
    elif isinstance(cause, StageError):
        reason = str(cause)
    else:
        lines = str(cause).strip().splitlines() or [""]
        reason = f"{type(cause).__name__.removeprefix('RayTaskError')}: {lines[0]}"
    late = isinstance(cause, StageError) and not cause.passed_on
    raise UnreachableError(
        f"stage {first_index + 1} ({host}) failed: {reason}", hint="--timeout allows a longer wait" if late else None
    ) from None


def _fault_of(ray: Any, ref: Any) -> Exception | None:
    try:
        ray.get(ref)
    except Exception as fault:
        return fault
    return None


def _compared(results: Sequence[Any], expected: Sequence[Any]) -> tuple[OutputComparison, float]:
    """Whether every result equals that of the whole model, and the largest difference."""
    if not expected:
        return "not compared", 0.0
    from trimtab.profile import block_chain

    torch = block_chain.import_torch()
    worst: OutputComparison = "equal"
    largest = 0.0
    for number, result in enumerate(results):
        wanted = list(block_chain.tensors_in(expected[number % len(expected)]))
        found = list(block_chain.tensors_in(result))
        if len(wanted) != len(found):
            return "different", float("inf")
        for reference, other in zip(wanted, found, strict=True):
            if reference.shape != other.shape or reference.dtype != other.dtype:
                return "different", float("inf")
            if torch.equal(reference.cpu(), other):
                continue
            reference, other = reference.cpu().double(), other.double()
            largest = max(largest, float((reference - other).abs().max()))
            # Tolerance by the dtype of the result.
            coarse = torch.finfo(wanted[0].dtype).eps ** 0.5 if wanted[0].dtype.is_floating_point else 0.0
            near = torch.allclose(reference, other, rtol=coarse, atol=coarse * float(reference.abs().max()))
            worst = "close" if near and worst != "different" else "different"
    return worst, largest
