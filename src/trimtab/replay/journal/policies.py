"""Policies to try on a journal: by name, or from a file that says what they change of the pools and rules it has.

A file holds one policy, a list of them, or `policies` with a list, as a scenario does; there, `preemption` changes the
rules that were set, `pool` settings of all pools, and `pools` those of one by name. What is not said stays as it was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field, ValidationError

from trimtab.core.errors import InputError, nearest
from trimtab.core.resources import Resources
from trimtab.formats import yaml_text
from trimtab.machines.pool import events as e
from trimtab.model.pool import PoolSpec, PreemptionPolicy, rules_of
from trimtab.replay.journal.replay import AS_IT_WAS, RECORDED, AlternativePolicy
from trimtab.replay.journal.world import JournalWorld, base_name
from trimtab.replay.pool.policies import KNOWN, POOL_KEYS, PREEMPTION_KEYS, PoolPolicy
from trimtab.replay.pool.scenario import PoolPolicySection, explained

RULE_KEYS = ("label_rules", "cross_pool", "protected_pools")  # of preemption, beyond what a scenario knows
ONE_POOL_KEYS = (*POOL_KEYS, "quota", "borrow", "reserved_priority", "dynamic_limit")


class JournalPolicySection(PoolPolicySection):
    """One policy of a file."""

    use: str = "trimtab"
    pools: dict[str, dict[str, Any]] = Field(default_factory=dict)


class _PolicyFile(BaseModel):
    policies: list[str | JournalPolicySection] = Field(min_length=1)


def read_alternatives(said: Sequence[str]) -> list[AlternativePolicy]:
    """The policies that `--with` names: names of policies, and files of them."""
    found: list[AlternativePolicy] = []
    for one in said:
        path = Path(one)
        if one in KNOWN:
            found.append(AlternativePolicy(PoolPolicy(one, one)))
        elif path.suffix in (".yaml", ".yml", ".json") or path.exists():
            found += _file(path)
        else:
            near = nearest(one, KNOWN)
            hint = f"did you mean {near}?" if near else "a YAML file, or one of " + ", ".join(KNOWN)
            raise InputError(f"{one} is neither a policy nor a file", where="command line: --with", hint=hint)
    taken = [RECORDED, AS_IT_WAS]
    for at, other in enumerate(found):
        if other.name in taken:
            raise InputError(f"two policies are called {other.name}", where="--with", hint="give one a `name`")
        taken.append(found[at].name)
    return found


def _file(path: Path) -> list[AlternativePolicy]:
    data = yaml_text.parse(yaml_text.read_text(path), str(path))
    if isinstance(data, Mapping) and "policies" in data:
        listed: Any = data["policies"]
    else:
        listed = data if isinstance(data, list) else [data]
    try:
        asked = _PolicyFile.model_validate({"policies": listed}).policies
    except ValidationError as error:
        raise explained(error, path, _PolicyFile, {"policies": JournalPolicySection}) from None
    # A file with one policy that has no name of its own is called after it.
    alone = path.stem if len(asked) == 1 else None
    return [_other(JournalPolicySection(use=one) if isinstance(one, str) else one, alone, str(path)) for one in asked]


def _other(said: JournalPolicySection, alone: str | None, where: str) -> AlternativePolicy:
    rules = {key: value for key, value in said.preemption.items() if key in RULE_KEYS}
    preemption = {key: value for key, value in said.preemption.items() if key not in RULE_KEYS}
    changes = bool(said.preemption or said.pool or said.pools)
    name = said.name or (alone if alone is not None and changes else said.use)
    more = {} if said.threshold_gpu_s is None else {"threshold_gpu_s": said.threshold_gpu_s}
    try:
        known_keys(preemption, (*PREEMPTION_KEYS, *RULE_KEYS), f"policy {name}")
        policy = PoolPolicy(name, said.use, preemption, said.pool, **more)
        if (rules and said.use != "trimtab") or (said.pools and not said.use.startswith("trimtab")):
            raise InputError(f"{said.use} has no such settings", where=name, hint="they are the pool machine's")
        if "label_rules" in rules:
            if not isinstance(rules["label_rules"], Mapping):
                raise InputError("label_rules maps labels to values and whom they may evict", where=name)
            rules["label_rules"] = rules_of(rules["label_rules"])
        if "protected_pools" in rules:
            rules["protected_pools"] = tuple(map(str, rules["protected_pools"]))
        PreemptionPolicy(**preemption, **rules)
        pools = {pool: _one_pool(pool, settings or {}) for pool, settings in said.pools.items()}
    except InputError as error:
        error.where = f"{where}: {error.where or name}"
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(str(error), where=f"{where}: {name}") from None
    return AlternativePolicy(policy, rules, pools)


def _one_pool(pool: str, said: dict[str, Any]) -> dict[str, Any]:
    known_keys(said, ONE_POOL_KEYS, f"pools.{pool}")
    found = dict(said)
    if "quota" in found:
        found["quota"] = Resources.of(found["quota"], where=f"pools.{pool}.quota")
    PoolSpec(pool, **{"quota": Resources(), **found})  # raises where a value is wrong
    return found


def known_keys(said: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """InputError for a key that is not known, with the nearest."""
    for key in said:
        if key not in known:
            near = nearest(str(key), known)
            hint = f"did you mean {near}?" if near else "known: " + ", ".join(known)
            raise InputError(f"{key} is not known here", where=where, hint=hint)


def fitted(other: AlternativePolicy, world: JournalWorld) -> AlternativePolicy:
    """The policy with quotas in units of the world. InputError where it names a pool that the journal has not."""
    known = {base_name(one.spec.name) for _, one in world.settings if isinstance(one, e.PoolEnsured)}
    pools = {}
    for name, said in other.pools.items():
        if name not in known:
            near = nearest(name, known)
            hint = f"did you mean {near}?" if near else "it has " + (", ".join(sorted(known)) or "none")
            raise InputError(f"the journal has no pool {name}", where=f"policy {other.name}", hint=hint)
        quota = {"quota": world.units.counted(said["quota"])} if "quota" in said else {}
        pools[name] = {**said, **quota}
    return replace(other, pools=pools)
