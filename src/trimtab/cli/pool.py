"""`trimtab pool` and `trimtab task`: what runs and what waits on a controller.

They connect to a running controller and start neither a cluster nor a controller; without one they fail with a hint.
Output is built in `render.text.pool`; heavy imports happen inside the functions, so that the command line starts
quickly.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from trimtab.cli.options import (
    CONTROLLER,
    AddressOption,
    FollowOption,
    FormatOption,
    NameOption,
    TailOption,
    controller_session,
)
from trimtab.core.errors import InputError, meant
from trimtab.render.output import Format, answer

if TYPE_CHECKING:
    from trimtab.runtime.client.session import Session

pools = typer.Typer(help="Pools of a Ray cluster: quota, slots, queues.", no_args_is_help=True)
tasks = typer.Typer(help="Tasks of pools. `trimtab why TASK` says why one waits.", no_args_is_help=True)

PoolArgument = Annotated[str, Argument(help="Pool name.")]
TaskArgument = Annotated[str, Argument(help="Task id.")]


@pools.command("list")
def list_pools(address: AddressOption = None, name: NameOption = None, form: FormatOption = Format.text) -> None:
    """List all pools: used quota, slots, tasks by state.

    Example:

        trimtab pool list --format yaml
    """
    from trimtab.render.text import pool as pool_text

    with controller_session(address, name) as session:
        data = {"pools": session.status()["pools"]}
    answer(data, form, lambda: pool_text.print_pools(data["pools"]))


@pools.command("show")
def show_pool(
    pool: Annotated[str | None, Argument(help="Pool name; without it the controller with all pools.")] = None,
    address: AddressOption = None,
    name: NameOption = None,
    form: FormatOption = Format.text,
) -> None:
    """Show a pool, or all: quota, slots, tasks, what waits and why, nodes, warm hosts, journal, metrics.

    Examples:

        trimtab pool show
        trimtab pool show rlhf
        trimtab pool show --address 10.0.0.1:6379 --format json
    """
    from trimtab.render.text import pool as pool_text
    from trimtab.runtime.rayapi.connect import import_ray
    from trimtab.runtime.rayapi.nodes import ray_nodes

    with controller_session(address, name) as session:
        if pool is None:
            seen = session.status()
            nodes = ray_nodes(import_ray())
            metrics = pool_text.exporter(nodes, seen.get("metrics"))
            data = pool_text.status_data(seen, session.tasks(), nodes, metrics)
        else:
            view = _known(session, pool)
            data = pool_text.pool_data(session.pool(pool).spec, view, session.tasks(pool))
    answer(data, form, lambda: (pool_text.print_status if pool is None else pool_text.print_pool)(data))


@pools.command()
def drain(
    pool: PoolArgument, address: AddressOption = None, name: NameOption = None, form: FormatOption = Format.text
) -> None:
    """Stop a pool from starting tasks. Running tasks go on; waiting tasks wait with the reason DRAINED.

    Example:

        trimtab pool drain rlhf
    """
    _set_drained(pool, True, address, name, form)


@pools.command()
def undrain(
    pool: PoolArgument, address: AddressOption = None, name: NameOption = None, form: FormatOption = Format.text
) -> None:
    """Let a drained pool start tasks again.

    Example:

        trimtab pool undrain rlhf
    """
    _set_drained(pool, False, address, name, form)


def _set_drained(pool: str, drained: bool, address: str | None, name: str | None, form: Format) -> None:
    from trimtab.render.text import pool as pool_text

    with controller_session(address, name) as session:
        _known(session, pool)
        session.pool(pool).drain(drained)
        view = _known(session, pool)
    answer({"pool": pool, **view}, form, lambda: pool_text.print_drained(pool, view))


@pools.command()
def free(address: AddressOption = None, name: NameOption = CONTROLLER, form: FormatOption = Format.text) -> None:
    """Remove the actors and placement groups of a controller that is dead or refuses its journal.

    Example:

        trimtab pool free --name trimtab
    """
    from trimtab.runtime.client.connection import free_controller
    from trimtab.runtime.rayapi.connect import RayConnection

    connection = RayConnection(address, start=False)
    try:
        ended = free_controller(connection.ray, name or CONTROLLER)
    finally:
        connection.close()
    data = {"controller": name, "actors": list(ended.actors), "placement_groups": list(ended.groups)}
    answer(data, form, lambda: typer.echo(f"ended: {ended}"))


# ---- tasks ---------------------------------------------------------------------------------------------------------


@tasks.command("list")
def list_tasks(
    pool: Annotated[str | None, Option("--pool", help="Only tasks of this pool.")] = None,
    address: AddressOption = None,
    name: NameOption = None,
    form: FormatOption = Format.text,
) -> None:
    """List tasks: state, priority, nodes, and why they wait.

    Example:

        trimtab task list --pool rlhf
    """
    from trimtab.render.text import pool as pool_text

    with controller_session(address, name) as session:
        if pool is not None:
            _known(session, pool)
        data = {"tasks": [pool_text.task_data(task) for task in session.tasks(pool)]}
    answer(data, form, lambda: pool_text.print_tasks(data["tasks"]))


@tasks.command("show")
def show_task(
    task: TaskArgument, address: AddressOption = None, name: NameOption = None, form: FormatOption = Format.text
) -> None:
    """Show a task: its state, labels, starts and processes.

    Example:

        trimtab task show rollout-03
    """
    from trimtab.render.text import pool as pool_text

    with controller_session(address, name) as session:
        data = pool_text.task_data(session.task(task).seen)
    answer(data, form, lambda: pool_text.print_task(data))


@tasks.command()
def cancel(
    task: TaskArgument, address: AddressOption = None, name: NameOption = None, form: FormatOption = Format.text
) -> None:
    """Cancel a task: it ends, and is not started again.

    Example:

        trimtab task cancel rollout-03
    """
    _change(task, "cancel", address, name, form)


@tasks.command()
def evict(
    task: TaskArgument, address: AddressOption = None, name: NameOption = None, form: FormatOption = Format.text
) -> None:
    """Evict a running task: it saves its state, frees its slot, and starts again when there is room.

    Example:

        trimtab task evict rollout-03
    """
    _change(task, "evict", address, name, form)


def _change(name_of_task: str, action: str, address: str | None, name: str | None, form: Format) -> None:
    from trimtab.render.text import pool as pool_text

    with controller_session(address, name) as session:
        task = session.task(name_of_task)
        getattr(task, action)()
        data = pool_text.task_data(task.seen)
    answer(data, form, lambda: pool_text.print_task(data))


@tasks.command()
def logs(
    task: TaskArgument,
    rank: Annotated[int, Option(min=0, max=100_000, help="Process of a gang.")] = 0,
    tail: TailOption = 1000,
    follow: FollowOption = False,
    errors: Annotated[bool, Option("--stderr", help="Standard error instead of standard output.")] = False,
    address: AddressOption = None,
    name: NameOption = None,
) -> None:
    """Print what the process of a running task has written, through Ray's dashboard.

    A warm process has served other tasks before: their lines stand above.

    Example:

        trimtab task logs rollout-03 --tail 50 --follow
    """
    from trimtab.runtime.rayapi.connect import log_lines

    with controller_session(address, name) as session:
        seen = session.task(task).seen
        member = next((member for member in seen.members if member.rank == rank), None)
        if member is None:
            ranks = ", ".join(str(member.rank) for member in seen.members)
            hint = f"its processes: {ranks}" if ranks else f"`trimtab why {task}` says more"
            raise InputError(f"task {task} is {seen.state.value}: it has no process {rank} now", hint=hint)
        for text in log_lines(member.node, member.pid, tail=tail, follow=follow, errors=errors):
            sys.stdout.write(text)
            sys.stdout.flush()


def _known(session: Session, pool: str) -> dict[str, Any]:
    known: dict[str, dict[str, Any]] = session.status()["pools"]
    if pool not in known:
        there = f"pools: {', '.join(sorted(known)) or 'none yet'}"
        raise InputError(f"there is no pool {pool}", hint=meant(pool, known, there))
    return known[pool]
