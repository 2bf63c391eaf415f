"""The schedule of minimum latency under a bottleneck; among equals the one with fewest devices.

Without limits on devices this is a shortest path over cuts and classes. A price on every class (Lagrange multipliers)
turns that path into a lower bound under the limits, and also bounds every partial schedule. Labels, one for each cut,
class and vector of used devices, are built cut by cut; those whose bound exceeds a threshold, or from which the rest
cannot be placed, are dropped. The threshold starts at the lower bound and is raised until a schedule is found under it:
all better ones were kept, so the result is optimal. Where few labels can be completed, prices are not needed. They only
affect the amount of work, never the answer.
"""

from __future__ import annotations

import numpy as np

from trimtab.core.frozen import Frozen
from trimtab.plan.partition.space import (
    TIE,
    UNLIMITED,
    AllowedCuts,
    Bools,
    DeviceVectors,
    Floats,
    Ints,
    PartitionSpace,
    completable,
    flags_of,
)

PRICE_ROUNDS = 48
FIRST_PRICE, FASTER = 0.1, 1.6
"""First step of a price, as a part of what a stage costs; and how steps grow."""

GAPS = (1 / 16, 1 / 4, 1 / 2, 1.0)
"""Thresholds to try, as parts of the gap between the lower bound and the best schedule known."""

FEW_LABELS = 60_000
"""Up to this many labels are searched without prices."""

MAX_LABELS = 20_000_000
"""Labels after which the search stops without a proof: about 400 MB."""

FEW_TO_COMPARE = 64
"""Fewer labels than this are not compared with each other."""

BEAM = 64
"""Labels kept at each cut and class in a beam search."""

PathLabels = tuple[Ints, Floats]
"""Vectors of used devices, each with the least latency up to here."""

Pieces = tuple[tuple[int, int, int], ...]
"""A schedule: for each stage its first cut, its last cut and its class."""

KnownPath = tuple[float, Pieces]
"""A schedule with its latency."""


class TooManyLabels(Exception):  # noqa: N818 - control flow: it ends one attempt
    """A threshold lets more labels pass than memory should hold."""


class LatencyPath(Frozen):
    """A schedule with its latency, and whether it is proven optimal."""

    pieces: Pieces
    latency: float
    lower_bound: float
    proven: bool


class PricedPaths(Frozen):
    """Minimum costs when every device costs its class's price: `ready[class, cut]` before a stage on that class begins.

    `whole` is the minimum of a complete path, `used` its devices by class and `pieces` its stages.
    """

    prices: Floats
    ready: Floats
    whole: float
    used: Ints
    pieces: Pieces


