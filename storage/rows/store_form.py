"""Changes of a store's rows as a whole: the optimizer whose state they carry, and the device of the hot tier."""

from dataclasses import replace

import numpy as np
import torch

from oneemb.kernels.backend import Backend
from oneemb.kernels.host_backend import backend_at
from oneemb.kernels.threads import Threads
from oneemb.storage.errors import StorageError
from oneemb.storage.locking.step_lock import alone
from oneemb.storage.policies.policy_engine import PolicyEngine
from oneemb.storage.rows.row_format import RowFormat
from oneemb.storage.store_part import Store, StorePart, no_step, with_store_lock


class StoreForm(StorePart):
    """Part of a store that changes the optimizer and the device of its rows. `engine`: the policy engine; None = no
    table has a policy."""

    def __init__(self, store: Store, engine: PolicyEngine | None, threads: Threads):
        super().__init__(store)
        self._engine, self._threads = engine, threads

    def attach(self, optimizer: str, state: np.ndarray) -> None:
        """Let rows carry the state of this optimizer; `state`, float32 [Z], is the state of a new row. Existing rows
        that no optimizer has trained keep their weights.

        Raises:
            StorageError: the path is in use or unusable, or the rows already hold another optimizer's state.
        """
        alone((self.step_lock,), lambda: self._attach(optimizer, state))

    @with_store_lock
    def _attach(self, optimizer: str, state: np.ndarray) -> None:
        self._store.check_open()
        format, before = self.rows.format.with_state(optimizer, state), self.rows.format
        if not self.rows.built:
            self.rows.build(format)
            return
        fits = format.same_words(before) and (before.optimizer in (None, optimizer) or not format.state)
        if not fits and (self._store.step or before.state and len(self.rows)):
            raise StorageError(
                f"the rows hold the state of {before.optimizer!r} ({before.state_width} values a row), the optimizer"
                f" attached is {optimizer!r} ({len(state)} values); attach {before.optimizer!r}, let its state go by"
                " detach_optimizer('drop'), or start from another path"
            )
        self._relayout(format, self.rows.backend)

    def detach(self, state: str) -> None:
        """Detach the optimizer, so that another one can be attached to rows that it has trained.

        Args:
            state: "keep" = keep the state for an optimizer of the same name, which continues; "drop" = drop the state
                and set the step to 0, for any optimizer; or the name of an optimizer whose state has the same values,
                which continues with them.

        Raises:
            StoreFullError, StorageError: the disk has no room for the rows in both forms; nothing has changed.
        """
        alone((self.step_lock,), lambda: self._detach(state))

    @with_store_lock
    def _detach(self, state: str) -> None:
        self._store.check_open()
        if state == "drop":
            self._relayout(self.rows.format.with_state(None, np.empty(0, np.float32)), self.rows.backend)
            if self._engine is not None:
                self._engine.usage.begin_steps(self._store.step)
            self._store.step = 0
            self._store.changes += 1
        elif state != "keep" and self.rows.format.state:
            self._relayout(replace(self.rows.format, optimizer=state), self.rows.backend)

    def move_to(self, device: torch.device) -> None:
        """Move the hot tier, with all rows and the step, to a GPU or to the host.

        Raises:
            StoreFullError, StorageError: there is no room for the rows, on the device or, during the move, on the disk.
            RuntimeError, ImportError: CUDA cannot be used.
        """
        backend = backend_at(device, self._threads)
        if backend.place != self.rows.backend.place:
            self._move_to(backend)

    @no_step("move_to")
    @with_store_lock
    def _move_to(self, backend: Backend) -> None:
        self._store.check_open()
        self._relayout(self.rows.format, backend)
        self._store.replaced += 1

    def _relayout(self, format: RowFormat, backend: Backend) -> None:
        if self._engine is not None:
            self._engine.move_out()
        try:
            self.rows.relayout(format, backend, self._store.step)
        except BaseException as error:
            if not self.rows.whole:
                self.store_lock.cut_short(error)
            raise
