"""The state of an elastic program: what is committed, and given back after a failure.

A commit copies everything in this process. The copy of rank 0 also goes to the run's directory (`commit_file.py`), from
which all workers go on when they are started again.
"""

from __future__ import annotations

import copy
import queue
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from torch import nn
from torch.optim import Optimizer

from paceline import clock
from paceline.compat.horovod import membership, progress
from paceline.compat.horovod import session as sessions
from paceline.compat.horovod.commit_file import CommitFile
from paceline.compat.horovod.elastic_sampler import ElasticSampler
from paceline.compat.horovod.errors import HostsUpdatedInterrupt
from paceline.compat.horovod.functions import broadcast_object, broadcast_optimizer_state, broadcast_parameters
from paceline.worker.membership.clean_exit import CleanExit

__all__ = ["ObjectState", "State", "TorchState"]


class State:
    """What all states can do. Programs make their own by overriding `save`, `restore`, `sync` and `reset`."""

    commit_count = 0  # of this process

    def __init__(
        self, bcast_object: Callable[..., Any] = broadcast_object, get_rank: Callable[[], int] | None = None
    ) -> None:
        self._bcast_object = bcast_object
        self._host_messages: queue.SimpleQueue[tuple[float, int]] = queue.SimpleQueue()
        self._last_updated_timestamp = 0.0
        self._reset_callbacks: list[Callable[[], None]] = []

    def register_reset_callbacks(self, callbacks: Sequence[Callable[[], None]]) -> None:
        """Have these called after each reset, such as one that sets the learning rate for a new number of workers."""
        self._reset_callbacks.extend(callbacks)

    def on_reset(self) -> None:
        """Take note that all workers have begun again."""
        self._host_messages = queue.SimpleQueue()
        self.reset()
        for callback in self._reset_callbacks:
            callback()

    def on_hosts_updated(self, timestamp: float, update_res: int) -> None:
        """Take note that hosts have come or gone; the next commit tells the program."""
        self._host_messages.put((timestamp, update_res))

    def commit(self) -> None:
        """Save the state, and see whether hosts have come or gone; all workers call this."""
        self.save()
        self.commit_count += 1
        self.check_host_updates()

    def check_host_updates(self) -> None:
        """Raise HostsUpdatedInterrupt, on all workers, where rank 0 has heard of workers that come or go, and CleanExit
        where the run is to stop."""
        before = newest = self._last_updated_timestamp
        what = 0
        while not self._host_messages.empty():
            timestamp, update = self._host_messages.get()
            if timestamp > newest:
                newest, what = timestamp, what | int(update)
        exit_code = None
        if sessions.is_open() and sessions.current_session().rank == 0:
            if change := membership.announced_change():
                newest, what = max(newest, clock.now()), what | change
            exit_code = membership.exit_code_of_stop()
        told = self._bcast_object((before, newest, what, exit_code))
        before, self._last_updated_timestamp, what, exit_code = told
        if exit_code is not None:
            self.leave(exit_code)
        if what or self._last_updated_timestamp > before:
            raise HostsUpdatedInterrupt(what == membership.REMOVED)

    def leave(self, exit_code: int) -> NoReturn:
        """End this worker, as all do: the run was told to stop. Raises CleanExit."""
        raise CleanExit(exit_code)

    def finds_commit(self) -> bool:
        """Return whether there is a commit to begin from that no worker has in memory."""
        return False

    def save(self) -> None:
        """Keep the state as it is now."""
        raise NotImplementedError

    def restore(self) -> None:
        """Go back to what was saved last."""
        raise NotImplementedError

    def sync(self) -> None:
        """Give all workers the state of rank 0."""
        raise NotImplementedError

    def reset(self) -> None:
        """Adapt to the workers of now, before `sync`."""


