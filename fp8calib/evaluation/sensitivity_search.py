"""The fewest layers to leave in 16 bit, by a cheap estimate first and by measuring in the end.

1. The whole FP8 cache is measured on all texts.
2. Each layer alone is put into FP8, on a few texts: its KL is the estimate of what it costs. (Alone
   in FP8, not alone exempt: beside a layer that breaks the model nothing else would show.)
3. Layers are exempt in the order of that cost per byte. The smallest number that keeps to the
   budget is found by bisection, each step measured on all texts; then each chosen layer is given
   back if the budget holds without it.
4. The same with K and V of the chosen layers one by one, which only this runtime can serve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from fp8calib.errors import UserError
from fp8calib.evaluation.sensitivity_measure import Exemption, Loss, Measurements
from fp8calib.layers import LayerSpec

_ALWAYS_SPLIT = 3  # layers whose K and V are measured apart even when no layer need be exempt
_MOST_GIVEN_BACK = 8
KV = ("k", "v")


@dataclass(frozen=True)
class Budget:
    """What the cache may cost: mean KL per token in nats, or bytes relative to the native cache."""

    kl: float | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.kl is None) == (self.share is None):
            raise UserError("give one budget: --budget-kl or --keep-bytes")
        if self.kl is not None and not 0 < self.kl < math.inf:
            raise UserError(f"--budget-kl must be above 0, got {self.kl:g}")


@dataclass(frozen=True)
class Point:
    """A cache that was measured: what stays native, its bytes relative to native, its loss."""

    exempt: Exemption
    share: float
    loss: Loss


@dataclass
class Search:
    """One search; its fields fill up as it goes on, so that an interrupted one can be shown.

    alone: loss of each layer alone in FP8, on the first `few` texts; parts: the same of K and V
    apart; points: everything measured on all texts; proposal: whole layers, as vLLM can serve them;
    split: K or V of layers, where that needs fewer bytes.
    """

    measurements: Measurements
    layers: Sequence[LayerSpec]  # those with a cache of their own
    budget: Budget
    few: int
    alone: dict[int, Loss] = field(default_factory=dict)
    parts: dict[tuple[int, str], Loss] = field(default_factory=dict)
    points: list[Point] = field(default_factory=list)
    proposal: Point | None = None
    split: Point | None = None

    def run(self) -> None:
        if self.budget.share is not None:
            self._check_share(self.budget.share)
        (whole,) = self._measure([Exemption()], "everything in FP8")
        self._measure_alone()
        order = self.order()
        prefixes = [2**i for i in range(len(order)) if 2**i < len(order)]
        self._measure([Exemption(frozenset(order[:n])) for n in prefixes], "the curve")
        if self.budget.share is not None:
            self.proposal = self._largest(order)
        elif self._keeps(whole):
            self.proposal = whole
        else:
            self.proposal = self._give_back(self._smallest(order))
        self._measure_parts(order)
        self.split = self._split()

    def order(self) -> list[int]:
        """Layers by what they cost alone for a byte saved, the costliest first."""
        size = {
            layer.index: layer.num_kv_heads * (layer.head_dim + layer.v_head_dim)
            for layer in self.layers
        }
        known = [layer.index for layer in self.layers if layer.index in self.alone]
        return sorted(known, key=lambda i: (-self.alone[i].kl.value / size[i], i))

    def curve(self) -> list[Point]:
        """What was measured with whole layers, by bytes; of equally large ones the best."""
        found: dict[float, Point] = {}
        for point in self.points:
            rival = found.get(point.share)
            whole = not (point.exempt.k or point.exempt.v)
            if whole and (rival is None or point.loss.kl.value < rival.loss.kl.value):
                found[point.share] = point
        return [found[share] for share in sorted(found)]

    def _measure(self, exemptions: Sequence[Exemption], what: str) -> list[Point]:
        losses = self.measurements.measure(exemptions, what)
        found = [
            Point(exempt, self.measurements.share(exempt), loss)
            for exempt, loss in zip(exemptions, losses, strict=True)
        ]
        self.points += [point for point in found if point not in self.points]
        return found

    def _measure_alone(self) -> None:
        every = frozenset(layer.index for layer in self.layers)
        indices = sorted(every)
        exemptions = [Exemption(every - {index}) for index in indices]
        self._few_at_a_time(exemptions, indices, "each layer alone", self.alone)

    def _measure_parts(self, order: Sequence[int]) -> None:
        """K and V alone of the layers that matter."""
        assert self.proposal is not None
        chosen = self.proposal.exempt.layers
        every = frozenset(layer.index for layer in self.layers)
        wanted = list(dict.fromkeys([*(i for i in order if i in chosen), *order[:_ALWAYS_SPLIT]]))
        keys = [(index, kind) for index in wanted for kind in KV]
        exemptions = [
            Exemption(
                every - {index},
                frozenset() if kind == "k" else frozenset({index}),
                frozenset() if kind == "v" else frozenset({index}),
            )
            for index, kind in keys
        ]
        self._few_at_a_time(exemptions, keys, "K and V apart", self.parts)

    def _few_at_a_time(self, exemptions: list, keys: list, what: str, into: dict) -> None:
        """Measure on the first texts; what an interruption leaves stays in `into`."""
        try:
            self.measurements.measure(exemptions, what, self.few)
        finally:
            for key, exempt in zip(keys, exemptions, strict=True):
                if self.measurements.known(exempt, self.few):
                    into[key] = self.measurements.measure([exempt], what, self.few)[0]

    def _keeps(self, point: Point) -> bool:
        if self.budget.kl is not None:
            return point.loss.kl.value <= self.budget.kl
        assert self.budget.share is not None
        return point.share <= self.budget.share + 1e-9

    def _smallest(self, order: Sequence[int]) -> Point:
        points = {point.exempt: point for point in self.points}
        return self._bisect(
            [Exemption(frozenset(order[:n])) for n in range(len(order) + 1)],
            lambda exempt: points.get(exempt) or self._measure([exempt], str(exempt))[0],
        )

    def _bisect(
        self, exemptions: Sequence[Exemption], measured: Callable[[Exemption], Point]
    ) -> Point:
        """The first of exemptions, each larger than the one before, that keeps to the budget; the
        last one does, the first does not."""
        known = {point.exempt for point in self.points}
        low, high = 0, len(exemptions) - 1
        for n, exempt in enumerate(exemptions):
            if exempt in known and low < n < high:
                low, high = (low, n) if self._keeps(measured(exempt)) else (n, high)
        while high - low > 1:
            middle = (low + high) // 2
            keeps = self._keeps(measured(exemptions[middle]))
            low, high = (low, middle) if keeps else (middle, high)
        return measured(exemptions[high])

    def _give_back(self, point: Point) -> Point:
        """Put layers back into FP8, the cheapest first, where the budget allows it."""
        order = [index for index in reversed(self.order()) if index in point.exempt.layers]
        # without the last one the budget was just found not to hold
        for index in order[1 : _MOST_GIVEN_BACK + 1]:
            rest = Exemption(point.exempt.layers - {index})
            (trial,) = self._measure([rest], f"without layer {index}")
            if self._keeps(trial):
                point = trial
        return point

    def _check_share(self, share: float) -> None:
        smallest = self.measurements.share(Exemption())
        if not smallest <= share <= 1:
            raise UserError(
                f"--keep-bytes must be from {100 * smallest:g} (everything in FP8) to 100 (nothing "
                f"is), got {100 * share:g}"
            )

    def _largest(self, order: Sequence[int]) -> Point:
        """As many layers as fit into the bytes allowed, the costliest first."""
        chosen = Exemption()
        for index in order:
            more = Exemption(chosen.layers | {index})
            chosen = more if self._fits(more) else chosen
        return self._measure([chosen], str(chosen))[0]

    def _fits(self, exempt: Exemption) -> bool:
        assert self.budget.share is not None
        return self.measurements.share(exempt) <= self.budget.share + 1e-9

    def _split(self) -> Point | None:
        """K or V of the chosen layers instead of whole ones; None where that saves nothing."""
        assert self.proposal is not None
        chosen = self.proposal.exempt.layers
        size = {
            (layer.index, kind): layer.num_kv_heads
            * (layer.head_dim if kind == "k" else layer.v_head_dim)
            for layer in self.layers
            for kind in KV
        }
        parts = sorted(
            (part for part in self.parts if part[0] in chosen),
            key=lambda part: -self.parts[part].kl.value / size[part],
        )
        if not parts:
            return None
        if self.budget.share is not None:
            return self._split_by_bytes()
        points = {point.exempt: point for point in self.points}
        prefixes = [_of_parts(parts[:n]) for n in range(len(parts) + 1)]
        found = self._bisect(
            prefixes, lambda exempt: points.get(exempt) or self._measure([exempt], str(exempt))[0]
        )
        return found if found.share < self.proposal.share else None

    def _split_by_bytes(self) -> Point | None:
        """As many parts as fit, those of layers beyond the chosen ones among them."""
        assert self.proposal is not None
        ranked = sorted(self.parts, key=lambda part: -self.parts[part].kl.value)
        taken: list[tuple[int, str]] = []
        for part in ranked:
            if self._fits(_of_parts([*taken, part])):
                taken.append(part)
        (found,) = self._measure([_of_parts(taken)], "K and V apart")
        return found if found.loss.kl.value < self.proposal.loss.kl.value else None


def _of_parts(parts: Sequence[tuple[int, str]]) -> Exemption:
    k, v = (frozenset(index for index, kind in parts if kind == each) for each in KV)
    return Exemption(k & v, k - v, v - k)
