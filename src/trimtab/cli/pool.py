"""`trimtab status`, `explain` and `pool`: what runs, what waits and why.

They look at a controller that is there, and start neither a cluster nor a controller: where nothing is, they say so
and how to get it. Only `pool drain` and `pool free` change anything. What is shown is put together in `pool_text`;
what they need is imported when they run, so that the command line starts quickly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.core.errors import InputError, UnreachableError, nearest
from trimtab.render.output import Format, answer

if TYPE_CHECKING:
    from trimtab.runtime.client.session import Session

app = typer.Typer(help="Pools: their quota, slots and tasks.", no_args_is_help=True)

AddressOption = Annotated[
    str | None,
    typer.Option("--address", "-a", help="The Ray cluster; else RAY_ADDRESS, else the one that runs on this machine."),
]
NameOption = Annotated[str | None, typer.Option("--name", "-n", help="The controller, where a cluster has several.")]
FormatOption = Annotated[Format, typer.Option("--format", "-f", help="How the answer is written.")]
USUAL_NAME = "trimtab"  # of a controller, where nobody said another
ANSWER_S = 30.0


def status(address: AddressOption = None, name: NameOption = None, form: FormatOption = Format.text) -> None:
    """What is going on: pools and their quota, slots, tasks, who waits and why, nodes, warm hosts, journal, metrics.

    Examples:

        trimtab status

        trimtab status --address 10.0.0.1:6379 --format json
    """
    from trimtab.render.text import pool as pool_text
    from trimtab.runtime.rayapi.connect import import_ray

    with looking(address, name) as session:
        seen = session.status()
        nodes = import_ray().nodes()
        data = pool_text.status_data(seen, session.tasks(), nodes, pool_text.exporter(nodes, seen.get("metrics")))
    answer(data, form, lambda: pool_text.print_status(data))


def explain(
    task: Annotated[str, typer.Argument(help="A task, an elastic group, or a node (the beginning of its id).")],
    address: AddressOption = None,
    name: NameOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Why a task, a group or a node is as it is: the reason, what would have to happen, and its story.

    Examples:

        trimtab explain rollout-03

        trimtab explain trainers

        trimtab explain 4f1c09
    """
    from trimtab.render.text import nodes as fleet_text
    from trimtab.render.text import pool as pool_text

    with looking(address, name) as session:
        try:
            explanation = session.explain(task)
        except InputError as unknown:
            group = fleet_text.group_data(task, session.status())
            data = group or _node_data(session, task, unknown)
            answer(data, form, lambda: (fleet_text.print_group if group else fleet_text.print_node)(data))
            return
        seen = session.status()
    data = pool_text.explanation_data(explanation, seen)
    answer(data, form, lambda: pool_text.print_explanation(data))


@app.command("list")
def list_pools(address: AddressOption = None, name: NameOption = None, form: FormatOption = Format.text) -> None:
    """All pools: quota used, slots, tasks by state.

    Example:

        trimtab pool list --format yaml
    """
    from trimtab.render.text import pool as pool_text

    with looking(address, name) as session:
        data = {"pools": session.status()["pools"]}
    answer(data, form, lambda: pool_text.print_pools(data["pools"]))


@app.command()
def show(
    pool: Annotated[str, typer.Argument(help="The pool.")],
    address: AddressOption = None,
    name: NameOption = None,
    form: FormatOption = Format.text,
) -> None:
    """One pool: how it is configured, what it uses, and its tasks.

    Example:

        trimtab pool show rlhf
    """
    from trimtab.render.text import pool as pool_text

    with looking(address, name) as session:
        view = _known(session, pool)
        data = pool_text.pool_data(session.pool(pool).spec, view, session.tasks(pool))
    answer(data, form, lambda: pool_text.print_pool(data))


@app.command()
def drain(
    pool: Annotated[str, typer.Argument(help="The pool.")],
    off: Annotated[bool, typer.Option("--off", help="Take tasks again.")] = False,
    address: AddressOption = None,
    name: NameOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Have a pool start nothing new. What runs goes on; what waits keeps waiting, with DRAINED as its reason.

    Examples:

        trimtab pool drain rlhf

        trimtab pool drain rlhf --off
    """
    from trimtab.render.text import pool as pool_text

    with looking(address, name) as session:
        _known(session, pool)
        session.pool(pool).drain(not off)
        view = _known(session, pool)
    answer({"pool": pool, **view}, form, lambda: pool_text.print_drained(pool, view))


@app.command()
def free(
    address: AddressOption = None,
    name: Annotated[str, typer.Option("--name", "-n", help="The controller.")] = USUAL_NAME,
    form: FormatOption = Format.text,
) -> None:
    """End what a controller left that is dead or refuses its journal: its processes, actors and placement groups.

    Example:

        trimtab pool free --name trimtab
    """
    from trimtab.runtime.client.connection import RayConnection, free_controller

    connection = RayConnection(address, start=False)
    try:
        ended = free_controller(connection.ray, name)
    finally:
        connection.close()
    data = {"controller": name, "actors": list(ended.actors), "placement_groups": list(ended.groups)}
    answer(data, form, lambda: typer.echo(f"ended: {ended}"))


@contextmanager
def looking(address: str | None, name: str | None) -> Iterator[Session]:
    """A session with the controller that is there; raises UnreachableError where there is none."""
    from trimtab.runtime.client.connection import ControllerConnection, RayConnection
    from trimtab.runtime.client.session import Session

    link = RayConnection(address, start=False)
    try:
        session = Session(
            link, ControllerConnection(link.ray, _wanted(link.ray, name), None, None, ANSWER_S, make=False)
        )
    except BaseException:
        link.close()
        raise
    with session:
        yield session


def _wanted(ray: Any, name: str | None) -> str:
    """The controller of the name; without one the only one there is, or that of the usual name."""
    from trimtab.runtime.controller.rpc import controllers

    there = controllers(ray)
    wanted = name or (there[0] if len(there) == 1 else USUAL_NAME)
    if there and wanted not in there:
        raise UnreachableError(f"this Ray has no controller {wanted}", hint=f"--name is one of: {', '.join(there)}")
    return wanted


def _known(session: Session, pool: str) -> dict[str, Any]:
    pools: dict[str, dict[str, Any]] = session.status()["pools"]
    if pool not in pools:
        near = nearest(pool, pools)
        known = f"pools: {', '.join(sorted(pools)) or 'none yet'}"
        raise InputError(f"there is no pool {pool}", hint=f"did you mean {near}?" if near else known)
    return pools[pool]


def _node_data(session: Session, name: str, unknown: InputError) -> dict[str, Any]:
    """A node's story, where the name is one of a node; else what was unknown."""
    from trimtab.render.text import nodes as fleet_text

    try:
        node, story = session.ask("node_story", name)
    except InputError:
        if not (unknown.hint or "").startswith("did you mean"):
            unknown.hint = "`trimtab status` shows what runs and waits, `trimtab pool show POOL` all tasks of a pool"
        raise unknown from None
    return fleet_text.node_data(node, story, session.status(), session.tasks())
