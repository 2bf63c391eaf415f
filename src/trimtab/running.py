"""Running a job from Python: the same as `trimtab run`.

    job = trimtab.Job.load("job.yaml")
    end = job.run(local=True)                  # in this process, without Ray; else on Ray
    print(end.state, end.reason.sentence, len(end.iterations))

    job = trimtab.Job(
        {"rollout": Rollout, "trainer": {"use": Trainer, "after": "rollout", "settings": {"rate": 1e-3}}},
        cluster=8, batches=4, weight_sync=("trainer", "rollout"), run={"iterations": 80},
    )

A job made of classes is converted to the form of a job file and kept in the run folder as one: classes must be
importable, and settings plain data. Faults are reported before anything starts.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.model.plan import CurrentPlacement, Plan
from trimtab.plan.placement.compare import current_plan
from trimtab.plan.placement.planner import best_plan
from trimtab.plan.placement.timeline import to_plan
from trimtab.runtime.run.component import check_class, find_class
from trimtab.runtime.run.folder import JOB, check_free, discard_unused, new_folder, read_run
from trimtab.runtime.run.job import RunJob
from trimtab.runtime.run.job_file import check_same, load_run, plain_data, read_run_job
from trimtab.runtime.run.run import Run, RunEnd

if TYPE_CHECKING:
    from trimtab.runtime.client.session import Session

RUNS = Path("runs")  # default parent of run folders

OnEvent = Callable[[str, dict[str, Any]], None]
# A context beside the run: entered when its folder and its session on Ray exist, left before they go.
Beside = Callable[[Path, "Session | None"], contextlib.AbstractContextManager[object]]


class Job:
    """A job to run: its components, their cluster, and for how long.

    `components` maps names to classes, or to sections as in a job file, where `use` may be a class. `cluster` is a
    section of a job file, or a number of GPUs on one node; `weight_sync` a section or (from, to); `run` the section of
    that name. `Job.load` reads a job file.
    """

    _runner: Run | None = None  # while it runs

    def __init__(
        self,
        components: Mapping[str, type | Mapping[str, Any]],
        *,
        cluster: int | Mapping[str, Any] = 1,
        batches: int = 1,
        staleness: int = 0,
        weight_sync: tuple[str, str] | Mapping[str, Any] | None = None,
        run: Mapping[str, Any] | None = None,
        name: str = "job",
    ) -> None:
        sections = {part: _section(part, given) for part, given in components.items()}
        modules = next((str(folder) for _, folder in sections.values() if folder is not None), None)
        if isinstance(weight_sync, tuple):
            weight_sync = dict(zip(("from", "to"), weight_sync, strict=True))
        config = {
            "cluster": {"nodes": 1, "gpus_per_node": cluster} if isinstance(cluster, int) else cluster,
            "workflow": {
                "batches": batches,
                "staleness": staleness,
                "components": {part: section for part, (section, _) in sections.items()},
                **({"weight_sync": weight_sync} if weight_sync is not None else {}),
            },
            "run": {**({"modules_from": modules} if modules else {}), **(run or {})},
        }
        self.name = name
        self.run_job = read_run_job(plain_data(config, name), Path.cwd() / name)

    @classmethod
    def load(
        cls,
        path: str | Path,
        overrides: Sequence[str] = (),
        *,
        iterations: int | None = None,
        seed: int | None = None,
        mode: str | None = None,
    ) -> Job:
        """The job of a file, with `key=value` overrides, and other iterations, seed or mode where given."""
        run = load_run(Path(path), overrides, iterations=iterations, seed=seed, mode=mode)
        return cls._of(run, _name_of(Path(path)))

    @classmethod
    def of_run(
        cls, folder: str | Path, *, iterations: int | None = None, seed: int | None = None, mode: str | None = None
    ) -> Job:
        """The job of a run folder."""
        kept = Path(folder) / JOB
        read_run(Path(folder))  # raises where it is no run folder
        if not kept.is_file():
            raise InputError("the folder does not say which job it is of", where=str(kept), hint="name the job file")
        return cls._of(
            load_run(kept, iterations=iterations, seed=seed, mode=mode), Path(folder).name.rpartition("-")[0]
        )

    @classmethod
    def _of(cls, run: RunJob, name: str) -> Job:
        job = cls.__new__(cls)
        job.name, job.run_job = name or "job", run
        return job

    def plan(self, gpus: Mapping[str, Sequence[int]] | None = None) -> Plan:
        """The best plan under the stated costs, or the plan with the components on these GPUs (global ranks).

        InputError where costs are not stated: running measures them. InfeasibleError where the plan is impossible.
        """
        if self.run_job.unmeasured:
            names = " and ".join(sorted(self.run_job.unmeasured))
            raise InputError(f"what {names} cost is not stated: running the job measures it", where=self.run_job.name)
        space, outcome = best_plan(self.run_job.job)
        assert outcome.best is not None
        if gpus is None:
            return to_plan(space, outcome.best)
        where = f"{self.run_job.name}: the plan that is given"
        unknown = set(gpus) - set(self.run_job.job.workflow.names)
        if unknown:
            raise InputError(f"there is no component named {min(unknown)}", where=where)
        placement = CurrentPlacement({name: tuple(ranks) for name, ranks in gpus.items()}, where)
        placed = current_plan(space, placement, outcome.best)
        if placed.plan is None:
            raise InfeasibleError(f"the plan cannot be: {placed.reason}", where=where)
        return placed.plan

    def run(
        self,
        *,
        local: bool = False,
        address: str | None = None,
        folder: str | Path | None = None,
        resume: bool = False,
        plan: Plan | None = None,
        on_event: OnEvent | None = None,
        beside: Beside | None = None,
    ) -> RunEnd:
        """Run the job to its end and return how it ended; raises TrimtabError only for faults before it starts.

        With `local` everything runs in this process, without Ray; else on the Ray that this process is connected to,
        the one at `address` or RAY_ADDRESS, or a new one that ends with the run. `folder` defaults to `runs/NAME-N`;
        with `resume` the run in it continues. `on_event` receives everything that goes into `events.jsonl`, and first
        `starting`, with the folder and where it runs. `beside` is a context manager from then to the end, as `trimtab
        run --dashboard` uses.
        """
        emit = on_event or (lambda event, facts: None)
        self.check(away=not local and bool(address))
        is_new = True
        if resume:
            path, is_new = self._to_resume(folder), False
        elif folder is not None:
            path = Path(folder)
            is_new = not path.exists()
            check_free(path, resume=False)
        else:
            path = new_folder(RUNS, self.name)
        session, executor, where = None, None, "this process, without Ray"
        try:
            with contextlib.ExitStack() as stack:
                if not local:
                    from trimtab.runtime.rayapi.embedded import session_for
                    from trimtab.runtime.run.ray_executor import RayExecutor

                    session, where = stack.enter_context(session_for(self.run_job.job.cluster, address))
                    executor = RayExecutor(session)
                emit("starting", {"folder": str(path), "on": where})
                if beside is not None:
                    stack.enter_context(beside(path, session))
                here = path if local else path.resolve()
                self._runner = Run(self.run_job, here, executor, plan=plan, resume=resume, on_event=emit)
                return self._runner.run()
        finally:
            self._runner = None
            if is_new:
                discard_unused(path)

    def stop(self, why: str = "requested by the caller") -> None:
        """End the run after the current iteration, with its state saved. Thread-safe."""
        self._running().stop(why)

    def ask(self, why: str = "requested by the caller") -> None:
        """Check now whether the plan is still right: the result is an event `decided`. Thread-safe."""
        self._running().request_replan(why)

    def _running(self) -> Run:
        if self._runner is None:
            raise InputError("the job does not run now")
        return self._runner

    def check(self, *, away: bool = False) -> None:
        """Raise InputError where a component's class is missing, or cannot be created with its settings.

        With `away` modules are not looked up here: they are on the machines of a cluster.
        """
        for name, part in self.run_job.parts.items():
            if part.use is not None and not away:
                where = f"{self.run_job.name}: workflow.components.{name}.use"
                check_class(find_class(part.use, self.run_job.near, where), part.use, part.settings, where)

    def _to_resume(self, folder: str | Path | None) -> Path:
        if folder is None:
            raise InputError("a run is resumed from its folder, and none is named")
        path = Path(folder)
        check_free(path, resume=True)
        if (path / JOB).is_file():
            check_same(load_run(path / JOB), self.run_job, str(path))
        return path


def _name_of(path: Path) -> str:
    """Name of the runs of a file; job.yaml is named after its folder."""
    return path.stem if path.stem != "job" else path.resolve().parent.name


def _section(component: str, given: Any) -> tuple[dict[str, Any], Path | None]:
    """A component as a job file has it, and the folder of its module where it is not on the import path."""
    section = dict(given) if isinstance(given, Mapping) else {"use": given}
    use = section.get("use")
    if use is None or isinstance(use, str):
        return section, None
    where = f"components.{component}"
    if not inspect.isclass(use):
        raise InputError(
            f"{component} is a {type(use).__name__}: a class is expected, which the run makes where it is needed",
            where=where,
        )
    if "<locals>" in use.__qualname__:
        raise InputError(
            f"{use.__qualname__} is defined inside a function and cannot be imported by other processes",
            where=where,
            hint="define it at the top of its module",
        )
    module, folder = use.__module__, None
    if module == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        if file is None:
            raise InputError(
                f"{use.__qualname__} is defined in no file and cannot be imported by other processes", where=where
            )
        # As with multiprocessing the script is imported again, so its actions must be under
        # `if __name__ == "__main__":`.
        module, folder = Path(file).stem, Path(os.path.abspath(file)).parent
    return {**section, "use": f"{module}:{use.__qualname__}"}, folder
