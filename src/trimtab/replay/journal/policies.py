"""Policies to try on a journal: by name, or from a file with changes to its pools and rules.

A file holds a policy, a list of policies, or `policies` with a list, as in a scenario. `preemption` changes the
preemption rules, `pool` settings of all pools, `pools` settings of a pool by name. Everything else stays as recorded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from trimtab.core.errors import InputError, check_known, meant
from trimtab.core.resources import Resources
from trimtab.formats import sections, yaml_text
from trimtab.formats.sections import Section
from trimtab.machines.pool import events as e
from trimtab.model.pool import PoolSpec, PreemptionPolicy, rules_of
from trimtab.replay.journal.replay import AS_IT_WAS, RECORDED, AlternativePolicy
from trimtab.replay.journal.world import JournalWorld, base_name
from trimtab.replay.pool.policies import KNOWN, POOL_KEYS, PREEMPTION_KEYS, PoolPolicy
from trimtab.replay.pool.scenario import BY_USE, PoolPolicySection

RULE_KEYS = ("label_rules", "cross_pool", "protected_pools")  # preemption keys that only a journal policy takes
ONE_POOL_KEYS = (*POOL_KEYS, "quota", "borrow", "reserved_priority", "dynamic_limit")


class JournalPolicySection(PoolPolicySection):
    """A policy of a file."""

    use: str = "trimtab"
    preemption: dict[str, Any] = Field(default_factory=dict)
    pool: dict[str, Any] = Field(default_factory=dict)
    pools: dict[str, dict[str, Any] | None] = Field(default_factory=dict)


class _PolicyFile(Section):
    policies: list[Annotated[JournalPolicySection, BY_USE]] = Field(min_length=1)


def read_alternatives(given: Sequence[str]) -> list[AlternativePolicy]:
    """Policies named by `--with`: names of policies, or files."""
    found: list[AlternativePolicy] = []
    for name in given:
        path = Path(name)
        if name in KNOWN:
            found.append(AlternativePolicy(PoolPolicy(name, name)))
        elif path.suffix in (".yaml", ".yml", ".json") or path.exists():
            found += _file(path)
        else:
            hint = meant(name, KNOWN, "a YAML file, or one of " + ", ".join(KNOWN))
            raise InputError(f"{name} is neither a policy nor a file", where="command line: --with", hint=hint)
    taken = [RECORDED, AS_IT_WAS]
    for at, other in enumerate(found):
        if other.name in taken:
            raise InputError(f"two policies are named {other.name}", where="--with", hint="give one a `name`")
        taken.append(found[at].name)
    return found


def _file(path: Path) -> list[AlternativePolicy]:
    source, data = yaml_text.read_source(path)
    if isinstance(data, Mapping) and "policies" in data:
        listed: Any = data["policies"]
    else:
        listed = data if isinstance(data, list) else [data]
    policies = sections.read(_PolicyFile, {"policies": listed}, source).policies
    # The only policy of a file is named after the file unless it has a name.
    alone = path.stem if len(policies) == 1 else None
    return [_other(policy, alone, str(path)) for policy in policies]


def _other(section: JournalPolicySection, alone: str | None, where: str) -> AlternativePolicy:
    rules = {key: value for key, value in section.preemption.items() if key in RULE_KEYS}
    preemption = {key: value for key, value in section.preemption.items() if key not in RULE_KEYS}
    changes = bool(section.preemption or section.pool or section.pools)
    name = section.name or (alone if alone is not None and changes else section.use)
    try:
        check_known(preemption, (*PREEMPTION_KEYS, *RULE_KEYS), f"policy {name}")
        policy = PoolPolicy(name, section.use, preemption, section.pool, section.threshold_gpu_s)
        if (rules and section.use != "trimtab") or (section.pools and not section.use.startswith("trimtab")):
            raise InputError(f"{section.use} takes no such settings", where=name, hint="they go with use: trimtab")
        if "label_rules" in rules:
            if not isinstance(rules["label_rules"], Mapping):
                raise InputError("label_rules maps labels to values and to the values that they may evict", where=name)
            rules["label_rules"] = rules_of(rules["label_rules"])
        if "protected_pools" in rules:
            rules["protected_pools"] = tuple(map(str, rules["protected_pools"]))
        PreemptionPolicy(**preemption, **rules)
        pools = {pool: _one_pool(pool, settings or {}) for pool, settings in section.pools.items()}
    except InputError as error:
        error.where = f"{where}: {error.where or name}"
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(str(error), where=f"{where}: {name}") from None
    return AlternativePolicy(policy, rules, pools)


def _one_pool(pool: str, given: dict[str, Any]) -> dict[str, Any]:
    check_known(given, ONE_POOL_KEYS, f"pools.{pool}")
    found = dict(given)
    if "quota" in found:
        found["quota"] = Resources.of(found["quota"], where=f"pools.{pool}.quota")
    PoolSpec(pool, **{"quota": Resources(), **found})  # raises where a value is wrong
    return found


def fitted(other: AlternativePolicy, world: JournalWorld) -> AlternativePolicy:
    """The policy with quotas in units of the world. Raises InputError for a pool that is not in the journal."""
    known = {base_name(event.spec.name) for _, event in world.settings if isinstance(event, e.PoolEnsured)}
    pools = {}
    for name, section in other.pools.items():
        check_known([name], sorted(known), f"policy {other.name}", "the journal has no pool {}")
        quota = {"quota": world.units.counted(section["quota"])} if "quota" in section else {}
        pools[name] = {**section, **quota}
    return replace(other, pools=pools)
