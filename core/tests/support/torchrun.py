"""Tests on several processes: ``@pytest.mark.processes(2)`` on an ordinary test.

::

    @pytest.mark.processes(2)
    def test_ranks_agree(shared_path): ...

Such a test does not run in pytest's own process. All of a run that ask for the same number of processes run together in
one ``torchrun``, each rank a pytest of its own, so that fixtures, parametrization and ``pytest.raises`` work as ever; a
start of torchrun costs seconds, and is paid once. The test passes when it passed on every rank; else it fails with what
each rank said. After a failure the ranks may be anywhere, so the tests that are left get a new ``torchrun``.

A gloo group of all ranks is there when the test begins; its collectives give up after ``GROUP_SECONDS``. A test marked
``processes(2, group=False)`` begins without a group, and with torchrun's variables, as a user's script does.

:func:`launch` starts torchrun on anything else: a script, ``"-c"``-style code in a file, the example.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

FOLDER = "TORCHRUN_TESTS"  # the variable that tells a rank where the tests' results go; not there outside of torchrun
GROUP_SECONDS = 30
TEST_SECONDS = 120  # then the rank ends, with the stacks of its threads


def launch(
    *arguments: str | Path, processes: int, timeout: float = 120, cwd: str | Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run ``torchrun --nproc-per-node processes arguments...``, without settings from outside.

    Args:
        *arguments: A script and what it takes, or ``"-m"``, a module and what it takes.
        processes: How many.
        timeout: Seconds; then everything that was started is ended, and ``returncode`` is -9.
        cwd: The folder to run in.
        **variables: Environment variables besides those of this process.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1"]
    inherited = {name: value for name, value in os.environ.items() if not _FROM_OUTSIDE.match(name)}
    started = subprocess.Popen(
        [*command, *map(str, arguments)],
        env={**inherited, "OMP_NUM_THREADS": "1", **variables},
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        out, err = started.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        started.terminate()  # torchrun passes it on to the ranks, and kills those that do not listen
        out, err = started.communicate()
        return subprocess.CompletedProcess(command, -9, out, f"{err}\nNot done after {timeout} s.")
    return subprocess.CompletedProcess(command, started.returncode, out, err)


_FROM_OUTSIDE = re.compile(r"(TORCHRIG|ACCELERATE|TORCHELASTIC|TORCHRUN|GROUP)_|(LOCAL_)?(RANK|WORLD_SIZE)$|MASTER_")


def pytest_configure(config: pytest.Config) -> None:
    """Take the part of a rank, or of the process that starts the ranks."""
    config.addinivalue_line("markers", "processes(count, group=True): runs on so many processes; see torchrun.py")
    config.pluginmanager.register(Rank(Path(os.environ[FOLDER])) if FOLDER in os.environ else Starter(config))


@pytest.fixture
def shared_path(request: pytest.FixtureRequest) -> Path:
    """An empty folder that is the same for all ranks of a test."""
    folder = Path(os.environ[FOLDER]) / re.sub(r"\W+", "_", request.node.nodeid)
    folder.mkdir(exist_ok=True)
    return folder


def _asked(item: pytest.Item) -> tuple[int, bool] | None:
    """How many processes a test asks for, and whether with a group; ``None`` for one that asks for none."""
    mark = item.get_closest_marker("processes")
    return None if mark is None else (mark.args[0], mark.kwargs.get("group", True))


class Starter:
    """Starts the ranks when the first of their tests is due, and gives each test what its ranks said."""

    def __init__(self, config: pytest.Config) -> None:
        self._root = config.rootpath
        self._waiting: dict[int, list[str]] = {}
        self._failures: dict[str, str] = {}

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Group the tests that were selected; their fixtures are made on the ranks alone."""
        for item in session.items:
            asked = _asked(item)
            if asked is not None and isinstance(item, pytest.Function):
                item.fixturenames = []
                self._waiting.setdefault(asked[0], []).append(item.nodeid)

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Look up what became of a test, rather than run it here."""
        asked = _asked(pyfuncitem)
        if asked is None:
            return None
        self._run(asked[0], self._waiting.pop(asked[0], []))
        if pyfuncitem.nodeid in self._failures:
            pytest.fail(self._failures[pyfuncitem.nodeid], pytrace=False)
        return True

    def _run(self, processes: int, tests: list[str]) -> None:
        while tests:
            with tempfile.TemporaryDirectory(prefix="torchrun-tests-") as folder:
                done = self._launch(processes, tests, Path(folder))
                tests = self._read(processes, tests, Path(folder), f"{done.stdout}\n{done.stderr}"[-6000:])

    def _launch(self, processes: int, tests: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
        (folder / "tests.json").write_text(json.dumps(tests))
        files = dict.fromkeys(each.partition("::")[0] for each in tests)
        pytest_arguments = ("-q", "-p", "no:cacheprovider", "--rootdir", str(self._root), *files)
        return launch(
            "-m", "pytest", *pytest_arguments,
            processes=processes, timeout=60 + TEST_SECONDS * len(tests), cwd=self._root, **{FOLDER: str(folder)},
        )  # fmt: skip

    def _read(self, processes: int, tests: list[str], folder: Path, output: str) -> list[str]:
        """Note what failed; returns the tests that were not run."""
        for place, test in enumerate(tests):
            said = {rank: _said(folder, place, rank) for rank in range(processes)}
            if all(each == "" for each in said.values()):
                continue
            lost = f"the process ended, or never came back\n{output}"
            told = {rank: lost if each is None else each for rank, each in said.items() if each != ""}
            self._failures[test] = "\n".join(f"rank {rank}: {each}" for rank, each in told.items())
            return tests[place + 1 :]
        return []


def _said(folder: Path, place: int, rank: int) -> str | None:
    """What went wrong in a test on a rank: nothing, a text, or ``None`` for a rank that was never done with it."""
    result, stacks = _result(folder, place, rank), folder / f"stacks-{rank}"
    if result.exists():
        return result.read_text()
    return f"not done in {TEST_SECONDS} s\n{text}" if stacks.exists() and (text := stacks.read_text()) else None


def _result(folder: Path, place: int, rank: int) -> Path:
    return folder / f"result-{place}-{rank}"


class Rank:
    """Runs the tests of one rank, in step with the others.

    Args:
        folder: Where the list of the tests is, and where the results go.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._rank, self._size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self._tests: list[str] = json.loads((folder / "tests.json").read_text())
        self._failed: list[str] = []
        self._stacks = (folder / f"stacks-{self._rank}").open("w")

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests that are asked for, in the order that all ranks have."""
        found = {item.nodeid: item for item in items}
        items[:] = [found[each] for each in self._tests]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        """Run a test, and wait for the other ranks; the first failure anywhere ends the run."""
        place = self._tests.index(item.nodeid)
        self._failed = []
        faulthandler.dump_traceback_later(TEST_SECONDS, exit=True, file=self._stacks)
        self._make_group(place, wanted=bool((_asked(item) or (0, True))[1]))
        result = yield
        _publish(_result(self._folder, place, self._rank), "\n".join(self._failed))
        if self._failed or any(self._wait(place, rank) for rank in range(self._size)):
            item.session.shouldstop = "a rank failed"
        faulthandler.cancel_dump_traceback_later()
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep what failed."""
        if not report.passed:
            printed = "".join(f"\n{name}\n{text}" for name, text in report.sections)
            self._failed.append(f"{report.when} {report.outcome}\n{report.longreprtext}{printed}")

    def pytest_unconfigure(self) -> None:
        """Leave no group behind: PyTorch warns of it."""
        _destroy_group()

    def _wait(self, place: int, rank: int) -> str:
        """What another rank says of the test."""
        result = _result(self._folder, place, rank)
        while not result.exists():  # for ever: faulthandler ends this rank, or torchrun does when another one ended
            time.sleep(0.002)
        return result.read_text()

    def _make_group(self, place: int, wanted: bool) -> None:
        if not wanted:
            _destroy_group()
            self._agree_on_a_port(place)
            return
        import torch.distributed as dist

        if not dist.is_initialized():
            store, patience = f"file://{self._folder}/group-{place}", datetime.timedelta(seconds=GROUP_SECONDS)
            dist.init_process_group("gloo", init_method=store, rank=self._rank, world_size=self._size, timeout=patience)

    def _agree_on_a_port(self, place: int) -> None:
        """A store of its own for each group that a test starts: the one that torchrun brings remembers the last."""
        file = self._folder / f"port-{place}"
        if self._rank == 0:
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                _publish(file, str(free.getsockname()[1]))
        while not file.exists():
            time.sleep(0.002)
        os.environ.update(TORCHELASTIC_USE_AGENT_STORE="False", MASTER_ADDR="127.0.0.1", MASTER_PORT=file.read_text())


def _destroy_group() -> None:
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_initialized():
        with contextlib.suppress(Exception):  # after a failure, the other ranks are gone
            dist.destroy_process_group()


def _publish(file: Path, text: str) -> None:
    """Write a file that others wait for: it is there when it is complete."""
    unfinished = file.with_suffix(".unfinished")
    unfinished.write_text(text)
    unfinished.rename(file)