class PathFinder:
    """Shortest paths of a space within a bottleneck."""

    def __init__(self, space: PartitionSpace, bottleneck: float) -> None:
        self.space = space
        may = space.fits & (space.seconds <= bottleneck)
        cost = np.where(may, space.seconds, np.inf)
        # Contiguous along the minimised axis: begins for forward passes, ends for backward passes.
        self.by_end = np.ascontiguousarray(cost.transpose(2, 0, 1))
        self.by_begin = np.ascontiguousarray(cost.transpose(1, 0, 2))
        any_class: Bools = np.logical_or.reduce(may, axis=0)
        begins = np.where(any_class.any(axis=0), any_class.argmax(axis=0), np.arange(space.layers + 1))
        self.first_begin: list[int] = begins.tolist()
        reversed_ends = any_class[:, ::-1]
        ends = np.where(any_class.any(axis=1), space.layers - reversed_ends.argmax(axis=1), 0)
        self.last_end: list[int] = ends.tolist()
        self.cut = np.where(space.cut <= bottleneck, space.cut, np.inf)
        self.enter = np.where(space.enter <= bottleneck, space.enter, np.inf)
        self.leave = np.where(space.leave <= bottleneck, space.leave, np.inf)

    def priced(self, prices: Floats) -> PricedPaths:
        """Minimum priced costs up to every cut, and the cheapest path."""
        layers, size = self.space.layers, self.space.classes
        ready = np.full((size, layers + 1), np.inf)
        ended = np.full((size, layers + 1), np.inf)
        ready[:, 0] = self.enter
        for b, a in enumerate(self.first_begin):
            if a < b:
                now = np.minimum.reduce(ready[:, a:b] + self.by_end[b, :, a:b], axis=1) + prices
                ended[:, b] = now
                if b < layers:
                    ready[:, b] = np.minimum.reduce(now[:, None] + self.cut[b], axis=0)
        whole = float((ended[:, layers] + self.leave).min())
        pieces = self.trace(ready, ended) if np.isfinite(whole) else ()
        used = np.bincount([t for _, _, t in pieces], minlength=size)
        return PricedPaths(prices, ready, whole, used, pieces)

    def rests(self, prices: Floats) -> tuple[Floats, Floats]:
        """Minimum priced costs from each cut to the end: after a stage, and before one begins."""
        layers, size = self.space.layers, self.space.classes
        after = np.full((size, layers + 1), np.inf)
        before = np.full((size, layers + 1), np.inf)
        after[:, layers] = self.leave
        for a in range(layers - 1, -1, -1):
            b = self.last_end[a]
            if b > a:
                ways = after[:, a + 1 : b + 1] + self.by_begin[a, :, a + 1 : b + 1]
                before[:, a] = np.minimum.reduce(ways, axis=1) + prices
                if a > 0:
                    after[:, a] = np.minimum.reduce(before[None, :, a] + self.cut[a], axis=1)
        return after, before

    def trace(self, ready: Floats, ended: Floats) -> Pieces:
        out = []
        b = self.space.layers
        t = int((ended[:, b] + self.leave).argmin())
        while True:
            first = self.first_begin[b]
            a = first + int((ready[t, first:b] + self.by_end[b, t, first:b]).argmin())
            out.append((a, b, t))
            if a == 0:
                return tuple(reversed(out))
            b, t = a, int((ended[:, a] + self.cut[a, :, t]).argmin())

    def latency(self, pieces: Pieces) -> float:
        total = float(self.enter[pieces[0][2]] + self.leave[pieces[-1][2]])
        for index, (a, b, t) in enumerate(pieces):
            total += float(self.by_end[b, t, a])
            if index + 1 < len(pieces):
                total += float(self.cut[b, t, pieces[index + 1][2]])
        return total


def least_latency(
    space: PartitionSpace, vectors: DeviceVectors, bottleneck: float, may: AllowedCuts
) -> LatencyPath | None:
    """The best schedule within the bottleneck; None where there is none."""
    paths = PathFinder(space, bottleneck)
    free = paths.priced(np.zeros(space.classes))
    if not np.isfinite(free.whole):
        return None
    searches = _LabelSearches(paths, vectors)
    if (free.used <= np.array(space.counts)).all() and free.used.sum() <= space.max_devices:
        # No limit binds: only ties are left to compare.
        latency = paths.latency(free.pieces)
        ties = searches.run(free, free.whole, latency * (1 + 2 * TIE), MAX_LABELS)
        return LatencyPath((ties or (latency, free.pieces))[1], latency, latency, ties is not None)
    searches.can_finish = completable(space, vectors, may)
    if not any(searches.can_finish[0]):
        return None
    known = searches.run(free, free.whole, np.inf, FEW_LABELS)
    if known is not None:
        return LatencyPath(known[1], known[0], known[0], True)
    best, bound, known = price(paths, free)
    if known is None or known[0] > bound * (1 + TIE):
        beam = searches.beam(best, bound, BEAM)
        known = beam if known is None else min(known, beam)
    for part in GAPS:
        threshold = bound + part * (known[0] * (1 + 2 * TIE) - bound)
        found = searches.run(best, bound, threshold, MAX_LABELS)
        if searches.gave_up:
            break
        if found is not None and found[0] * (1 + TIE) <= threshold:
            return LatencyPath(found[1], found[0], found[0], True)
    return LatencyPath(known[1], known[0], bound, False)


def price(paths: PathFinder, free: PricedPaths) -> tuple[PricedPaths, float, KnownPath | None]:
    """Good prices, the lower bound they prove, and the best schedule within the limits found on the way.

    Every price has its own step: it grows while the class stays over (or under) its limit, and is halved where that
    turns. On many devices this converges faster than a common step along the excess.
    """
    space = paths.space
    limits = np.array([*space.counts, space.max_devices], dtype=np.float64)
    best, bound, now = free, free.whole, free
    # The last price is for all devices together.
    prices = np.zeros(space.classes + 1)
    steps = np.full(space.classes + 1, FIRST_PRICE * free.whole / len(free.pieces))
    known: KnownPath | None = None
    before = np.zeros(space.classes + 1)
    for _ in range(PRICE_ROUNDS):
        over = np.append(now.used, now.used.sum()) - limits
        value = now.whole - float(prices @ limits)
        if value > bound:
            best, bound = now, value
        if (over <= 0).all():
            met = (paths.latency(now.pieces), now.pieces)
            known = met if known is None else min(known, met)
        if (known is not None and known[0] <= bound * (1 + TIE)) or not over.any():
            break
        turned = np.sign(over) * before
        steps *= np.where(turned > 0, FASTER, np.where(turned < 0, 0.5, 1.0))
        before = np.sign(over)
        prices = np.maximum(prices + before * steps, 0.0)
        now = paths.priced(prices[:-1] + prices[-1])
    return best, bound, known


