"""What a role process that breaks down sends home: it decides whether the role is restarted."""

from __future__ import annotations

import pickle

import pytest

from headrace.errors import HeadraceError, InvariantError, ModelError, WorkerLostError
from headrace.runtime.processes import as_headrace_error


def broken(error: BaseException) -> BaseException:
    """As it looks where it is caught: inside a task group's group, with its place."""
    try:
        raise error
    except BaseException as caught:
        return BaseExceptionGroup("unhandled errors in a TaskGroup", [caught])


def test_a_breakdown_is_a_loss_that_names_error_and_place(capsys: pytest.CaptureFixture[str]) -> None:
    error = as_headrace_error(broken(RuntimeError("CUDA error: device-side assert triggered")), "sampler-0")
    assert type(error) is WorkerLostError
    assert str(error).startswith("sampler-0: RuntimeError: CUDA error: device-side assert triggered (") and "test_processes.py:" in str(error)
    assert "Traceback" in capsys.readouterr().err, "the whole of it is on stderr"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("error", [ModelError("no tokenizer"), InvariantError("the cache is older than the weights")])
def test_what_a_role_says_itself_is_no_loss_and_stays_as_it_is(error: HeadraceError) -> None:
    assert as_headrace_error(broken(error), "sampler-0") is error
    assert not isinstance(error, WorkerLostError), "restarting would not help"
