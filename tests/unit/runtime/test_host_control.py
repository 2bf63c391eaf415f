"""The directory and the control socket of a worker process: owned by us, and answering whatever went wrong before."""

from __future__ import annotations

import errno
import os
import socket
import types
from pathlib import Path
from typing import Any

import pytest

from trimtab.runtime.workers import worker_process as host
from trimtab.runtime.workers.worker_process import ControlServer, HostedObject, frame, make_run_dir, read_frame


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where run directories lie, instead of /tmp."""
    place = tmp_path / "trimtab"
    monkeypatch.setattr(host, "run_dir", lambda controller, node: place / f"{node}-{controller}")
    return place


def test_a_link_in_place_of_the_run_directory_is_refused(place: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    place.symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="is a link"):
        make_run_dir("controller", "node")
    place.unlink()
    place.mkdir()
    (place / "node-controller").symlink_to(elsewhere)
    with pytest.raises(PermissionError, match="is a link"):
        make_run_dir("controller", "node")
    assert list(elsewhere.iterdir()) == []


def test_a_run_directory_that_others_may_write_to_is_closed_to_them(place: Path) -> None:
    place.mkdir()
    place.chmod(0o777)
    made = make_run_dir("controller", "node")
    assert [path.stat().st_mode & 0o777 for path in (place, made)] == [0o700, 0o700]


def test_what_a_link_in_the_run_directory_points_to_is_not_tidied_away(place: Path, tmp_path: Path) -> None:
    from trimtab.runtime.workers.node_agent import _remove_stale_dirs

    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_text("kept")
    os.utime(elsewhere, (0, 0))
    make_run_dir("controller", "node")
    (place / "old").symlink_to(elsewhere)
    _remove_stale_dirs(place)
    assert (elsewhere / "file").read_text() == "kept"


def test_the_control_socket_answers_again_after_descriptors_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import ray

    context = types.SimpleNamespace(current_actor=None, get_actor_id=lambda: "0")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(os, "setpgid", lambda pid, group: None)
    real, refused = socket.socket.accept, []

    def accept(self: socket.socket) -> Any:
        if len(refused) < 2:
            refused.append(1)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(self)

    monkeypatch.setattr(socket.socket, "accept", accept)
    ControlServer(tmp_path, "host", "actor", "namespace", "node", HostedObject())
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60)
        connection.connect(str(tmp_path / f"{os.getpid()}.sock"))
        connection.sendall(frame({"do": "probe"}))
        answer, _ = read_frame(connection.makefile("rb"))
    assert answer["phase"] == "warming"
    assert len(refused) == 2