class ObjectState(State):
    """A state of plain objects, which become attributes. What is saved are copies: programs may change their own."""

    def __init__(
        self,
        bcast_object: Callable[..., Any] = broadcast_object,
        get_rank: Callable[[], int] | None = None,
        **kwargs: Any,
    ) -> None:
        self._saved_state = kwargs
        super().__init__(bcast_object, get_rank)
        self._set_attributes(kwargs)

    def save(self) -> None:
        self._saved_state = copy.deepcopy({name: getattr(self, name) for name in self._saved_state})

    def restore(self) -> None:
        self._set_attributes(copy.deepcopy(self._saved_state))

    def sync(self) -> None:
        if self._saved_state:
            found = self._bcast_object(self._saved_state)
            self._set_attributes(found)
            self._saved_state = copy.deepcopy(found)

    def _set_attributes(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            setattr(self, name, value)


class TorchState(ObjectState):
    """A state of models, optimizers and `ElasticSampler`s, each by its `state_dict`, and of plain objects."""

    _kept: dict[str, Any]  # by name: what has a state_dict
    _copies: dict[str, Any]  # of the last commit

    def __init__(self, model: nn.Module | None = None, optimizer: Optimizer | None = None, **kwargs: Any) -> None:
        given: dict[str, Any] = {"model": model, "optimizer": optimizer, **kwargs}
        kept = {name: one for name, one in given.items() if isinstance(one, (nn.Module, Optimizer, ElasticSampler))}
        self.__dict__["_kept"] = kept
        self.__dict__["_copies"] = {name: _copied(one) for name, one in kept.items()}
        self.__dict__.update(kept)
        self._file: CommitFile | None = None
        self._saved_steps = progress.count()
        self._is_recalled = True  # there is no commit in a file to begin from
        super().__init__(**{name: one for name, one in given.items() if name not in kept})

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._kept:
            self._kept[name] = value
            self._copies[name] = _copied(value)
        super().__setattr__(name, value)

    def save(self) -> None:
        for name, one in self._kept.items():
            self._copies[name] = _copied(one)
        super().save()
        self._saved_steps = progress.count()
        if self._file is not None and sessions.current_session().rank == 0:
            commit = {"copies": dict(self._copies), "objects": dict(self._saved_state), "steps": progress.count()}
            self._file.write(commit)

    def restore(self) -> None:
        for name, one in self._kept.items():
            one.load_state_dict(copy.deepcopy(self._copies[name]))
        super().restore()
        membership.undo(max(0, progress.count() - self._saved_steps))
        progress.begin_at(self._saved_steps)

    def sync(self) -> None:
        self._recall()
        for one in self._kept.values():
            if isinstance(one, nn.Module):
                broadcast_parameters(one.state_dict(), root_rank=0)
            elif isinstance(one, Optimizer):
                broadcast_optimizer_state(one, root_rank=0)
            else:
                one.load_state_dict(broadcast_object(one.state_dict()))
        super().sync()
        for name, one in self._kept.items():
            self._copies[name] = _copied(one)
        self._saved_steps = progress.count()
        self._is_recalled = True  # not before: where rank 0 is lost meanwhile, another one begins from the file

    def reset(self) -> None:
        """Share out the samples that are left among the workers of now: `sync` may be left out."""
        for one in self._kept.values():
            if isinstance(one, ElasticSampler):
                one.reset()

    def keep_in(self, file: CommitFile) -> None:
        """Write every commit to this file from now on. Where it holds one of the run, the first `sync` begins from it.
        Rank 0 alone reads, writes and removes it."""
        self._file, self._is_recalled = file, False

    def finds_commit(self) -> bool:
        return self._file is not None and self._file.read() is not None

    def settle_file(self) -> None:
        """Return when this worker writes nothing more to the file, until its next commit. Raises RunFileError where the
        newest one could not be written."""
        if self._file is not None:
            self._file.wait()

    def leave(self, exit_code: int) -> NoReturn:
        self.settle_file()
        super().leave(exit_code)

    def _recall(self) -> None:
        """In the first `sync`: go back to the commit in the file, on rank 0, which gives it to the others."""
        if self._file is None:
            return
        found = None
        if not self._is_recalled and sessions.current_session().rank == 0:
            found = self._file.read()
        steps = self._bcast_object(progress.count() if found is None else found["steps"])
        self._saved_steps = steps
        if found is not None:
            self._copies.update({name: one for name, one in found["copies"].items() if name in self._kept})
            self._saved_state.update({name: one for name, one in found["objects"].items() if name in self._saved_state})
            self.restore()
        progress.begin_at(steps)

    def forget_file(self) -> None:
        """Remove the file, and write no more of them: the function has come to its end."""
        if self._file is not None and sessions.current_session().rank == 0:
            self._file.remove()
        self._file = None


def _copied(one: Any) -> Any:
    return copy.deepcopy(one.state_dict())
