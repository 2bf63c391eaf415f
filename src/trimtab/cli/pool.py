"""`trimtab status`, `explain` and `pool`: what runs, what waits and why.

They connect to a running controller and start neither a cluster nor a controller; without one they fail with a hint.
Only `pool drain` and `pool free` change anything. Output is built in `render.text.pool`; heavy imports happen inside
the functions, so that the command line starts quickly.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from trimtab.cli.options import FormatOption, NameOption
from trimtab.core.errors import InputError, UnreachableError, meant
from trimtab.render.output import Format, answer

if TYPE_CHECKING:
    from trimtab.runtime.client.session import Session

app = typer.Typer(help="Pools: quota, slots and tasks.", no_args_is_help=True)

AddressOption = Annotated[
    str | None, Option("--address", "-a", help="Ray cluster.  [default: RAY_ADDRESS, or the cluster on this machine]")
]
DEFAULT_NAME = "trimtab"  # default name of a controller
ANSWER_S = 30.0


def status(address: AddressOption = None, name: NameOption = None, form: FormatOption = Format.text) -> None:
    """Show pools and quota, slots, tasks, what waits and why, nodes, warm hosts, journal, metrics.

    Examples:

        trimtab status
        trimtab status --address 10.0.0.1:6379 --format json
    """
    from trimtab.render.text import pool as pool_text
    from trimtab.runtime.rayapi.connect import import_ray
    from trimtab.runtime.rayapi.nodes import ray_nodes

    with controller_session(address, name) as session:
        seen = session.status()
        nodes = ray_nodes(import_ray())
        data = pool_text.status_data(seen, session.tasks(), nodes, pool_text.exporter(nodes, seen.get("metrics")))
    answer(data, form, lambda: pool_text.print_status(data))


def explain(
    task: Annotated[str, Argument(help="Task, elastic group, or node (prefix of its id).")],
    address: AddressOption = None,
    name: NameOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Explain the state of a task, a group or a node: the reason, what must happen next, and its story.

    Examples:

        trimtab explain rollout-03
        trimtab explain trainers
        trimtab explain 4f1c09
    """
    from trimtab.render.text import pool as pool_text

    with controller_session(address, name) as session:
        try:
            explanation = session.explain(task)
        except InputError as unknown:
            group = pool_text.group_data(task, session.status())
            data = group or _node_data(session, task, unknown)
            answer(data, form, lambda: (pool_text.print_group if group else pool_text.print_node)(data))
            return
        seen = session.status()
    data = pool_text.explanation_data(explanation, seen)
    answer(data, form, lambda: pool_text.print_explanation(data))


@app.command("list")
def list_pools(address: AddressOption = None, name: NameOption = None, form: FormatOption = Format.text) -> None:
    """List all pools: used quota, slots, tasks by state.

    Example:

        trimtab pool list --format yaml
    """
    from trimtab.render.text import pool as pool_text

    with controller_session(address, name) as session:
        data = {"pools": session.status()["pools"]}
    answer(data, form, lambda: pool_text.print_pools(data["pools"]))


@app.command()
def show(
    pool: Annotated[str, Argument(help="Pool name.")],
    address: AddressOption = None,
    name: NameOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Show a pool: its configuration, usage and tasks.

    Example:

        trimtab pool show rlhf
    """
    from trimtab.render.text import pool as pool_text

    with controller_session(address, name) as session:
        view = _known(session, pool)
        data = pool_text.pool_data(session.pool(pool).spec, view, session.tasks(pool))
    answer(data, form, lambda: pool_text.print_pool(data))


@app.command()
def drain(
    pool: Annotated[str, Argument(help="Pool name.")],
    off: Annotated[bool, Option("--off", help="Start tasks again.")] = False,
    address: AddressOption = None,
    name: NameOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Stop a pool from starting tasks. Running tasks go on; waiting tasks wait with the reason DRAINED.

    Examples:

        trimtab pool drain rlhf
        trimtab pool drain rlhf --off
    """
    from trimtab.render.text import pool as pool_text

    with controller_session(address, name) as session:
        _known(session, pool)
        session.pool(pool).drain(not off)
        view = _known(session, pool)
    answer({"pool": pool, **view}, form, lambda: pool_text.print_drained(pool, view))


@app.command()
def free(
    address: AddressOption = None,
    name: Annotated[str, Option("--name", "-n", help="Name of the controller.")] = DEFAULT_NAME,
    form: FormatOption = Format.text,
) -> None:
    """Remove the actors and placement groups of a controller that is dead or refuses its journal.

    Example:

        trimtab pool free --name trimtab
    """
    from trimtab.runtime.client.connection import free_controller
    from trimtab.runtime.rayapi.connect import RayConnection

    connection = RayConnection(address, start=False)
    try:
        ended = free_controller(connection.ray, name)
    finally:
        connection.close()
    data = {"controller": name, "actors": list(ended.actors), "placement_groups": list(ended.groups)}
    answer(data, form, lambda: typer.echo(f"ended: {ended}"))


@contextmanager
def controller_session(address: str | None, name: str | None) -> Iterator[Session]:
    """A session with the running controller. Raises UnreachableError if there is none."""
    from trimtab.runtime.client.connection import ControllerConnection
    from trimtab.runtime.client.session import Session
    from trimtab.runtime.rayapi.connect import RayConnection

    link = RayConnection(address, start=False)
    try:
        session = Session(
            link, ControllerConnection(link.ray, _controller_name(link.ray, name), None, None, ANSWER_S, make=False)
        )
    except BaseException:
        link.close()
        raise
    with session:
        yield session


def _controller_name(ray: Any, name: str | None) -> str:
    """The name of the controller: as given, the only one, or the default."""
    from trimtab.runtime.controller.rpc import controllers

    there = controllers(ray)
    wanted = name or (there[0] if len(there) == 1 else DEFAULT_NAME)
    if there and wanted not in there:
        raise UnreachableError(f"the cluster has no controller {wanted}", hint=f"--name is one of: {', '.join(there)}")
    return wanted


def _known(session: Session, pool: str) -> dict[str, Any]:
    pools: dict[str, dict[str, Any]] = session.status()["pools"]
    if pool not in pools:
        known = f"pools: {', '.join(sorted(pools)) or 'none yet'}"
        raise InputError(f"there is no pool {pool}", hint=meant(pool, pools, known))
    return pools[pool]


def _node_data(session: Session, name: str, unknown: InputError) -> dict[str, Any]:
    """A node's story; raises `unknown` if the name is not a node's."""
    from trimtab.render.text import pool as pool_text

    try:
        node, story = session.ask("node_story", name)
    except InputError:
        if not (unknown.hint or "").startswith("did you mean"):
            unknown.hint = (
                "`trimtab status` shows running and waiting tasks, `trimtab pool show POOL` all tasks of a pool"
            )
        raise unknown from None
    return pool_text.node_data(node, story, session.status(), session.tasks())
