"""The schedule of least latency under a bottleneck; among equals the one with fewest devices.

Without limits on devices this is a shortest path over cuts and classes. A price on every class (Lagrange multipliers)
turns that path into a lower bound with the limits in force, and also bounds every half-finished schedule. Labels, one
for each cut, class and vector of used devices, are then built cut by cut; those whose bound exceeds a threshold, or
from which the rest cannot be placed, are dropped. The threshold starts at the lower bound and is raised until a
schedule is found under it: every schedule below was kept, so the one found is the best. Prices only decide how much
work there is, never the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.plan.partition_reach import Allowed, Vectors, completable, flags_of
from trimtab.plan.partition_space import TIE, UNLIMITED, Bools, Floats, Ints, Space

PRICE_ROUNDS = 40
FIRST_GAP = 2e-4
"""How far above the lower bound, relatively, the first threshold lies."""

WIDER = 3.0
"""How much wider the gap is made when nothing was found under a threshold."""

MOST_LABELS = 20_000_000
"""Labels after which the search stops and gives what it has, without the proof: some 400 MB."""

BEAM = 64
"""Labels kept at each cut and class where only a good schedule is wanted, not the best."""

Labels = tuple[Ints, Floats]
"""Vectors of used devices, each with the least latency up to here."""

Pieces = tuple[tuple[int, int, int], ...]
"""A schedule: for each stage its first cut, its last cut and its class."""

Known = tuple[float, Pieces]
"""A schedule with its latency."""


class TooManyLabels(Exception):  # noqa: N818 - not a fault: it ends one attempt
    """A threshold lets more labels pass than memory should hold."""


@dataclass(frozen=True)
class Path:
    """A schedule with its latency, and whether it is proven the best."""

    pieces: Pieces
    latency: float
    lower_bound: float
    proven: bool


@dataclass(frozen=True)
class Potentials:
    """Least priced costs: up to a cut with a class about to begin (`ready`) or just ended (`ended`), and from there on.

    Arrays are [class, cut]. `whole` is the least priced cost of a complete path, and `used` its devices.
    """

    prices: Floats
    ready: Floats
    rest_after: Floats
    rest_before: Floats
    whole: float
    used: Ints
    pieces: Pieces


class Paths:
    """Shortest paths of a space in which only what `bottleneck` allows may be used."""

    def __init__(self, space: Space, bottleneck: float) -> None:
        self.space = space
        may = space.fits & (space.seconds <= bottleneck)
        cost = np.where(may, space.seconds, np.inf)
        # Contiguous along what is minimised over: begins for the way forward, ends for the way back.
        self.by_end = np.ascontiguousarray(cost.transpose(2, 0, 1))
        self.by_begin = np.ascontiguousarray(cost.transpose(1, 0, 2))
        any_class: Bools = np.logical_or.reduce(may, axis=0)
        self.first_begin = np.where(any_class.any(axis=0), any_class.argmax(axis=0), np.arange(space.layers + 1))
        reversed_ends = any_class[:, ::-1]
        self.last_end = np.where(any_class.any(axis=1), space.layers - reversed_ends.argmax(axis=1), 0)
        self.cut = np.where(space.cut <= bottleneck, space.cut, np.inf)
        self.enter = np.where(space.enter <= bottleneck, space.enter, np.inf)
        self.leave = np.where(space.leave <= bottleneck, space.leave, np.inf)

    def potentials(self, prices: Floats) -> Potentials:
        """Least priced costs to and from every cut."""
        layers, size = self.space.layers, self.space.classes
        ready = np.full((size, layers + 1), np.inf)
        ended = np.full((size, layers + 1), np.inf)
        ready[:, 0] = self.enter
        for b in range(1, layers + 1):
            a = self.first_begin[b]
            if a < b:
                ended[:, b] = (ready[:, a:b] + self.by_end[b, :, a:b]).min(axis=1) + prices
                if b < layers:
                    ready[:, b] = (ended[:, b, None] + self.cut[b]).min(axis=0)
        rest_after, rest_before = self.rests(prices)
        whole = float((ended[:, layers] + self.leave).min())
        pieces = self.trace(ready, ended) if np.isfinite(whole) else ()
        used = np.bincount([t for _, _, t in pieces], minlength=size)
        return Potentials(prices, ready, rest_after, rest_before, whole, used, pieces)

    def rests(self, prices: Floats) -> tuple[Floats, Floats]:
        """Least priced costs from each cut to the end: after a stage, and before one begins."""
        layers, size = self.space.layers, self.space.classes
        after = np.full((size, layers + 1), np.inf)
        before = np.full((size, layers + 1), np.inf)
        after[:, layers] = self.leave
        for a in range(layers - 1, -1, -1):
            b = self.last_end[a]
            if b > a:
                before[:, a] = (after[:, a + 1 : b + 1] + self.by_begin[a, :, a + 1 : b + 1]).min(axis=1) + prices
                if a > 0:
                    after[:, a] = (before[None, :, a] + self.cut[a]).min(axis=1)
        return after, before

    def trace(self, ready: Floats, ended: Floats) -> Pieces:
        """The stages of the path with the least priced cost."""
        out = []
        b = self.space.layers
        t = int((ended[:, b] + self.leave).argmin())
        while True:
            first = int(self.first_begin[b])
            a = first + int((ready[t, first:b] + self.by_end[b, t, first:b]).argmin())
            out.append((a, b, t))
            if a == 0:
                return tuple(reversed(out))
            b, t = a, int((ended[:, a] + self.cut[a, :, t]).argmin())

    def latency(self, pieces: Pieces) -> float:
        """What a schedule takes from end to end."""
        total = float(self.enter[pieces[0][2]] + self.leave[pieces[-1][2]])
        for index, (a, b, t) in enumerate(pieces):
            total += float(self.by_end[b, t, a])
            if index + 1 < len(pieces):
                total += float(self.cut[b, t, pieces[index + 1][2]])
        return total


def least_latency(space: Space, vectors: Vectors, bottleneck: float, may: Allowed) -> Path | None:
    """The best schedule among those whose bottleneck is at most this; `None` where there is none."""
    paths = Paths(space, bottleneck)
    free = paths.potentials(np.zeros(space.classes))
    if not np.isfinite(free.whole):
        return None
    can_finish = None
    known: Known | None = None
    best, bound = free, free.whole
    if (free.used <= np.array(space.counts)).all() and free.used.sum() <= space.most_devices:
        known = (paths.latency(free.pieces), free.pieces)
    else:
        can_finish = completable(space, vectors, may)
        if not any(can_finish[0]):
            return None
        known = LabelSearch(paths, vectors, free, 0.0, can_finish, np.inf, BEAM).run()
        assert known is not None
        best, bound, known = _price(paths, free, known)
        beam = LabelSearch(paths, vectors, best, best.whole - bound, can_finish, np.inf, BEAM).run()
        assert beam is not None
        known = min(known, beam)
    gap = FIRST_GAP * bound
    while True:
        ceiling = known[0] * (1 + 2 * TIE)
        threshold = ceiling if ceiling <= bound + WIDER * gap else bound + gap
        try:
            found = LabelSearch(paths, vectors, best, best.whole - bound, can_finish, threshold).run()
        except TooManyLabels:
            return Path(known[1], known[0], bound, False)
        if found is not None and found[0] * (1 + TIE) <= threshold:
            return Path(found[1], found[0], found[0], True)
        gap *= WIDER


def _price(paths: Paths, free: Potentials, known: Known) -> tuple[Potentials, float, Known]:
    """Good prices, the lower bound they prove, and the best schedule within the limits that is known by then.

    Steps along the excess over the limits, as long as the gap to the known schedule asks for (Polyak's rule).
    """
    space = paths.space
    limits = np.array([*space.counts, space.most_devices], dtype=np.float64)
    best, bound, now = free, free.whole, free
    # The last price is for all devices together.
    prices = np.zeros(space.classes + 1)
    step, stuck = 1.0, 0
    for _ in range(PRICE_ROUNDS):
        over = np.append(now.used, now.used.sum()) - limits
        value = now.whole - float(prices @ limits)
        stuck += 1
        if value > bound:
            best, bound, stuck = now, value, 0
        if (over <= 0).all():
            known = min(known, (paths.latency(now.pieces), now.pieces))
        if known[0] <= bound * (1 + TIE) or not over.any():
            break
        if stuck >= 3:
            step, stuck = step / 2, 0
        prices = np.maximum(prices + step * (known[0] - value) / float(over @ over) * over, 0.0)
        now = paths.potentials(prices[:-1] + prices[-1])
    return best, bound, known


class LabelSearch:
    """One pass over the cuts that keeps every label whose bound is at most the threshold.

    `ended[b][t]` holds the labels of schedules whose last stage ends at cut b on class t, `ready[a][t]` those about to
    begin one. `refund` is what the prices of all the devices there are come to: a bound is cost plus prices less that.
    """

    def __init__(
        self,
        paths: Paths,
        vectors: Vectors,
        potentials: Potentials,
        refund: float,
        can_finish: list[list[int]] | None,
        threshold: float,
        most: int | None = None,
    ) -> None:
        self.paths, self.space, self.vectors, self.potentials = paths, paths.space, vectors, potentials
        self.limit = threshold + refund
        # Rounding must not drop a label that lies on the threshold.
        self.limit += 1e-12 * abs(self.limit) if np.isfinite(self.limit) else 0.0
        self.can_finish, self.most = can_finish, most
        self.priced = np.zeros(vectors.size)
        digits = [np.arange(count + 1) for count in self.space.counts]
        for t in range(self.space.classes):
            shape = [1] * self.space.classes
            shape[-1 - t] = -1
            grid = self.priced.reshape([len(d) for d in reversed(digits)])
            grid += (digits[t] * potentials.prices[t]).reshape(shape)
        self.may_grow = [
            np.unpackbits(flags_of(bits, vectors.size), count=vectors.size, bitorder="little").view(np.bool_)
            for bits in vectors.growing
        ]
        self.least = np.full(vectors.size, np.inf)
        self.marked = np.zeros(vectors.size, dtype=np.bool_)
        nothing: Labels = (np.zeros(0, dtype=np.int64), np.zeros(0))
        self.ended = [[nothing] * self.space.classes for _ in range(self.space.layers + 1)]
        self.ready = [[nothing] * self.space.classes for _ in range(self.space.layers + 1)]
        self.held = 0

    def run(self) -> Known | None:
        """The least latency of a complete schedule that was kept, and the schedule."""
        space, classes = self.space, range(self.space.classes)
        starts = self.promising()
        for t in classes:
            if self.vectors.growing[t] & 1 and np.isfinite(self.paths.enter[t]):
                self.ready[0][t] = (np.zeros(1, dtype=np.int64), np.array([self.paths.enter[t]]))
        for b in range(1, space.layers + 1):
            for t in classes:
                stride = self.vectors.strides[t]
                pieces = [
                    (codes + stride, costs + self.paths.by_end[b, t, a])
                    for a in starts[t][b]
                    for codes, costs in (self.ready[a][t],)
                    if len(codes)
                ]
                if pieces:
                    self.ended[b][t] = self.kept(self.merged(pieces), self.potentials.rest_after[t, b], b, t)
            if b < space.layers:
                for t in classes:
                    self.ready[b][t] = self.beginning(b, t)
        return self.best()

    def promising(self) -> list[list[list[int]]]:
        """For each class and cut, where a stage that ends there may have begun without exceeding the threshold."""
        out = []
        found = self.potentials
        for t in range(self.space.classes):
            bound = self.paths.by_end[:, t, :] + found.ready[t][None, :] + found.rest_after[t][:, None]
            ends, begins = np.nonzero(bound + found.prices[t] <= min(self.limit, UNLIMITED))
            at = np.searchsorted(ends, np.arange(self.space.layers + 2)).tolist()
            listed = begins.tolist()
            out.append([listed[at[b] : at[b + 1]] for b in range(self.space.layers + 1)])
        return out

    def beginning(self, b: int, t: int) -> Labels:
        """Labels at cut b to which a stage on class t may be added."""
        pieces = []
        rest = self.potentials.rest_before[t, b]
        for u in range(self.space.classes):
            codes, costs = self.ended[b][u]
            over = self.paths.cut[b, u, t]
            if not len(codes) or not np.isfinite(over + rest):
                continue
            keep = self.may_grow[t][codes] & (costs + self.priced[codes] <= self.limit - over - rest)
            if keep.any():
                pieces.append((codes[keep], costs[keep] + over))
        if not pieces:
            return self.ready[b][t]
        labels = self.merged(pieces)
        self.count(len(labels[0]))
        return labels

    def kept(self, labels: Labels, rest: float, b: int, t: int) -> Labels:
        """Those labels whose bound is within the threshold and from which the rest can be placed."""
        codes, costs = labels
        bound = costs + self.priced[codes]
        keep = bound <= self.limit - rest
        if self.can_finish is not None:
            flags = flags_of(self.can_finish[b][t], self.vectors.size)
            keep &= (flags[codes >> 3] >> (codes & 7) & 1) != 0
        if self.most is not None and int(keep.sum()) > self.most:
            at = np.flatnonzero(keep)
            keep[np.delete(at, np.argpartition(bound[at], self.most)[: self.most])] = False
        labels = codes[keep], costs[keep]
        self.count(len(labels[0]))
        return labels

    def count(self, more: int) -> None:
        """Give up where memory would run out."""
        self.held += more
        if self.held > MOST_LABELS:
            raise TooManyLabels

    def merged(self, pieces: list[Labels]) -> Labels:
        """The least cost of every vector, vectors in order."""
        if len(pieces) == 1:
            return pieces[0]
        for codes, costs in pieces:
            self.least[codes] = np.minimum(self.least[codes], costs)
            self.marked[codes] = True
        low = min(int(codes[0]) for codes, _ in pieces)
        high = max(int(codes[-1]) for codes, _ in pieces) + 1
        codes = np.flatnonzero(self.marked[low:high]) + low
        costs = self.least[codes]
        self.least[codes] = np.inf
        self.marked[codes] = False
        return codes, costs

    def best(self) -> Known | None:
        """The complete schedule of least latency; among equals the one with fewest devices."""
        layers = self.space.layers
        finals = [
            (float(cost), int(self.vectors.totals[code]), t, int(code))
            for t in range(self.space.classes)
            for code, cost in zip(*self.ended[layers][t], strict=True)
            for cost in (cost + self.paths.leave[t],)
        ]
        if not finals:
            return None
        least = min(cost for cost, *_ in finals)
        latency, _, t, code = min(
            (final for final in finals if final[0] <= least * (1 + TIE)), key=lambda final: (final[1], final[0])
        )
        return latency, self.trace(t, code)

    def trace(self, t: int, code: int) -> Pieces:
        """The stages that led to a label: at each step back the predecessor that costs least."""
        out = []
        b = self.space.layers
        while True:
            before = code - self.vectors.strides[t]
            begins = range(int(self.paths.first_begin[b]), b)
            a = min(begins, key=lambda a: _cost_of(self.ready[a][t], before) + self.paths.by_end[b, t, a])
            out.append((a, b, t))
            if a == 0:
                return tuple(reversed(out))
            b, code = a, before
            t = min(
                range(self.space.classes),
                key=lambda u: _cost_of(self.ended[b][u], code) + self.paths.cut[b, u, t],
            )


def _cost_of(labels: Labels, code: int) -> float:
    codes, costs = labels
    at = int(np.searchsorted(codes, code))
    return float(costs[at]) if at < len(codes) and codes[at] == code else np.inf
