"""Compilation of a model's kernels while its weights are read, once per process.

A model whose dry run fails is still served: its kernels are compiled at their first use. This module is independent of models and kernels.
"""

import logging
import threading
from collections.abc import Callable, Hashable

import torch

from pilotlight.engine.loading.dry_run import DryRun, dry_run_launches
from pilotlight.kernels.warm_up import WarmUp, compile_launches

log = logging.getLogger(__name__)

_READY: set[Hashable] = set()


def compile_dry_run(dry_run: DryRun, device: torch.device) -> WarmUp:
    return compile_launches(dry_run_launches(dry_run), device)


class BackgroundWarmUp:
    def __init__(
        self,
        name: str,
        make_dry_run: Callable[[], DryRun],
        device: torch.device,
        computation: Hashable | None = None,
        *,
        has_triton: bool,
        compile_all: Callable[[DryRun, torch.device], WarmUp] = compile_dry_run,
        ready: set[Hashable] = _READY,
    ) -> None:
        """Start to compile, on a CUDA device with Triton.

        `computation`: identifies the kernels, so that a later load can reuse them; None disables reuse. `ready`: identifiers of the computations
        whose kernels this process has loaded onto its device.
        """
        self._name = name
        self._make_dry_run = make_dry_run
        self._device = device
        self._computation = computation
        self._compile_all = compile_all
        self._ready = ready
        self._thread: threading.Thread | None = None
        if device.type == "cuda" and has_triton and computation not in ready:
            self._thread = threading.Thread(target=self._run, name="kernels-warm-up", daemon=True)
            self._thread.start()

    def wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            warmed = self._compile_all(self._make_dry_run(), self._device)
        except Exception:  # any failure only makes the first requests slower
            log.warning(
                "the dry run of %s failed; its kernels are compiled at their first use", self._name, exc_info=True
            )
        else:
            if self._computation is not None:
                self._ready.add(self._computation)
            log.info("%s: %d variants of kernels are ready after %.1f s", self._name, *warmed)