class _LabelSearches:
    """Passes over one space, with shared data."""

    def __init__(self, paths: PathFinder, vectors: DeviceVectors) -> None:
        self.paths, self.vectors = paths, vectors
        self.can_finish: list[list[int]] | None = None
        self.gave_up = False
        self.may_grow = [
            np.unpackbits(flags_of(bits, vectors.size), count=vectors.size, bitorder="little").view(np.bool_)
            for bits in vectors.growing
        ]
        # Which vectors have a device of each class.
        shape = [count + 1 for count in reversed(paths.space.counts)]
        self.has: list[Bools] = []
        for t, count in enumerate(paths.space.counts):
            along = [1] * len(shape)
            along[-1 - t] = -1
            digit = (np.arange(count + 1) > 0).reshape(along)
            self.has.append(np.ascontiguousarray(np.broadcast_to(digit, shape)).reshape(-1))
        # Empty between uses: all infinite, and all unmarked.
        self.least = np.full(vectors.size, np.inf)
        self.marked = np.zeros(vectors.size, dtype=np.bool_)

    def run(self, priced: PricedPaths, bound: float, threshold: float, max_labels: int) -> KnownPath | None:
        """The best schedule under a threshold, or None: there is none, or (then `gave_up`) too many labels pass."""
        self.gave_up = False
        try:
            return LabelSearch(self, priced, bound, threshold, max_labels).run()
        except TooManyLabels:
            self.gave_up = True
            return None

    def beam(self, priced: PricedPaths, bound: float, width: int) -> KnownPath:
        """A good schedule: only the best labels are kept at every cut and class."""
        found = LabelSearch(self, priced, bound, np.inf, MAX_LABELS, width).run()
        # Kept labels can be completed, so there always is a schedule.
        assert found is not None
        return found


