"""Registers the policy `trimtab` with verl. verl imports this module itself, as a plugin (`verl.plugins`).

Nothing else happens before `async_training.dynamic_schedule_policy: trimtab` asks for the policy.
"""

from __future__ import annotations

from typing import Any

from verl.experimental.fully_async_policy.dynamic_schedule import register_policy


@register_policy("trimtab")  # type: ignore[untyped-decorator]
def elastic_policy(**settings: Any) -> Any:
    """The policy; trimtab is imported only now."""
    import verl

    from trimtab.integrations.verl_elastic import ElasticPolicy
    from trimtab.integrations.verl_replicas import check_verl

    check_verl(verl.__version__)
    return ElasticPolicy(**settings)
