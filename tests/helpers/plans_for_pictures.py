"""Plans made by hand, for tests of what is drawn: bars are stated, the rest of a plan follows from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from trimtab.model.plan import (
    Alternative,
    BarKind,
    ComponentGroup,
    PlacedComponent,
    PlacementAnswer,
    Plan,
    Sensitivity,
    TimelineBar,
)

Piece = tuple[str, BarKind, float, float]


def make_plan(
    groups: Sequence[tuple[Sequence[str], int]],
    pieces: Iterable[Piece],
    *,
    cpu: Sequence[str] = (),
    total_gpus: int | None = None,
    period: float | None = None,
    kinds: Mapping[int, str] | None = None,
    variants: Mapping[str, str] | None = None,
    extrapolated: Sequence[str] = (),
    computes_on: Mapping[str, int] | None = None,
) -> Plan:
    timeline = tuple(TimelineBar(*piece) for piece in pieces)
    seconds = max((bar.end for bar in timeline), default=0.0)
    placed_groups: list[ComponentGroup] = []
    first = 0
    for index, (names, count) in enumerate(groups):
        placed_groups.append(
            ComponentGroup(tuple(names), tuple(range(first, first + count)), (kinds or {}).get(index, ""))
        )
        first += count

    def idle(names: Sequence[str]) -> float:
        busy = sum(bar.end - bar.start for bar in timeline if bar.component in names)
        return max(0.0, 1 - busy / seconds) if seconds else 0.0

    def component(name: str, gpus: tuple[int, ...], names: Sequence[str]) -> PlacedComponent:
        bars = [bar for bar in timeline if bar.component == name]
        return PlacedComponent(
            name,
            gpus[: (computes_on or {}).get(name, len(gpus))],
            (variants or {}).get(name, ""),
            sum(bar.end - bar.start for bar in bars if bar.doing == "run"),
            min((bar.start for bar in bars), default=0.0),
            max((bar.end for bar in bars), default=0.0),
            idle(names),
            name in extrapolated,
            sum(bar.end - bar.start for bar in bars if bar.doing == "switch"),
        )

    components = [component(name, group.gpus, group.components) for group in placed_groups for name in group.components]
    components += [component(name, (), (name,)) for name in cpu]
    all_gpus = total_gpus if total_gpus is not None else first
    busy_gpus = sum(len(group.gpus) * (1 - idle(group.components)) for group in placed_groups)
    return Plan(
        tuple(placed_groups),
        tuple(components),
        seconds if period is None else period,
        sum((bar.end - bar.start for bar in timeline if bar.doing == "sync"), 0.0),
        "collocated" if len(groups) == 1 else "hybrid" if any(len(g[0]) > 1 for g in groups) else "disaggregated",
        timeline,
        seconds,
        1 - busy_gpus / all_gpus if all_gpus else 0.0,
        all_gpus,
    )


def chain(*steps: tuple[str, BarKind, float], start: float = 0.0) -> list[Piece]:
    """Pieces one after another."""
    out: list[Piece] = []
    for name, doing, seconds in steps:
        out.append((name, doing, start, start + seconds))
        start += seconds
    return out


def shared() -> Plan:
    return make_plan(
        [(("rollout", "inference", "trainer"), 16)],
        [
            *chain(("rollout", "switch", 2.0), ("rollout", "run", 59.9), ("inference", "switch", 2.0)),
            *chain(("inference", "run", 30.8), ("trainer", "run", 95.7), ("trainer", "sync", 1.0), start=63.9),
            ("reward", "run", 61.9, 64.9),
        ],
        cpu=["reward"],
        variants={"trainer": "tp2"},
    )


def hybrid() -> Plan:
    return make_plan(
        [(("rollout",), 6), (("inference", "trainer"), 10)],
        [
            ("rollout", "run", 0.0, 84.2),
            ("inference", "switch", 0.0, 2.0),
            ("inference", "run", 21.0, 88.4),
            ("trainer", "switch", 88.4, 90.4),
            ("trainer", "run", 90.4, 166.3),
            ("trainer", "sync", 166.3, 170.3),
            ("rollout", "sync", 166.3, 170.3),
            *[("reward", "run", 10.0 + 8 * i, 10.4 + 8 * i) for i in range(10)],
        ],
        cpu=["reward"],
        kinds={0: "H20", 1: "H100"},
        variants={"trainer": "tp2"},
        extrapolated=["rollout"],
        computes_on={"trainer": 8},
    )


def separate(batches: int = 64) -> Plan:
    """Streams batch by batch: the trainer waits for most of them, so its row has a gap after each."""
    step = 230.0 / batches
    streamed: list[Piece] = [("rollout", "run", 0.0, 230.0)]
    streamed += [("inference", "run", (b + 1) * step, (b + 1) * step + 0.35 * step) for b in range(batches)]
    streamed += [("trainer", "run", (b + 1) * step + 0.4 * step, (b + 1) * step + step) for b in range(batches)]
    end = streamed[-1][3]
    return make_plan(
        [(("rollout",), 4), (("inference",), 4), (("trainer",), 6)],
        [*streamed, ("trainer", "sync", end, end + 4.0), ("rollout", "sync", end, end + 4.0)],
        total_gpus=16,
    )


def unlimited() -> Plan:
    return make_plan(
        [(("rollout", "trainer"), 12), (("inference",), 4)],
        [
            *chain(("rollout", "switch", 2.0), ("rollout", "run", 66.0), ("trainer", "switch", 2.0)),
            *chain(("trainer", "run", 81.4), ("trainer", "sync", 1.0), start=70.0),
            *[("inference", "run", 9.0 + 8 * b, 9.0 + 8 * b + 7.2) for b in range(8)],
            *[("reward", "run", 10.0 + 8 * b, 10.4 + 8 * b) for b in range(8)],
        ],
        cpu=["reward"],
    )


def stale(period: float = 110.0) -> Plan:
    pieces: list[Piece] = []
    for i in range(3):
        at = i * period
        pieces += chain(("rollout", "run", 96.0), ("rollout", "sync", 4.0), start=at)
        pieces += chain(("trainer", "sync", 4.0), ("trainer", "run", 104.0), start=at)
    return make_plan([(("rollout",), 8), (("trainer",), 8)], pieces, period=period)


def eight_components() -> Plan:
    names = ("rollout", "environment", "teacher", "reference", "critic", "inference", "reward model", "trainer")
    return make_plan(
        [(names[:3], 24), (names[3:6], 8), (names[6:], 32)],
        [
            *chain(*((name, "run", 300.0 + 40 * i) for i, name in enumerate(names[:3]))),
            *chain(*((name, "run", 90.0) for name in names[3:6]), start=700.0),
            *chain(("reward model", "switch", 8.0), ("reward model", "run", 150.0), start=800.0),
            *chain(("trainer", "switch", 8.0), ("trainer", "run", 700.0), start=1030.0),
        ],
    )


HOSTILE = "<script>alert(\"x\")</script> & 'q' 東京の長い名前のコンポーネント 🚀🧪 \x00\x1b\ud800\u202e"


def hostile() -> Plan:
    """Names that nobody should choose."""
    long = "a_component_whose_name_goes_on_and_on_" * 4
    return make_plan(
        [((HOSTILE, long), 3), (("]]>",), 1)], chain((HOSTILE, "run", 3), (long, "run", 20), ("]]>", "run", 1))
    )


def full_answer() -> PlacementAnswer:
    return PlacementAnswer(
        hybrid(),
        170.3,
        True,
        48_210,
        alternatives=(
            Alternative(
                "all shared", shared(), "inference and training wait for the slowest answers; nothing overlaps"
            ),
            Alternative("best all separate", separate(), "rollout on 4 GPUs is the bottleneck; trainer idles 46 %"),
            Alternative("your placement", eight_components(), "it gives rollout 24 GPUs, which it cannot use"),
            Alternative("all separate, tp4", None, "trainer needs 92 GB on each of 4 GPUs, and an H100 has 80 GB"),
        ),
        near_ties=(shared(),),
        sensitivity=(
            Sensitivity("rollout", 0.8, 1.25, "rollout, inference, trainer 16", "rollout 8 | inference, trainer 8"),
            Sensitivity("inference", None, 1.6, None, "rollout 6 | inference 4 | trainer 6"),
            Sensitivity("trainer", 0.95, None, "rollout 7 | inference, trainer 9", None),
            Sensitivity("reward", None, None),
        ),
        assumptions=(
            "batches stream from rollout to inference one at a time",
            "trainer waits for whole mini-batches of 128",
            "rollout on 6 GPUs lies below the smallest measured count (16): its time is extrapolated",
        ),
        unrestricted=unlimited(),
    )


BLOCK = """cluster:
  component_placement:
    rollout: "0-5"
    reward: "0-5"
    inference,actor: "6-15"
"""
