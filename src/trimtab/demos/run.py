"""`trimtab demo`: the whole of it in two minutes. A GRPO job is planned and trained on a Ray of its own.

A node joins; an evaluation of high priority takes a GPU from a rollout worker and gives it back; rollouts get longer,
and the run moves to a better plan; at the end there is a report. What is done to the run is done from here, by the
doors that anybody has; what comes of it is the run's own doing, and the ten lines at the end are counted, not written.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.core.errors import InputError, TrimtabError
from trimtab.formats.files import write_text
from trimtab.model.workflow import Node
from trimtab.render.live.run import RunDisplay, signal_callbacks
from trimtab.render.output import out
from trimtab.render.text.run import RunNarrator

if TYPE_CHECKING:
    from trimtab.runtime.client.session import Session
    from trimtab.runtime.rayapi.embedded import EmbeddedRay
    from trimtab.runtime.run.ray_run import ClusterRun

JOB = Path("examples/grpo/demo.yaml")
JOINS_AT, EVALUATED_AT = 10, 30  # iterations after which it happens
EVALUATION_GPUS, EVALUATION_S, EVALUATION_PRIORITY = 1.0, 4.0, 9.5


class EvaluationStub:
    """Stands for an evaluation: has its GPU for a while."""

    def run(self, seconds: float) -> float:
        """Take so long."""
        time.sleep(seconds)
        return seconds


class DemoEvents:
    """What is done to the run from outside, each thing once, in threads of their own."""

    def __init__(self, ray: EmbeddedRay, session: Session, display: RunDisplay) -> None:
        self._ray, self._session, self._display = ray, session, display
        self.run: ClusterRun | None = None
        self._begun: set[str] = set()
        self._threads: list[threading.Thread] = []

    def on_event(self, event: str, facts: dict[str, Any]) -> None:
        """Events of the run, as they are told."""
        self._display.on_event(event, facts)
        if event == "iteration":
            number = facts["iteration"]["number"]
            if number >= JOINS_AT:
                self._once("a node joins", self._join)
            if number >= EVALUATED_AT:
                self._once("evaluation", self._evaluate)

    def wait(self) -> None:
        """Until all of it is over."""
        for thread in self._threads:
            thread.join(timeout=60)

    def _once(self, name: str, what: Any) -> None:
        if name not in self._begun:
            self._begun.add(name)
            thread = threading.Thread(target=what, name=f"trimtab-demo-{len(self._begun)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _join(self) -> None:
        self._display.say("> a node with 4 more GPUs joins the cluster")
        self._ray.add(Node("node2", 4))

    def _evaluate(self) -> None:
        assert self.run is not None
        self._display.say(f"> an evaluation of priority {EVALUATION_PRIORITY:g} wants a GPU for {EVALUATION_S:g} s")
        try:
            task = self.run.pool.submit(
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
            self._display.say(f"> the evaluation did not come to its end: {fault.what}")


def run_demo(folder: Path) -> int:
    """Run it; gives the exit status."""
    from trimtab.render.html.run.figures import costs, idle_shares, metric_names
    from trimtab.render.html.run.report import run_report
    from trimtab.render.html.run.story import read_story
    from trimtab.render.html.run.summary import summary_lines
    from trimtab.render.html.run.timeline import run_chart
    from trimtab.runtime.client.session import connect
    from trimtab.runtime.rayapi.embedded import EmbeddedRay
    from trimtab.runtime.run.folder import new_folder
    from trimtab.runtime.run.job_file import load_run
    from trimtab.runtime.run.ray_run import ClusterRun

    job = load_run(_job_file())
    target = new_folder(folder, "demo")
    story = RunNarrator(job.iterations)
    out.print("[bold]trimtab demo[/]: GRPO on a Ray of its own with 8 logical GPUs on 2 nodes; Ray starts ...")
    with EmbeddedRay(job.job.cluster) as ray, connect(name="demo") as session:
        session.preemption(same_pool=True, same_pool_gap=1.0)
        with RunDisplay("grpo", story) as display, signal_callbacks(display.interrupted, lambda: None):
            demo_events = DemoEvents(ray, session, display)
            demo_events.run = run = ClusterRun(job, target, session, on_event=demo_events.on_event)
            end = run.run()
            demo_events.wait()
        session.shutdown()
    told = read_story(target)
    report = target / "report.html"
    write_text(report, run_report(told, title="trimtab demo", command="trimtab demo"))
    out.print()
    for line in summary_lines(told, run_chart(told), costs(told, idle_shares(told)), metric_names(told, [])):
        out.print(line, markup=False)
    out.print(f"the whole of it on one timeline: {report}", markup=False)
    return 0 if end.state == "done" else 4


def _job_file() -> Path:
    above = Path(__file__).resolve().parents
    for folder in (Path.cwd(), *above):
        if (folder / JOB).is_file():
            return folder / JOB
    raise InputError(
        f"the demo's job, {JOB}, is not here", hint="start it in a copy of trimtab's source, where its examples are"
    )