class LabelSearch:
    """A pass over the cuts that keeps every label whose bound is at most the threshold.

    `ended[b][t]` holds the labels of schedules whose last stage ends at cut b on class t, `ready[a][t]` those about to
    begin one. The bound of a label is its cost, plus the prices of its devices and of the rest of the path, less the
    price of all devices available.
    """

    def __init__(
        self,
        shared: _LabelSearches,
        priced: PricedPaths,
        bound: float,
        threshold: float,
        max_labels: int,
        width: int | None = None,
    ) -> None:
        self.shared, self.paths, self.vectors = shared, shared.paths, shared.vectors
        self.space = self.paths.space
        self.from_here, self.max_labels, self.width = priced, max_labels, width
        self.rest_after, self.rest_before = self.paths.rests(priced.prices)
        self.limit = threshold + (priced.whole - bound)
        # Rounding must not drop a label that lies on the threshold.
        self.limit += 1e-12 * abs(self.limit) if np.isfinite(self.limit) else 0.0
        self.prices_of = np.zeros([count + 1 for count in reversed(self.space.counts)])
        for t, count in enumerate(self.space.counts):
            shape = [1] * self.space.classes
            shape[-1 - t] = -1
            self.prices_of += (np.arange(count + 1) * priced.prices[t]).reshape(shape)
        self.prices_of = self.prices_of.reshape(-1)
        nothing: PathLabels = (np.zeros(0, dtype=np.int64), np.zeros(0))
        self.ended = [[nothing] * self.space.classes for _ in range(self.space.layers + 1)]
        self.ready = [[nothing] * self.space.classes for _ in range(self.space.layers + 1)]
        self.held = 0

    def run(self) -> KnownPath | None:
        """The minimum latency of a complete schedule that was kept, and the schedule."""
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
                    self.ended[b][t] = self.kept(self.merged(pieces), self.rest_after[t, b], b, t)
            if b < space.layers:
                for t in classes:
                    self.ready[b][t] = self.beginning(b, t)
        return self.best()

    def promising(self) -> list[list[list[int]]]:
        """For each class and cut, where a stage that ends there may begin without exceeding the threshold."""
        out = []
        found = self.from_here
        for t in range(self.space.classes):
            bound = self.paths.by_end[:, t, :] + found.ready[t][None, :] + self.rest_after[t][:, None]
            ends, begins = np.nonzero(bound + found.prices[t] <= min(self.limit, UNLIMITED))
            at = np.searchsorted(ends, np.arange(self.space.layers + 2)).tolist()
            listed = begins.tolist()
            out.append([listed[at[b] : at[b + 1]] for b in range(self.space.layers + 1)])
        return out

    def beginning(self, b: int, t: int) -> PathLabels:
        """Labels at cut b to which a stage on class t may be added."""
        pieces = []
        rest = self.rest_before[t, b]
        for u in range(self.space.classes):
            codes, costs = self.ended[b][u]
            over = self.paths.cut[b, u, t]
            if not len(codes) or not np.isfinite(over + rest):
                continue
            keep = self.shared.may_grow[t][codes] & (costs + self.prices_of[codes] <= self.limit - over - rest)
            if keep.any():
                pieces.append((codes[keep], costs[keep] + over))
        if not pieces:
            return self.ready[b][t]
        labels = self.merged(pieces)
        self.count(len(labels[0]))
        return labels

    def kept(self, labels: PathLabels, rest: float, b: int, t: int) -> PathLabels:
        """Labels with a bound within the threshold from which the rest can be placed."""
        codes, costs = labels
        bound = costs + self.prices_of[codes]
        keep = bound <= self.limit - rest
        if self.shared.can_finish is not None:
            flags = flags_of(self.shared.can_finish[b][t], self.vectors.size)
            keep &= (flags[codes >> 3] >> (codes & 7) & 1) != 0
        if self.width is not None and int(keep.sum()) > self.width:
            at = np.flatnonzero(keep)
            keep[np.delete(at, np.argpartition(bound[at], self.width)[: self.width])] = False
        labels = self.undominated((codes[keep], costs[keep]))
        self.count(len(labels[0]))
        return labels

    def undominated(self, labels: PathLabels) -> PathLabels:
        """Without labels that another one with one device fewer beats or equals."""
        codes, costs = labels
        if len(codes) < FEW_TO_COMPARE:
            return labels
        least = self.shared.least
        least[codes] = costs
        keep = np.ones(len(codes), dtype=np.bool_)
        for stride, has in zip(self.vectors.strides, self.shared.has, strict=True):
            # A vector without a device of the class has no such predecessor: it is compared with itself.
            fewer = codes - stride * has[codes]
            keep &= (least[fewer] > costs) | (fewer == codes)
        least[codes] = np.inf
        return codes[keep], costs[keep]

    def count(self, more: int) -> None:
        self.held += more
        if self.held > self.max_labels:
            raise TooManyLabels

    def merged(self, pieces: list[PathLabels]) -> PathLabels:
        """The minimum cost of every vector, in vector order."""
        if len(pieces) == 1:
            return pieces[0]
        least, marked = self.shared.least, self.shared.marked
        for codes, costs in pieces:
            least[codes] = np.minimum(least[codes], costs)
            marked[codes] = True
        low = min(int(codes[0]) for codes, _ in pieces)
        high = max(int(codes[-1]) for codes, _ in pieces) + 1
        codes = marked[low:high].nonzero()[0] + low
        costs = least[codes]
        least[codes] = np.inf
        marked[codes] = False
        return codes, costs

    def best(self) -> KnownPath | None:
        """The complete schedule of minimum latency; among equals the one with fewest devices."""
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
        out = []
        b = self.space.layers
        while True:
            before = code - self.vectors.strides[t]
            begins = range(self.paths.first_begin[b], b)
            a = min(begins, key=lambda a: _cost_of(self.ready[a][t], before) + self.paths.by_end[b, t, a])
            out.append((a, b, t))
            if a == 0:
                return tuple(reversed(out))
            b, code = a, before
            t = min(range(self.space.classes), key=lambda u: _cost_of(self.ended[b][u], code) + self.paths.cut[b, u, t])


def _cost_of(labels: PathLabels, code: int) -> float:
    codes, costs = labels
    at = int(np.searchsorted(codes, code))
    return float(costs[at]) if at < len(codes) and codes[at] == code else np.inf
