"""A process that is forked inside of the learner's block ends without an effect on its parent's learner."""

from __future__ import annotations

import gc
import os
import sys
from multiprocessing.connection import Connection
from pathlib import Path

from atoll.learner.api import Learner
from tests.learner import runs
from tests.learner.in_process import train
from tests.learner.runs import LIMIT_S, Child, Run, config
from tests.learner.small_models import work


def forking_child(directory: Path, address: str, log: Path, pipe: Connection) -> None:
    """Run a learner that forks during its training. The child leaves the block by SystemExit."""
    runs._begin(log)
    job = work()
    try:
        with Learner(
            job.model, job.optimizer, address, learner=1, run_directory=directory, join_timeout_s=LIMIT_S
        ) as learner:
            train(learner, job, 20)
            if os.fork() == 0:
                sys.exit(3)
            _, status = os.wait()
            pipe.send(("forked", os.waitstatus_to_exitcode(status)))
            train(learner, job)
        pipe.send(("ended", learner.finished))
    except SystemExit as end:
        del learner
        gc.collect()  # finalizers run, as at the end of an interpreter
        os._exit(int(str(end.code)))
    except BaseException as error:
        pipe.send(("failed", repr(error)))


def test_forked_child_that_exits_leaves_the_learner_of_its_parent_alone(tmp_path):
    with Run(tmp_path, config(budget_merges=60)) as run:
        one = Child("learner 1", tmp_path / "logs" / "learner-1.log", forking_child, (tmp_path, run.address))
        run.children.append(one)
        assert one.expect("forked") == 3, one.logged()
        assert one.expect("ended") is True
        assert run.syncer.expect("ended") is True
        assert not run.log_lines(run.syncer, "has reconnected"), "the child closed the connection of its parent"
        run.assert_clean()
