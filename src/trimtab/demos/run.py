"""`trimtab demo`: a GRPO job is planned and trained on a local Ray, in two minutes.

A node joins; a high-priority evaluation preempts a rollout worker and returns its GPU; rollouts get longer, and the run
migrates to a better plan; at the end there is a report. The events use the public API; their effects are the run's own,
and the lines at the end are computed from its record.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import TrimtabError, UnreachableError
from trimtab.formats.files import write_text
from trimtab.model.workflow import Node
from trimtab.render.live import RunDisplay, signal_callbacks
from trimtab.render.output import out, print_lines
from trimtab.render.text.run import RunNarrator

if TYPE_CHECKING:
    from trimtab.runtime.rayapi.embedded import EmbeddedRay
    from trimtab.runtime.run.ray_executor import RayExecutor

JOB = Path("examples/grpo/demo.yaml")
JOINS_AT, EVALUATED_AT = 9, 38  # iterations after which they occur
EVALUATION_GPUS, EVALUATION_S, EVALUATION_PRIORITY = 1.0, 4.0, 9.5


class EvaluationStub:
    """A stand-in for an evaluation: holds its GPU for a while."""

    def run(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


class DemoEvents:
    """External events of the run, once each, in their own threads."""

    def __init__(self, ray: EmbeddedRay, executor: RayExecutor, display: RunDisplay) -> None:
        self._ray, self._executor, self._display = ray, executor, display
        self._started: set[str] = set()
        self._threads: list[threading.Thread] = []

    def on_event(self, event: str, facts: dict[str, Any]) -> None:
        self._display.on_event(event, facts)
        if event == "iteration":
            number = facts["iteration"]["number"]
            if number >= JOINS_AT:
                self._once("a node joins", self._join)
            if number >= EVALUATED_AT:
                self._once("evaluation", self._evaluate)

    def wait(self) -> None:
        for thread in self._threads:
            thread.join(timeout=60)

    def _once(self, name: str, what: Any) -> None:
        if name not in self._started:
            self._started.add(name)
            thread = threading.Thread(target=what, name=f"trimtab-demo-{len(self._started)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _join(self) -> None:
        self._display.say("> a node with 4 more GPUs joins the cluster")
        self._ray.add(Node("node2", 4))

    def _evaluate(self) -> None:
        self._display.say(f"> an evaluation of priority {EVALUATION_PRIORITY:g} wants a GPU for {EVALUATION_S:g} s")
        try:
            task = self._executor.pool.submit(
                EvaluationStub,
                resources={"gpu": EVALUATION_GPUS, "cpu": 0.01},
                id="evaluation",
                priority=EVALUATION_PRIORITY,
                run="run",
                run_args=(EVALUATION_S,),
                preemptible=False,
                wait_s=60.0,
            )
            task.result(timeout=90.0)
            self._display.say("> the evaluation is done; its GPU goes back")
        except TrimtabError as fault:
            self._display.say(f"> the evaluation failed: {fault.what}")


def run_demo(folder: Path) -> int:
    """Runs the demo; returns the exit status."""
    from trimtab.render.html.run.figures import story_lines
    from trimtab.render.html.run.report import run_report
    from trimtab.render.html.run.story import read_story
    from trimtab.runtime.client.session import connect
    from trimtab.runtime.rayapi.embedded import EmbeddedRay
    from trimtab.runtime.run.folder import new_folder
    from trimtab.runtime.run.job_file import load_run
    from trimtab.runtime.run.ray_executor import RayExecutor
    from trimtab.runtime.run.run import Run

    job = load_run(_job_file())
    target = new_folder(folder, "demo")
    story = RunNarrator(job.iterations)
    out.print("[bold]trimtab demo[/]: GRPO on a local Ray with 8 logical GPUs on 2 nodes; starting Ray ...")
    with EmbeddedRay(job.job.cluster) as ray, connect(name="demo") as session:
        session.preemption(same_pool=True, same_pool_gap=1.0)
        with RunDisplay("grpo", story) as display, signal_callbacks(display.interrupted, lambda: None):
            executor = RayExecutor(session)
            events = DemoEvents(ray, executor, display)
            end = Run(job, target, executor, on_event=events.on_event).run()
            events.wait()
        session.shutdown()
    run_story = read_story(target)
    report = target / "report.html"
    write_text(report, run_report(run_story, title="trimtab demo", command="trimtab demo"))
    out.print()
    print_lines(story_lines(run_story))
    out.print(f"report with timeline: {report}", markup=False)
    if end.state == "failed":
        raise end.error or UnreachableError(end.reason.sentence)
    return 0 if end.state == "done" else 4


def _job_file() -> Path:
    """The demo's job: of a checkout, or the copy that a wheel has."""
    here = Path(__file__).resolve()
    return next(
        folder / JOB for folder in (Path.cwd(), *here.parents, here.parent / "checkout") if (folder / JOB).is_file()
    )
