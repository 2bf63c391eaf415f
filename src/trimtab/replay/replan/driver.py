"""Drives the loop machine, or a policy to compare with, through a simulated RL run: iterations, moves, nodes.

What decides is handed the events that a live run hands it, in the order in which a live run does, and what it says is
carried out in virtual time: the stages of a move take what was drawn, a node that is lost under the plan in place takes
the iteration under way with it and all since the last state, a run for which nothing fits waits for nodes. A run that
was told to stop is resumed when there is a node to run on, as somebody would. Beside it stand books of its own
(`loop_truths`): whatever is untrue ends the run with an error.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trimtab.core.errors import InfeasibleError, InputError
from trimtab.machines.replan import events as e
from trimtab.machines.replan.placed_plan import PlacedPlan
from trimtab.model.run import MigrationStage, ReplanRules
from trimtab.replay.common.agenda import Agenda
from trimtab.replay.pool.invariants import InvariantError
from trimtab.replay.replan.invariants import ReplanDecider, ReplanInvariants
from trimtab.replay.replan.reality import ReplanReality, ScheduledNodeEvent, SimulatedNodes, TrueCosts

TRAINS, MOVES, AGAIN, WAITS = "iterations", "moves", "void", "waiting"
ReplanListener = Callable[[e.ReplanEvent, float, "list[e.ReplanInstruction]"], None]


@dataclass(frozen=True)
class SimulatedMigration:
    """A move that began: after which iteration, why, to what, how it ended, and seconds of standing still."""

    after: int
    code: str
    plan: str
    forced: bool
    arrived: bool
    seconds: float


@dataclass
class ReplanOutcome:
    """A run that is over."""

    total_s: float
    walls_s: list[float]  # of every iteration that counts
    moves: list[SimulatedMigration]
    spent: Mapping[str, float]  # seconds, by what the run did in them
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
    """The nodes at the beginning, what will happen at some time, and what before some iteration."""
    agenda: Agenda[ScheduledNodeEvent] = Agenda()
    before: dict[int, list[ScheduledNodeEvent]] = {}
    for one in reality.happens:
        if one.at_s is not None:
            agenda.put(one.at_s, one)
        elif one.before is not None:
            before.setdefault(one.before, []).append(one)
    return SimulatedNodes({node.name: node for node in reality.job.cluster.nodes}), agenda, before


def together(agenda: Agenda[ScheduledNodeEvent]) -> list[ScheduledNodeEvent]:
    """All that happens at the next moment."""
    found = [agenda.pop()]
    while agenda.first() == agenda.now:
        found.append(agenda.pop())
    return found


@dataclass
class _SavedState:
    """The state that a run goes on from after a loss."""

    every: int
    after: int = 0

    def is_over(self, iteration: int) -> None:
        """An iteration is over; perhaps it was saved."""
        if not self.every or iteration % self.every == 0:
            self.after = iteration


class ReplanReplay:
    """One run. `on_event` hears every event with what was said of it; `progress` how far it is."""

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
        self._books = ReplanInvariants.of(decider.sited, rules)
        self._saved = _SavedState(truth.reality.save_every)
        self._todo: e.RunMigrationStage | e.RollBackMigration | None = None
        self._gone = False  # processes of the plan in place are lost: it has to be left, also if the node comes back
        self._ahead = 0  # iterations that have begun under the old plan, and end before a move
        self._cold = True  # nothing of the next iteration is begun yet
        self._on_event, self._progress = on_event, progress
        self._walls: list[float] = []
        self._moves: list[SimulatedMigration] = []
        self._stood_s = 0.0  # in the move under way
        self._events = 0

    def run(self) -> ReplanOutcome:
        """To its end. InvariantError where anything happens that must not."""
        reality, books = self._reality, self._books
        first = self._decider.sited.plan.describe()
        self._send_event(e.RunResumed(0, reality.iterations))
        finished = True
        while books.counted < reality.iterations:
            happens = self._before.pop(books.counted + 1, None)
            if happens:
                self._change(happens)
            elif self._decider.stopped is not None and self._stands:
                self._restart()
            elif self._todo is not None and not (self._ahead and self._stands):
                self._carry_out()
            elif self._stands:
                self._iterate()
            elif not self._wait():
                finished = False
                break
        self._decider.check()
        books.whole(self._agenda.now, reality.iterations, finished)
        return ReplanOutcome(
            self._agenda.now,
            self._walls,
            self._moves,
            {name: books.spent.get(name, 0.0) for name in (TRAINS, MOVES, AGAIN, WAITS)},
            first,
            self._decider.sited.plan.describe(),
            finished,
            books.void,
            books.decisions,
            self._events,
            books.looks,
        )

    # ---- time passes ---------------------------------------------------------------------------------------------

    def _pass(self, seconds: float, doing: str) -> bool:
        """Let time go by with all that happens in it; False where the run lost GPUs that it sits on, at that moment."""
        began, until = self._agenda.now, self._agenda.now + seconds
        whole = self._go_on(until)
        self._books.passed(self._agenda.now - began, doing if whole or doing is not TRAINS else AGAIN)
        return whole

    def _go_on(self, until: float) -> bool:
        while True:
            at, due = self._agenda.first(), self._due()
            if due is not None and due <= until and (at is None or due < at):
                self._agenda.leap(due)
                self._send_event(e.ReplanTick())
                if self._due() == due:
                    raise InvariantError(f"a deadline at {due:g} s is over and still due")
            elif at is not None and at <= until:
                if self._change(together(self._agenda)):
                    return False
            else:
                self._agenda.leap(until)
                return True

    def _due(self) -> float | None:
        due = self._decider.next_deadline()
        return None if due is None else max(due, self._agenda.now)

    def _wait(self) -> bool:
        """Nothing fits: let time go by until something happens; False where nothing will."""
        moments = [one for one in (self._agenda.first(), self._due()) if one is not None]
        if not moments:
            return False
        self._pass(min(moments) - self._agenda.now, WAITS)
        return True

    # ---- nodes ---------------------------------------------------------------------------------------------------

    @property
    def _stands(self) -> bool:
        return not self._gone and self._decider.sited.on(self._nodes.cluster) is not None

    def _change(self, happens: list[ScheduledNodeEvent]) -> bool:
        """Nodes join, drain or go; True where GPUs went that the run sits on."""
        before = set(self._nodes.there)
        event = self._nodes.change(happens, self._agenda.now)
        if event is None:
            return False
        for one in happens:  # whoever drains is gone at its deadline
            until = self._nodes.leaving.get(one.node.name)
            if one.what == "draining" and until is not None:
                self._agenda.put(until, ScheduledNodeEvent(one.node, "lost"))
        gone = tuple(before - set(self._nodes.there))
        lost = self._sits_on(gone)
        if lost:
            self._gone = self._gone or self._decider.sited.uses(gone)
            self._lose()
        self._send_event(event)
        if self._decider.stopped is not None and event.why is e.ClusterChangeCause.joined:
            self._send_event(e.RunResumed(self._books.counted, self._reality.iterations - self._books.counted))
        return lost

    def _sits_on(self, nodes: tuple[str, ...]) -> bool:
        to = self._decider.moving_to
        placed = to is not None and self._books.stages > list(MigrationStage).index(MigrationStage.place)
        return self._decider.sited.uses(nodes) or (placed and to is not None and to.uses(nodes))

    def _lose(self) -> None:
        """Processes are lost: the run goes back to its last state."""
        saved, books = self._saved.after, self._books
        again = sum(self._walls[saved:])
        books.passed(max(0.0, books.spent.pop(TRAINS, 0.0) - again), TRAINS)
        books.passed(again, AGAIN)
        del self._walls[saved:]
        books.back_to(saved)
        self._cold, self._ahead = True, 0
        self._send_event(e.RunResumed(saved, self._reality.iterations - saved))

    def _restart(self) -> None:
        """The run was told to stop though its GPUs are there: somebody resumes it from its last state."""
        if self._todo is not None:
            self._books.rolled_back()
            self._over(self._todo, arrived=False)
        self._lose()

    # ---- iterations and moves ------------------------------------------------------------------------------------

    def _iterate(self) -> None:
        number = self._books.counted + 1
        self._books.iterates(number, self._nodes.cluster)
        one = self._truth.measured(self._decider.sited.plan, number, self._cold)
        if not self._pass(one.wall_s, TRAINS):
            return
        self._walls.append(one.wall_s)
        self._books.done(number)
        self._saved.is_over(number)
        self._cold, self._ahead = False, max(0, self._ahead - 1)
        self._send_event(e.IterationDone(one))
        if self._progress is not None:
            self._progress(number / self._reality.iterations)

    def _carry_out(self) -> None:
        """The next stage of the move, or the way back."""
        todo = self._todo
        if isinstance(todo, e.RollBackMigration):
            self._undo(todo)
            return
        assert todo is not None
        times, seed, move = self._reality.moves, self._reality.seed, todo.move
        # Whose processes are gone has nothing to save: they are made anew from the last state.
        took = 0.0 if todo.stage is MigrationStage.save and not self._stands else times.draw(todo.stage, move.id, seed)
        began = self._agenda.now
        self._pass(took, MOVES)
        self._stood_s += self._agenda.now - began
        if self._todo is not todo:
            return  # it has failed meanwhile, and the way back is next
        if times.failing(move.id, seed) is todo.stage:
            self._send_event(e.MigrationStageFailed(move.id, todo.stage, "it fails in this simulation"))
            return
        if self._books.stage_done(move):
            self._gone = False
            self._over(todo, arrived=True)
        self._send_event(e.MigrationStageDone(move.id, todo.stage, took))

    def _undo(self, todo: e.RollBackMigration) -> None:
        """The old plan comes back: at once where nobody was ended yet, or where there is nothing to come back to."""
        times, seed, move = self._reality.moves, self._reality.seed, todo.move
        took = 0.0
        if self._stands and (MigrationStage.release in todo.done or todo.at is MigrationStage.release):
            took = sum(
                times.draw(stage, move.id, seed)
                for stage in (MigrationStage.place, MigrationStage.load, MigrationStage.resume)
            )
        began = self._agenda.now
        self._pass(took, MOVES)
        self._stood_s += self._agenda.now - began
        if self._todo is not todo:
            return
        self._books.rolled_back()
        self._over(todo, arrived=False)
        self._send_event(e.RolledBack(move.id, took))

    def _over(self, todo: e.RunMigrationStage | e.RollBackMigration, *, arrived: bool) -> None:
        move = todo.move
        self._moves.append(
            SimulatedMigration(
                self._books.counted,
                move.reason.code.value,
                move.after.describe(),
                move.forced,
                arrived,
                self._stood_s,
            )
        )
        self._todo, self._stood_s, self._cold = None, 0.0, True

    def _send_event(self, event: e.ReplanEvent) -> None:
        """Hand an event over, keep what is to be done about it, and look whether all is true."""
        self._events += 1
        try:
            said = self._decider.handle(event, self._agenda.now)
        except InputError as refused:
            raise InvariantError(f"the run's own event is refused: {refused.what}") from refused
        for one in said:
            if isinstance(one, (e.RunMigrationStage, e.RollBackMigration)):
                self._todo = one
            if isinstance(one, e.BeginMigration):
                self._ahead = self._reality.job.workflow.staleness
        self._books.heard(event, said, self._decider)
        self._decider.check()
        if self._on_event is not None:
            self._on_event(event, self._agenda.now, said)


# ---- the oracle ---------------------------------------------------------------------------------------------------


def free_oracle(truth: TrueCosts) -> ReplanOutcome:
    """It knows the true costs and re-plans before every iteration for nothing; with a node it loses no work."""
    nodes, agenda, before = nodes_of(truth.reality)
    walls: list[float] = []
    moves: list[SimulatedMigration] = []
    waited = 0.0
    now, sited, first = 0.0, None, ""

    def until(at: float) -> None:
        while (due := agenda.first()) is not None and due <= at:
            _heed(nodes, agenda)

    while len(walls) < truth.reality.iterations:
        number = len(walls) + 1
        until(now)
        nodes.change(before.pop(number, []), now)
        best = _best(truth, nodes, number)
        if best is None:
            due = agenda.first()
            if due is None:
                break
            waited, now = waited + due - now, due
            continue
        if sited is not None and not best.same_as(sited):
            moves.append(SimulatedMigration(number - 1, "FREE", best.plan.describe(), False, True, 0.0))
        sited, first = best, first or best.plan.describe()
        walls.append(truth.seconds(best.plan, number, cold=number == 1))
        now += walls[-1]
    last = sited.plan.describe() if sited is not None else ""
    spent = {TRAINS: sum(walls), MOVES: 0.0, AGAIN: 0.0, WAITS: waited}
    return ReplanOutcome(now, walls, moves, spent, first, last, len(walls) == truth.reality.iterations)


def _heed(nodes: SimulatedNodes, agenda: Agenda[ScheduledNodeEvent]) -> None:
    happens = together(agenda)
    nodes.change(happens, agenda.now)
    for one in happens:
        if one.what == "draining" and one.node.name in nodes.leaving:
            agenda.put(nodes.leaving[one.node.name], ScheduledNodeEvent(one.node, "lost"))


def _best(truth: TrueCosts, nodes: SimulatedNodes, iteration: int) -> PlacedPlan | None:
    try:
        return truth.best(nodes.cluster, iteration)
    except (InfeasibleError, InputError):
        return None
