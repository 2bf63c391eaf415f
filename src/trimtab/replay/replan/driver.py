"""Drives the replan machine, or a baseline, through a simulated RL run: iterations, migrations, nodes.

The decider gets the events of a live run in their order, and its instructions are executed in virtual time: the stages
of a migration take drawn durations; a node lost under the current plan loses the current iteration and all since the
last checkpoint; a run without a feasible plan waits for nodes. A stopped run is resumed when there is a node to run on,
as a user would. `ReplanInvariants` checks every event independently: a violation ends the run with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.core.frozen import Frozen
from trimtab.machines.replan import events as e
from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.model.run import MigrationStage, ReplanRules
from trimtab.replay.common.timing import Agenda
from trimtab.replay.pool.invariants import InvariantError
from trimtab.replay.replan.invariants import ReplanDecider, ReplanInvariants
from trimtab.replay.replan.reality import ReplanReality, ScheduledNodeEvent, SimulatedNodes, TrueCosts

TRAINS, MOVES, AGAIN, WAITS = "iterations", "moves", "void", "waiting"
ReplanListener = Callable[[e.ReplanEvent, float, "list[e.ReplanInstruction]"], None]


class SimulatedMigration(Frozen):
    """A migration: after which iteration, why, to which plan, its outcome, and the seconds the run stood still."""

    after: int
    code: str
    plan: str
    forced: bool
    arrived: bool
    seconds: float


@dataclass
class ReplanOutcome:
    """Results of a run."""

    total_s: float
    walls_s: list[float]  # of every counted iteration
    moves: list[SimulatedMigration]
    spent: Mapping[str, float]  # seconds, by activity
    first: str
    last: str
    finished: bool = True
    void: int = 0
    decisions: int = 0
    events: int = 0
    looks: int = 0


def nodes_of(
    reality: ReplanReality,
) -> tuple[SimulatedNodes, Agenda[ScheduledNodeEvent], dict[int, list[ScheduledNodeEvent]]]:
    """The initial nodes, timed node events, and node events by iteration."""
    agenda: Agenda[ScheduledNodeEvent] = Agenda()
    before: dict[int, list[ScheduledNodeEvent]] = {}
    for event in reality.happens:
        if event.at_s is not None:
            agenda.put(event.at_s, event)
        elif event.before is not None:
            before.setdefault(event.before, []).append(event)
    return SimulatedNodes({node.name: node for node in reality.job.cluster.nodes}), agenda, before


def pop_simultaneous(agenda: Agenda[ScheduledNodeEvent]) -> list[ScheduledNodeEvent]:
    """Pops all events of the next moment."""
    found = [agenda.pop()]
    while agenda.next_time() == agenda.now:
        found.append(agenda.pop())
    return found


class ReplanReplay:
    """A simulated run. `on_event` gets every event with its instructions; `progress` the completed share."""

    def __init__(
        self,
        decider: ReplanDecider,
        truth: TrueCosts,
        rules: ReplanRules,
        *,
        on_event: ReplanListener | None = None,
        progress: Callable[[float], None] | None = None,
    ) -> None:
        self._decider, self._truth, self._reality = decider, truth, truth.reality
        self._nodes, self._agenda, self._before = nodes_of(truth.reality)
        self._invariants = ReplanInvariants.of(decider.placed_plan, rules)
        self._saved = 0  # the iteration of the checkpoint that the run resumes from after a loss
        self._next_stage: e.RunMigrationStage | e.RollBackMigration | None = None
        self._plan_lost = False  # processes of the current plan are lost: it must be left, even if the node comes back
        self._iterations_ahead = 0  # iterations already started under the old plan; they end before a migration
        self._pipeline_empty = True  # no work of the next iteration is started yet
        self._on_event, self._progress = on_event, progress
        self._walls: list[float] = []
        self._moves: list[SimulatedMigration] = []
        self._stopped_s = 0.0  # in the current migration
        self._events = 0

    def run(self) -> ReplanOutcome:
        """Runs to the end. Raises InvariantError if an invariant is violated."""
        reality, invariants = self._reality, self._invariants
        first = self._decider.placed_plan.plan.describe()
        self._send_event(e.RunResumed(0, reality.iterations))
        finished = True
        while invariants.counted < reality.iterations:
            happens = self._before.pop(invariants.counted + 1, None)
            if happens:
                self._change(happens)
            elif self._decider.stopped is not None and self._plan_is_usable:
                self._restart()
            elif self._next_stage is not None and not (self._iterations_ahead and self._plan_is_usable):
                self._run_stage()
            elif self._plan_is_usable:
                self._iterate()
            elif not self._wait():
                finished = False
                break
        self._decider.check()
        invariants.check_totals(self._agenda.now, reality.iterations, finished)
        return ReplanOutcome(
            self._agenda.now,
            self._walls,
            self._moves,
            {name: invariants.spent.get(name, 0.0) for name in (TRAINS, MOVES, AGAIN, WAITS)},
            first,
            self._decider.placed_plan.plan.describe(),
            finished,
            invariants.void,
            invariants.decisions,
            self._events,
            invariants.looks,
        )

    # ---- time ----------------------------------------------------------------------------------------------------

    def _spend(self, seconds: float, doing: str) -> bool:
        """Advances time with its events; False if the run lost GPUs it uses, at that moment."""
        began, until = self._agenda.now, self._agenda.now + seconds
        whole = self._advance(until)
        self._invariants.spend(self._agenda.now - began, doing if whole or doing is not TRAINS else AGAIN)
        return whole

    def _advance(self, until: float) -> bool:
        while True:
            at, due = self._agenda.next_time(), self._due()
            if due is not None and due <= until and (at is None or due < at):
                self._agenda.advance_to(due)
                self._send_event(e.ReplanTick())
                if self._due() == due:
                    raise InvariantError(f"a deadline at {due:g} s has passed and is still due")
            elif at is not None and at <= until:
                if self._change(pop_simultaneous(self._agenda)):
                    return False
            else:
                self._agenda.advance_to(until)
                return True

    def _due(self) -> float | None:
        due = self._decider.next_deadline()
        return None if due is None else max(due, self._agenda.now)

    def _wait(self) -> bool:
        """No plan fits: advances to the next event; False if there is none."""
        moments = [time for time in (self._agenda.next_time(), self._due()) if time is not None]
        if not moments:
            return False
        self._spend(min(moments) - self._agenda.now, WAITS)
        return True

    # ---- nodes ---------------------------------------------------------------------------------------------------

    @property
    def _plan_is_usable(self) -> bool:
        return not self._plan_lost and self._decider.placed_plan.on(self._nodes.cluster) is not None

    def _change(self, happens: list[ScheduledNodeEvent]) -> bool:
        """Applies node events; True if the run lost GPUs it uses."""
        before = set(self._nodes.there)
        event = self._nodes.change(happens, self._agenda.now)
        if event is None:
            return False
        for item in happens:  # a draining node is lost at its deadline
            until = self._nodes.leaving.get(item.node.name)
            if item.what == "draining" and until is not None:
                self._agenda.put(until, ScheduledNodeEvent(item.node, "lost"))
        gone = tuple(before - set(self._nodes.there))
        lost = self._uses(gone)
        if lost:
            self._plan_lost = self._plan_lost or self._decider.placed_plan.uses(gone)
            self._restore()
        self._send_event(event)
        if self._decider.stopped is not None and event.why is e.ClusterChangeCause.joined:
            self._send_event(
                e.RunResumed(self._invariants.counted, self._reality.iterations - self._invariants.counted)
            )
        return lost

    def _uses(self, nodes: tuple[str, ...]) -> bool:
        to = self._decider.moving_to
        placed = to is not None and self._invariants.stages > list(MigrationStage).index(MigrationStage.place)
        return self._decider.placed_plan.uses(nodes) or (placed and to is not None and to.uses(nodes))

    def _restore(self) -> None:
        """Processes are lost: the run goes back to its last checkpoint."""
        saved, invariants = self._saved, self._invariants
        again = sum(self._walls[saved:])
        invariants.spend(max(0.0, invariants.spent.pop(TRAINS, 0.0) - again), TRAINS)
        invariants.spend(again, AGAIN)
        del self._walls[saved:]
        invariants.rolled_back_to(saved)
        self._pipeline_empty, self._iterations_ahead = True, 0
        self._send_event(e.RunResumed(saved, self._reality.iterations - saved))

    def _restart(self) -> None:
        """The run was stopped although its GPUs exist: resumes it from its last checkpoint."""
        if self._next_stage is not None:
            self._invariants.rolled_back()
            self._migration_over(self._next_stage, arrived=False)
        self._restore()

    # ---- iterations and migrations -------------------------------------------------------------------------------

    def _iterate(self) -> None:
        number = self._invariants.counted + 1
        self._invariants.iteration_begins(number, self._nodes.cluster)
        iteration = self._truth.measured(self._decider.placed_plan.plan, number, self._pipeline_empty)
        if not self._spend(iteration.wall_s, TRAINS):
            return
        self._walls.append(iteration.wall_s)
        self._invariants.iteration_done(number)
        if not self._reality.save_every or number % self._reality.save_every == 0:
            self._saved = number
        self._pipeline_empty, self._iterations_ahead = False, max(0, self._iterations_ahead - 1)
        self._send_event(e.IterationDone(iteration))
        if self._progress is not None:
            self._progress(number / self._reality.iterations)

    def _run_stage(self) -> None:
        """Runs the next stage of the migration, or the rollback."""
        todo = self._next_stage
        if isinstance(todo, e.RollBackMigration):
            self._roll_back(todo)
            return
        assert todo is not None
        times, seed, move = self._reality.moves, self._reality.seed, todo.move
        # Lost processes have no state to save: they are started from the last checkpoint.
        took = (
            0.0
            if todo.stage is MigrationStage.save and not self._plan_is_usable
            else times.draw(todo.stage, move.id, seed)
        )
        if not self._spend_in(todo, took):
            return  # it has failed in the meantime: the rollback is next
        if times.failing(move.id, seed) is todo.stage:
            self._send_event(e.MigrationStageFailed(move.id, todo.stage, "simulated failure"))
            return
        if self._invariants.stage_done(move):
            self._plan_lost = False
            self._migration_over(todo, arrived=True)
        self._send_event(e.MigrationStageDone(move.id, todo.stage, took))

    def _roll_back(self, todo: e.RollBackMigration) -> None:
        """Restores the old plan: at once if no process was ended yet, or if there is no plan to return to."""
        times, seed, move = self._reality.moves, self._reality.seed, todo.move
        took = 0.0
        if self._plan_is_usable and (MigrationStage.release in todo.done or todo.at is MigrationStage.release):
            took = sum(
                times.draw(stage, move.id, seed)
                for stage in (MigrationStage.place, MigrationStage.load, MigrationStage.resume)
            )
        if not self._spend_in(todo, took):
            return
        self._invariants.rolled_back()
        self._migration_over(todo, arrived=False)
        self._send_event(e.RolledBack(move.id, took))

    def _spend_in(self, todo: e.RunMigrationStage | e.RollBackMigration, took_s: float) -> bool:
        """Spends time in a stage; False if something else is to be done in the end."""
        began = self._agenda.now
        self._spend(took_s, MOVES)
        self._stopped_s += self._agenda.now - began
        return self._next_stage is todo

    def _migration_over(self, todo: e.RunMigrationStage | e.RollBackMigration, *, arrived: bool) -> None:
        move = todo.move
        self._moves.append(
            SimulatedMigration(
                self._invariants.counted,
                move.reason.code.value,
                move.after.describe(),
                move.forced,
                arrived,
                self._stopped_s,
            )
        )
        self._next_stage, self._stopped_s, self._pipeline_empty = None, 0.0, True

    def _send_event(self, event: e.ReplanEvent) -> None:
        """Sends an event, keeps the instructions to execute, and checks the invariants."""
        self._events += 1
        try:
            instructions = self._decider.handle(event, self._agenda.now)
        except InputError as refused:
            raise InvariantError(f"an event of the run is refused: {refused.what}") from refused
        for instruction in instructions:
            if isinstance(instruction, (e.RunMigrationStage, e.RollBackMigration)):
                self._next_stage = instruction
            if isinstance(instruction, e.BeginMigration):
                self._iterations_ahead = self._reality.job.workflow.staleness
        self._invariants.check_instructions(event, instructions, self._decider)
        self._decider.check()
        if self._on_event is not None:
            self._on_event(event, self._agenda.now, instructions)


# ---- oracle -------------------------------------------------------------------------------------------------------


def free_oracle(truth: TrueCosts) -> ReplanOutcome:
    """Knows the true costs and re-plans before every iteration at no cost; loses no work with a node."""
    nodes, agenda, before = nodes_of(truth.reality)
    walls: list[float] = []
    moves: list[SimulatedMigration] = []
    waited = 0.0
    now, placed_plan, first = 0.0, None, ""

    while len(walls) < truth.reality.iterations:
        number = len(walls) + 1
        while (due := agenda.next_time()) is not None and due <= now:
            happens = pop_simultaneous(agenda)
            nodes.change(happens, agenda.now)
            for event in happens:
                if event.what == "draining" and event.node.name in nodes.leaving:
                    agenda.put(nodes.leaving[event.node.name], ScheduledNodeEvent(event.node, "lost"))
        nodes.change(before.pop(number, []), now)
        best = _best(truth, nodes, number)
        if best is None:
            if due is None:
                break
            waited, now = waited + due - now, due
            continue
        if placed_plan is not None and not best.same_as(placed_plan):
            moves.append(SimulatedMigration(number - 1, "FREE", best.plan.describe(), False, True, 0.0))
        placed_plan, first = best, first or best.plan.describe()
        walls.append(truth.seconds(best.plan, number, cold=number == 1))
        now += walls[-1]
    last = placed_plan.plan.describe() if placed_plan is not None else ""
    spent = {TRAINS: sum(walls), MOVES: 0.0, AGAIN: 0.0, WAITS: waited}
    return ReplanOutcome(now, walls, moves, spent, first, last, len(walls) == truth.reality.iterations)


def _best(truth: TrueCosts, nodes: SimulatedNodes, iteration: int) -> PlacedPlan | None:
    try:
        return truth.best(nodes.cluster, iteration)
    except (InfeasibleError, InputError):
        return None
