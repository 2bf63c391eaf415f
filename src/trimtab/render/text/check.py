"""Findings of a check as data and as text: what, why, which key, and cures with their cost."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimtab.plan.check.check import CheckAnswer
from trimtab.plan.check.setup import RunSetup
from trimtab.plan.estimate.phases import Phase
from trimtab.render.output import out, print_list, text_table


def as_data(run: RunSetup, answer: CheckAnswer) -> dict[str, Any]:
    findings = [
        {
            "severity": finding.severity,
            "cause": finding.cause,
            "what": finding.what,
            "why": finding.why,
            "keys": [run.key(name) for name in finding.names],
            "cures": [{"set": cure.text(run), "cost": cure.cost} for cure in finding.cures],
            "rule": finding.rule,
            "releases": finding.releases,
            "dated": finding.dated,
            "source": finding.source,
        }
        for finding in answer.findings
    ]
    return {
        "framework": run.framework,
        "model": run.model_name,
        "gpu": run.gpu.name if run.gpu else None,
        "gpus": run.gpus,
        "can_run": False if answer.errors else None if answer.unchecked else True,
        "errors": len(answer.errors),
        "warnings": len(answer.findings) - len(answer.errors),
        "findings": findings,
        "gpu_memory_gb": _sizes(answer.phases),
        "host_memory_gb": _sizes(answer.host),
        "not_checked": list(answer.unchecked),
    }


def _sizes(phases: tuple[Phase, ...]) -> dict[str, Any]:
    return {
        phase.name: {
            "needs": round(phase.gb, 1),
            "has": round(phase.gpu_gb, 1),
            "terms": {name: round(size, 1) for name, size in phase.terms},
        }
        for phase in phases
    }


def show(data: Mapping[str, Any]) -> None:
    """The data of `as_data` as text."""
    on = f" on {data['gpus']} {data['gpu'] or 'GPUs'}" if data["gpus"] else ""
    found = [_count(data["errors"], "error"), _count(data["warnings"], "warning")]
    left = "; ".join(text.partition(":")[0] for text in data["not_checked"])
    verdict = f"no error in what could be checked; not checked: {left}"
    if data["can_run"] is not None:
        verdict = "can run" if data["can_run"] else "cannot run"
    said = ", ".join(text for text in found if text)
    out.print(f"{data['model'] or 'this run'}{on}: {verdict}{f' ({said})' if said else ''}", markup=False)
    for finding in data["findings"]:
        out.print(f"\n{finding['severity']}: {finding['what']}", markup=False)
        out.print(f"  why   {finding['why']}", markup=False)
        if finding["keys"]:
            out.print(f"  keys  {', '.join(finding['keys'])}", markup=False)
        for at, cure in enumerate(finding["cures"]):
            out.print(f"  {'cure' if not at else 'or  '}  {cure['set']}  (costs {cure['cost']})", markup=False)
        out.print(
            f"  rule  {finding['rule']}: {finding['releases']}, {finding['dated']} ({finding['source']})", markup=False
        )
    rows = []
    for where in ("gpu_memory_gb", "host_memory_gb"):
        for name, size in data[where].items():
            title = f"{'a GPU' if where == 'gpu_memory_gb' else 'a node'}: {name}"
            rows.append((title, f"{size['needs']:,.1f}", f"{size['has']:,.1f}"))
    if rows:
        out.print()
        out.print(text_table(("GB of", ">needs", ">has"), rows, no_wrap=True))
    print_list("Not checked", data["not_checked"])


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'s' if number != 1 else ''}" if number else ""
