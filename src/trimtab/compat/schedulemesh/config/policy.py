"""Preemption settings of `SimpleScheduler.configure_preemption`."""

from __future__ import annotations

import dataclasses
import enum
import os
from collections.abc import Collection, Mapping, Sequence

from trimtab.core.errors import InputError, meant
from trimtab.core.frozen import Frozen
from trimtab.model.pool import Aggressiveness, PreemptionPolicy, rules_of


class PreemptionAggressiveness(str, enum.Enum):
    """Required priority gap of an eviction: by label rule, and in the same pool without one."""

    LOW = "low"  # 1.0 and 3.0
    MEDIUM = "medium"  # 0.5 and 1.0
    HIGH = "high"  # 0.1 and 0.5

    @classmethod
    def of(cls, word: str) -> PreemptionAggressiveness:
        """The level of this name or a synonym; `env:VAR` reads it from the environment."""
        level_name = word.value if isinstance(word, cls) else word
        where = "preemption_aggressiveness"
        if isinstance(level_name, str) and level_name.startswith("env:"):
            variable = level_name.removeprefix("env:")
            where = f"{where}, from the environment variable {variable}"
            if variable not in os.environ:
                raise InputError(f"the environment variable {variable} is not set", where="preemption_aggressiveness")
            level_name = os.environ[variable]
        level = _LEVELS.get(level_name.strip().lower()) if isinstance(level_name, str) else None
        if level is None:
            hint = meant(str(level_name).lower(), _LEVELS, "low, medium, high, or env:VARIABLE")
            raise InputError(f"{level_name!r} is no aggressiveness", where=where, hint=hint)
        return cls(level)


_LEVELS = {
    word: level
    for level, words in {
        "low": ("low", "background", "conservative", "gentle", "relaxed", "lazy"),
        "medium": ("medium", "normal", "default", "balanced", "standard", "moderate"),
        "high": ("high", "urgent", "aggressive", "critical", "realtime", "immediate"),
    }.items()
    for word in words
}


class PreemptionSettings(Frozen):
    """Arguments of `configure_preemption`. A threshold that is None follows the aggressiveness."""

    enable_same_pool_preemption: bool = True
    enable_label_preemption: bool = True
    label_preemption_rules: Mapping[str, Mapping[str, Sequence[str]]] = dataclasses.field(default_factory=dict)
    preemption_aggressiveness: str = PreemptionAggressiveness.MEDIUM
    same_pool_priority_threshold: float | None = None
    label_priority_threshold: float | None = None
    enable_cross_pool_preemption: bool = False
    cross_pool_priority_threshold: float = 5.0
    protected_pools: Collection[str] = ()
    cancel_timeout: float = 5.0  # seconds for `cancel()`; then the process is killed
    save_timeout: float = 60.0  # seconds for saving the state, apart from cancelling
    min_runtime: float = 0.0  # seconds that a task runs at least before it is evicted
    eviction_budget: int | None = None  # evictions within the window; None: unlimited
    eviction_window: float = 60.0

    def policy(self) -> PreemptionPolicy:
        """The policy for the controller; InputError for a wrong setting."""
        where = "configure_preemption"
        for field in dataclasses.fields(self):
            if field.name.startswith("enable_") and not isinstance(getattr(self, field.name), bool):
                raise InputError(f"{field.name} is true or false, not {getattr(self, field.name)!r}", where=where)
        protected = self.protected_pools
        if isinstance(protected, str) or not all(isinstance(pool, str) for pool in protected):
            raise InputError(f"protected_pools is a list of names, not {protected!r}", where=where)
        if not isinstance(self.label_preemption_rules or {}, Mapping):
            raise InputError("label_preemption_rules is {label: {value: [values it may evict]}}", where=where)
        level = Aggressiveness(PreemptionAggressiveness.of(self.preemption_aggressiveness).value)
        same, label = self.same_pool_priority_threshold, self.label_priority_threshold
        return PreemptionPolicy(
            same_pool=self.enable_same_pool_preemption,
            same_pool_gap=level.same_pool_gap if same is None else same,
            label_rules=rules_of(self.label_preemption_rules) if self.enable_label_preemption else (),
            label_gap=level.label_gap if label is None else label,
            cross_pool=self.enable_cross_pool_preemption,
            cross_pool_gap=self.cross_pool_priority_threshold,
            protected_pools=tuple(protected),
            cancel_timeout_s=self.cancel_timeout,
            save_timeout_s=self.save_timeout,
            min_runtime_s=self.min_runtime,
            budget=self.eviction_budget,
            budget_window_s=self.eviction_window,
        )
